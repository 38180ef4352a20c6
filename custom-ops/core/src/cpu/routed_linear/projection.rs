//! RoutedProjection: heads are columns of the output.

use super::{Call, Item, Linear, Workspace};
use crate::cpu::gemm::{Matrix, Row, Store};
use crate::cpu::isa::Isa;
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
        let mut macs = 0;
        for run in selection.runs(item.chunk, heads) {
            let n = of_item(&item, p, run.heads);
            let input = |token: u32| call.x[(item.tokens.start + token as usize) * p.width..].as_ptr();
            workspace.rows.clear();
            for (row, &token) in run.tokens.iter().enumerate() {
                let sums = workspace.sums(row);
                workspace.rows.push(Row { input: input(token), output: sums });
            }
            // SAFETY: x has `width` elements from each input on; a row of sums has room for a padded span; the weight has
            // all columns of the output.
            macs += unsafe {
                let Workspace { gemm, rows, .. } = &mut *workspace;
                gemm.multiply(call.isa, rows, &weight, p.width, n.clone(), true)
            };
            workspace.pairs.clear();
            for (row, &token) in run.tokens.iter().enumerate() {
                let sums = workspace.sums(row).cast_const();
                workspace.pairs.push((sums, output(call, &item, token, n.start)));
            }
            let bias = call.bias.map(|bias| bias[n.clone()].as_ptr());
            call.isa.vectorize(Store { rows: &workspace.pairs, columns: n.len(), bias });
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
