//! RoutedCombine on a CPU. Heads are ranges of the inner dimension, and their products are summed.

use crate::gemm::{Matrix, Panels, Product, Start, Store};
use crate::head_linear::{self, Call, HeadLinear, Heads, Item, Tensors, Workspace};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, ToPack, Work};
use crate::packed::Packed;
use crate::selection::{Run, Selection};
use moh_operators::routed_combine::{Inputs, Problem};
use moh_operators::{Element, Error, RoutedCombine};
use std::ops::Range;

impl CpuOperator for RoutedCombine {
    type Output<T: Element> = T;

    fn uses(_: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Inputs { x, weight, head_gates: gates, bias } = call.inputs;
        let tensors = Tensors { x, weight, gates, bias, epilogue: None };
        head_linear::run::<I, T, Self>(call.isa, call.unit, call.problem, tensors, call.output, call.host)
    }

    fn pack<I: Isa, T: Element>(isa: I, of: &ToPack<'_, Self, T>) -> Result<Option<Packed>, Error> {
        head_linear::pack(isa, of, |shape| Self::of_weight(of.attributes, shape))
    }
}

impl HeadLinear for RoutedCombine {
    const HEADS: Heads = Heads::Inner;

    fn panels<I: Isa>(p: &Problem) -> Panels {
        Panels::new::<I>(p.num_heads * p.block, 1, p.width)
    }

    fn matrix<T: Element>(p: &Problem, weight: &[T]) -> Matrix<T> {
        let data = weight.as_ptr();
        match p.per_head() {
            true => Matrix::Columns { data, stride: p.width, block: p.width, block_stride: 0 },
            false => Matrix::Rows { data, stride: p.num_heads * p.block },
        }
    }

    fn unit(p: &Problem) -> usize {
        p.block
    }

    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64 {
        let (p, panels) = (call.problem, &call.weight.panels);
        let first = workspace.load(call, &item);
        let columns = panels.columns(&item.panels);
        let bias = call.bias.map(|bias| &bias[columns.clone()]);
        let width = panels.padded(item.panels.start, item.panels.end);
        let start = panels.padded(first, item.panels.start);
        workspace.begin(item.part.clone(), start, width, bias.filter(|_| workspace.in_place()));
        let mut macs = 0;
        let mut blocks = workspace.gemm.blocks(panels.k).peekable();
        while let Some(k) = blocks.next() {
            let products = products(p, selection, &item, &k);
            for panel in item.panels.clone() {
                let next = match panel + 1 < item.panels.end {
                    true => Some((panel + 1, k.clone())),
                    false => match blocks.peek() {
                        Some(k) => Some((item.panels.start, k.clone())),
                        None => workspace.after(call, &item),
                    },
                };
                let column = panels.padded(first, panel);
                // SAFETY: from each input on, x has all heads' blocks; a row of sums has room for the span's padded
                // panels; the weight has all elements of its panels.
                macs += unsafe {
                    let Workspace { gemm, rows, .. } = &mut *workspace;
                    gemm.multiply(call.isa, rows, &products, &call.weight, panel, column, next, Start::Sums)
                };
            }
        }
        if workspace.in_place() {
            return macs;
        }
        workspace.pairs.clear();
        for (row, token) in workspace.rows.iter().zip(item.tokens).take(item.part.end).skip(item.part.start) {
            // SAFETY: the output has `width` columns for every token.
            let output = unsafe { call.output.0.add(token * p.width + columns.start) };
            workspace.pairs.push((row.output.cast_const(), output));
        }
        let bias = bias.map(<[T]>::as_ptr);
        call.isa.vectorize(Store { rows: &workspace.pairs, columns: columns.len(), bias });
        macs
    }
}

/// The products for the heads within inner indices `k`.
fn products<'a>(p: &Problem, selection: &'a Selection, item: &Item, k: &Range<usize>) -> Vec<Product<'a>> {
    let heads = k.start / p.block..k.end.div_ceil(p.block);
    let product = |Run { heads, tokens }: Run<'a>| Product {
        rows: item.part_of(tokens),
        k: (heads.start * p.block).max(k.start)..(heads.end * p.block).min(k.end),
    };
    selection.runs(item.chunk, heads).map(product).collect()
}
