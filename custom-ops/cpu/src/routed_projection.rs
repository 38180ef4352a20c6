//! RoutedProjection on a CPU. Heads are blocks of output columns.

use crate::epilogue::{Epilogue, Finish, Replace};
use crate::gemm::{Matrix, Panels, Product, Start, Store};
use crate::head_linear::{self, Call, HeadLinear, Heads, Item, Tensors, Workspace};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, ToPack, Work};
use crate::packed::Packed;
use crate::selection::Selection;
use moh_operators::routed_projection::{Inputs, Problem};
use moh_operators::{DType, Element, Error, RoutedProjection};
use std::ops::Range;

impl CpuOperator for RoutedProjection {
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

impl HeadLinear for RoutedProjection {
    const HEADS: Heads = Heads::Columns;

    fn panels<I: Isa>(p: &Problem) -> Panels {
        Panels::new::<I>(p.width, p.num_heads, p.block)
    }

    fn matrix<T: Element>(p: &Problem, weight: &[T]) -> Matrix<T> {
        let data = weight.as_ptr();
        match p.per_head() {
            true => Matrix::Columns { data, stride: p.block, block: p.block, block_stride: p.width * p.block },
            false => Matrix::Rows { data, stride: p.width },
        }
    }

    fn unit(_: &Problem) -> usize {
        1
    }

    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64 {
        let panels = &call.weight.panels;
        let first = workspace.load(call, &item);
        let used: Vec<(usize, &[u32])> = panels
            .blocks(&item.panels)
            .flat_map(|head| of_item(&item, panels, head).map(move |panel| (panel, head)))
            .map(|(panel, head)| (panel, item.part_of(selection.tokens(item.chunk, head))))
            .filter(|(_, tokens)| !tokens.is_empty())
            .collect();
        for head in panels.blocks(&item.panels) {
            let columns = panels.columns(&of_item(&item, panels, head));
            clear(call, &item, item.part_of(selection.tokens(item.chunk, head)), columns);
        }
        // SAFETY: elements are floats if sums are in place.
        let floats = |bias: &'_ [T]| unsafe { std::slice::from_raw_parts(bias.as_ptr().cast::<f32>(), bias.len()) };
        let bias = call.bias.filter(|_| workspace.in_place()).map(floats);
        let mut macs = 0;
        let mut finished = item.panels.start;
        let mut blocks = workspace.gemm.blocks(panels.k).peekable();
        while let Some(k) = blocks.next() {
            for (i, &(panel, rows)) in used.iter().enumerate() {
                let next = match used.get(i + 1) {
                    Some(&(panel, _)) => Some((panel, k.clone())),
                    None => match blocks.peek() {
                        Some(k) => Some((used[0].0, k.clone())),
                        None => workspace.after(call, &item),
                    },
                };
                let column = panels.padded(first, panel);
                let products = [Product { rows, k: k.clone() }];
                let bias = bias.map(|bias| &bias[panels.columns(&(panel..panel + 1))]);
                let begin = Start::of_block(&k, bias);
                // SAFETY: from each input on, x has `width` elements; a row of sums has room for the span's padded
                // panels; the weight has all elements of its panels.
                macs += unsafe {
                    let Workspace { gemm, rows, .. } = &mut *workspace;
                    gemm.multiply(call.isa, rows, &products, &call.weight, panel, column, next, begin)
                };
                if let Some(epilogue) = call.epilogue
                    && k.end == panels.k
                    && workspace.in_place()
                {
                    let sums = panels.columns(&(finished..panel + 1));
                    if sums.len() >= AT_ONCE || panel + 1 == item.panels.end {
                        finish(call, epilogue, &item, sums);
                        finished = panel + 1;
                    }
                }
            }
        }
        if workspace.in_place() {
            return macs;
        }
        for head in panels.blocks(&item.panels) {
            let of_head = of_item(&item, panels, head);
            let (columns, sums) = (panels.columns(&of_head), panels.padded(item.panels.start, of_head.start));
            let tokens = item.part_of(selection.tokens(item.chunk, head));
            workspace.pairs.clear();
            for &token in tokens {
                // SAFETY: a row of sums has room for the span's padded panels.
                let sums = unsafe { workspace.rows[token as usize].output.add(sums).cast_const() };
                workspace.pairs.push((sums, output(call, &item, token, columns.start)));
            }
            let (rows, bias) = (&workspace.pairs, call.bias.map(|bias| &bias[columns.clone()]));
            match call.epilogue {
                // Before they are rounded. An epilogue is one of all tokens: the pairs are consecutive.
                Some(epilogue) if T::DTYPE != DType::F32 => {
                    let first = item.tokens.start + item.part.start;
                    call.isa.vectorize(Finish { epilogue, rows, first, columns, bias });
                }
                epilogue => {
                    let bias = bias.map(<[T]>::as_ptr);
                    call.isa.vectorize(Store { rows, columns: columns.len(), bias });
                    if let Some(epilogue) = epilogue {
                        finish(call, epilogue, &item, columns);
                    }
                }
            }
        }
        macs
    }
}

/// Columns of sums that are replaced together, at least: of fewer, memory gives each row's too slowly, and the caches do not hold many more.
const AT_ONCE: usize = 64;

/// Replaces these columns of the item's sums by what becomes of them. Every token has them.
fn finish<I: Isa, T: Element>(call: &Call<'_, I, T>, epilogue: &Epilogue<'_, T>, item: &Item, columns: Range<usize>) {
    let sums = output(call, item, item.part.start as u32, columns.start);
    let rows = item.tokens.start + item.part.start..item.tokens.start + item.part.end;
    call.isa.vectorize(Replace { epilogue, sums, rows, columns });
}

/// The panels of a head that are in the item's span.
fn of_item(item: &Item, panels: &Panels, head: usize) -> Range<usize> {
    let of_head = panels.of_block(head);
    of_head.start.max(item.panels.start)..of_head.end.min(item.panels.end)
}

fn output<I, T>(call: &Call<'_, I, T>, item: &Item, token: u32, column: usize) -> *mut T {
    let p = call.problem;
    // SAFETY: the output has num_heads * block columns for every token.
    unsafe { call.output.0.add((item.tokens.start + token as usize) * p.num_heads * p.block + column) }
}

/// Writes 0 to `columns` of the item's tokens that are not in `used`.
fn clear<I, T: Element>(call: &Call<'_, I, T>, item: &Item, used: &[u32], columns: Range<usize>) {
    let mut used = used.iter().copied().peekable();
    for token in item.part.start as u32..item.part.end as u32 {
        if used.next_if_eq(&token).is_none() {
            // SAFETY: these columns of this token belong to this item alone.
            let block =
                unsafe { std::slice::from_raw_parts_mut(output(call, item, token, columns.start), columns.len()) };
            block.fill(T::from_f32(0.0));
        }
    }
}
