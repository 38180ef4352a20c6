//! RoutedProjection: heads are columns of the output.

use super::{Call, Item, Linear, Workspace};
use crate::cpu::gemm::{Matrix, Part, Row, Store, padded};
use crate::cpu::isa::{Isa, MAX_LANES};
use crate::cpu::selection::Selection;
use crate::shape::routed_linear::Problem;
use crate::tensor::Element;
use std::ops::Range;

pub(super) struct Projection;

impl Linear for Projection {
    fn columns(p: &Problem) -> usize {
        p.num_heads * p.block
    }

    fn depth(p: &Problem) -> usize {
        p.width
    }

    fn unit(p: &Problem) -> usize {
        p.block
    }

    fn sums(p: &Problem, span: usize) -> usize {
        // Every head's columns are padded, and a span may begin and end within a head.
        padded(span) + (span.div_ceil(p.block) + 1) * MAX_LANES
    }

    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64 {
        let p = call.problem;
        let weight = weight(call);
        let heads = item.columns.start / p.block..item.columns.end.div_ceil(p.block);
        for head in heads.clone() {
            let columns = of_item(&item, p, head..head + 1);
            clear(call, &item, selection.tokens(item.chunk, head), columns);
        }
        let input = |token: usize| call.x[(item.tokens.start + token) * p.width..].as_ptr();
        workspace.rows.clear();
        for token in 0..item.tokens.len() {
            let row = Row { input: input(token), output: workspace.sums(token) };
            workspace.rows.push(row);
        }
        let mut column = 0;
        let mut parts = Vec::new();
        for run in selection.runs(item.chunk, heads) {
            let n = of_item(&item, p, run.heads);
            let width = padded(n.len());
            parts.push(Part { rows: run.tokens, n, column });
            column += width;
        }
        // SAFETY: x has `width` elements from each input on; a row of sums has room for every part, padded; the weight has
        // all columns of the output.
        let macs = unsafe {
            let Workspace { gemm, rows, .. } = &mut *workspace;
            gemm.multiply(call.isa, rows, &parts, &weight, 0..p.width, None, true)
        };
        for part in parts {
            workspace.pairs.clear();
            for &token in part.rows {
                // SAFETY: a row of sums has room for every part.
                let sums = unsafe { workspace.sums(token as usize).add(part.column).cast_const() };
                workspace.pairs.push((sums, output(call, &item, token, part.n.start)));
            }
            let bias = call.bias.map(|bias| bias[part.n.clone()].as_ptr());
            call.isa.vectorize(Store { rows: &workspace.pairs, columns: part.n.len(), bias });
        }
        macs
    }
}

/// The columns of `heads` that belong to the item.
fn of_item(item: &Item, p: &Problem, heads: Range<usize>) -> Range<usize> {
    (heads.start * p.block).max(item.columns.start)..(heads.end * p.block).min(item.columns.end)
}

fn weight<I, T>(call: &Call<'_, I, T>) -> Matrix<T> {
    let (p, data) = (call.problem, call.weight.as_ptr());
    match p.per_head {
        true => Matrix::Columns { data, stride: p.block, block: p.block, block_stride: p.width * p.block },
        false => Matrix::Rows { data, stride: p.width },
    }
}

fn output<I, T>(call: &Call<'_, I, T>, item: &Item, token: u32, column: usize) -> *mut T {
    let p = call.problem;
    // SAFETY: the output has num_heads * block columns for every token.
    unsafe { call.output.0.add((item.tokens.start + token as usize) * p.num_heads * p.block + column) }
}

/// Writes 0 to `columns` of the item's tokens, but for those `used`.
fn clear<I, T: Element>(call: &Call<'_, I, T>, item: &Item, used: &[u32], columns: Range<usize>) {
    let mut used = used.iter().copied().peekable();
    for token in 0..item.tokens.len() as u32 {
        if used.next_if_eq(&token).is_none() {
            // SAFETY: these columns of this token belong to this item alone.
            let block =
                unsafe { std::slice::from_raw_parts_mut(output(call, item, token, columns.start), columns.len()) };
            block.fill(T::from_f32(0.0));
        }
    }
}
