//! RoutedCombine: heads are parts of the inner length, and add up.

use super::{Call, Item, Linear, Workspace};
use crate::cpu::gemm::{Matrix, Row, Store};
use crate::cpu::isa::Isa;
use crate::cpu::selection::Selection;
use crate::shape::routed_linear::Problem;
use crate::tensor::Element;

pub(super) struct Combine;

impl Linear for Combine {
    fn columns(p: &Problem) -> usize {
        p.width
    }

    fn depth(p: &Problem) -> usize {
        p.num_heads * p.block
    }

    fn unit(_: &Problem) -> usize {
        super::NARROW
    }

    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64 {
        let p = call.problem;
        let (first, tokens) = (item.tokens.start, item.tokens.len());
        let pitch = workspace.pitch;
        workspace.sums.slice(0..tokens * pitch).fill(0.0);
        let mut macs = 0;
        for run in selection.runs(item.chunk, 0..p.num_heads) {
            let start = run.heads.start * p.block;
            workspace.rows.clear();
            for &token in run.tokens {
                let input = call.x[(first + token as usize) * p.num_heads * p.block + start..].as_ptr();
                let sums = workspace.sums(token as usize);
                workspace.rows.push(Row { input, output: sums });
            }
            let weight = weight(call, start);
            // SAFETY: x has the run's blocks from each input on; a row of sums has room for a padded span; the weight has
            // the run's blocks for all columns of the output.
            macs += unsafe {
                let Workspace { gemm, rows, .. } = &mut *workspace;
                gemm.multiply(call.isa, rows, &weight, run.heads.len() * p.block, item.columns.clone(), false)
            };
        }
        workspace.pairs.clear();
        for token in 0..tokens {
            let sums = workspace.sums(token).cast_const();
            // SAFETY: the output has `width` columns for every token.
            let output = unsafe { call.output.0.add((first + token) * p.width + item.columns.start) };
            workspace.pairs.push((sums, output));
        }
        let bias = call.bias.map(|bias| bias[item.columns.clone()].as_ptr());
        call.isa.vectorize(Store { rows: &workspace.pairs, columns: item.columns.len(), bias });
        macs
    }
}

/// The weight from inner index `start` on.
fn weight<I, T>(call: &Call<'_, I, T>, start: usize) -> Matrix<T> {
    let p = call.problem;
    match p.per_head {
        true => {
            let data = call.weight[start * p.width..].as_ptr();
            Matrix::Columns { data, stride: p.width, block: p.width, block_stride: 0 }
        }
        false => Matrix::Rows { data: call.weight[start..].as_ptr(), stride: p.num_heads * p.block },
    }
}
