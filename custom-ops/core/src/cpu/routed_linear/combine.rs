//! RoutedCombine: heads are parts of the inner length, and add up.

use super::{Call, Item, Linear, Workspace};
use crate::cpu::gemm::{Matrix, Part, Row, Store, padded};
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

    fn sums(_: &Problem, span: usize) -> usize {
        padded(span)
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
        workspace.rows.clear();
        for token in 0..tokens {
            let input = call.x[(first + token) * p.num_heads * p.block..].as_ptr();
            let row = Row { input, output: workspace.sums(token) };
            workspace.rows.push(row);
        }
        let weight = weight(call);
        let mut macs = 0;
        let mut runs = selection.runs(item.chunk, 0..p.num_heads).peekable();
        while let Some(run) = runs.next() {
            let parts = [Part { rows: run.tokens, n: item.columns.clone(), column: 0 }];
            let k = run.heads.start * p.block..run.heads.end * p.block;
            let next = runs.peek().map(|run| run.heads.start * p.block);
            // SAFETY: x has all heads' blocks from each input on; a row of sums has room for a padded span; the weight has
            // all heads' blocks for all columns of the output.
            macs += unsafe {
                let Workspace { gemm, rows, .. } = &mut *workspace;
                gemm.multiply(call.isa, rows, &parts, &weight, k, next, false)
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

fn weight<I, T>(call: &Call<'_, I, T>) -> Matrix<T> {
    let (p, data) = (call.problem, call.weight.as_ptr());
    match p.per_head {
        true => Matrix::Columns { data, stride: p.width, block: p.width, block_stride: 0 },
        false => Matrix::Rows { data, stride: p.num_heads * p.block },
    }
}
