//! The computation of one tile: selected queries of one head.

use super::output::Output;
use super::rows::{MAX_ROWS, Rows};
use super::scores::{Load, Scores};
use super::weights::Weights;
use super::workspace::Workspace;
use super::{Call, Head};
use crate::gather::{Gather, Log2Bias};
use crate::isa::Isa;
use moh_operators::Element;

/// Computes the outputs of `tokens`, at most one tile. The band starts at row `first` of the grid. Returns the number
/// of multiply-accumulate operations.
pub(super) fn attend<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    head: Head,
    first: usize,
    tokens: &[u32],
    workspace: &mut Workspace<'_>,
) -> u64 {
    let (p, layout, isa) = (call.problem, workspace.layout, call.isa);
    let (cells, vectors) = (p.cells(), tokens.len().div_ceil(I::LANES));
    let rows = &Rows::new(call, head, first, tokens, workspace);

    let mut queries = [std::ptr::null(); MAX_ROWS];
    let mut biases = [std::ptr::null(); MAX_ROWS];
    for i in 0..vectors * I::LANES {
        let token = tokens[i.min(tokens.len() - 1)] as usize;
        queries[i] = call.row(call.query, head, p.tokens(), token).as_ptr();
        biases[i] = call.pooled_bias[(head.index * p.tokens() + token) * p.pooled..].as_ptr();
    }
    let load = Load { queries: &queries[..vectors * I::LANES], problem: p, workspace, rows };
    isa.vectorize(load);
    // SAFETY: in the scores, `width` floats for each pooled token follow those of the window.
    let output = unsafe { workspace.at(layout.scores).add(cells * layout.width) };
    let biases = &biases[..tokens.len()];
    isa.vectorize(Gather { rows: biases, dim: p.pooled, scale: Log2Bias, output, width: layout.width });

    isa.vectorize(Scores { problem: p, workspace, rows, vectors });
    let sums = isa.vectorize(Weights { problem: p, workspace, rows, vectors });
    let mut outputs = [std::ptr::null_mut(); MAX_ROWS];
    for (output, &token) in outputs.iter_mut().zip(tokens) {
        *output = call.output(head, token as usize);
    }
    let outputs = &outputs[..tokens.len()];
    let inside = isa.vectorize(Output { outputs, problem: p, workspace, rows, factors: &sums });
    ((2 * (cells + p.pooled) * vectors * I::LANES + inside) * p.head_dim) as u64
}
