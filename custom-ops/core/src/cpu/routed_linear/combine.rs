//! RoutedCombine: heads are parts of the inner length, and add up.

use super::{Call, Item, Linear, Workspace};
use crate::cpu::gemm::{Matrix, Panels, Product, Store};
use crate::cpu::isa::Isa;
use crate::cpu::selection::{Run, Selection};
use crate::shape::routed_linear::Problem;
use crate::tensor::Element;
use std::ops::Range;

pub(super) struct Combine;

impl Linear for Combine {
    fn panels<I: Isa>(p: &Problem) -> Panels {
        Panels::new::<I>(p.num_heads * p.block, 1, p.width)
    }

    fn matrix<T: Element>(p: &Problem, weight: &[T]) -> Matrix<T> {
        let data = weight.as_ptr();
        match p.per_head {
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
        workspace.load(call, &item);
        let columns = panels.columns(&item.panels);
        let bias = call.bias.map(|bias| &bias[columns.clone()]);
        let width = panels.padded(item.panels.start, item.panels.end);
        workspace.begin(0..item.tokens.len(), 0, width, bias.filter(|_| workspace.in_place()));
        let mut macs = 0;
        let mut blocks = workspace.gemm.blocks(panels.k).peekable();
        while let Some(k) = blocks.next() {
            let products = products(p, selection, item.chunk, &k);
            for panel in item.panels.clone() {
                let next = match panel + 1 < item.panels.end {
                    true => Some((panel + 1, k.clone())),
                    false => blocks.peek().map(|k| (item.panels.start, k.clone())),
                };
                let column = panels.padded(item.panels.start, panel);
                // SAFETY: x has all heads' blocks from each input on; a row of sums has room for the span's padded panels; the
                // weight has what its panels say.
                macs += unsafe {
                    let Workspace { gemm, rows, .. } = &mut *workspace;
                    gemm.multiply(call.isa, rows, &products, &call.weight, panel, column, next, false)
                };
            }
        }
        if workspace.in_place() {
            return macs;
        }
        workspace.pairs.clear();
        for (row, token) in workspace.rows.iter().zip(item.tokens) {
            // SAFETY: the output has `width` columns for every token.
            let output = unsafe { call.output.0.add(token * p.width + columns.start) };
            workspace.pairs.push((row.output.cast_const(), output));
        }
        let bias = bias.map(<[T]>::as_ptr);
        call.isa.vectorize(Store { rows: &workspace.pairs, columns: columns.len(), bias });
        macs
    }
}

/// What the heads of inner indices `k` are multiplied with.
fn products<'a>(p: &Problem, selection: &'a Selection, chunk: usize, k: &Range<usize>) -> Vec<Product<'a>> {
    let heads = k.start / p.block..k.end.div_ceil(p.block);
    let product = |Run { heads, tokens }: Run<'a>| Product {
        rows: tokens,
        k: (heads.start * p.block).max(k.start)..(heads.end * p.block).min(k.end),
    };
    selection.runs(chunk, heads).map(product).collect()
}
