//! RoutedAggregatedAttention on a CPU.
//!
//! The grid is cut into bands of rows; a work item is a band and a group of heads. A head's normalised keys and its
//! values are copied with a zero border, so that every window has the same layout (`workspace`). Selected queries are
//! processed in tiles, one query per vector lane: pooled tokens by a register-blocked product, windows by dot products
//! of rows (`scores`), one softmax over both (`weights`), and the transposition back to rows (`output`).

mod output;
mod rows;
mod scores;
mod tile;
mod unit;
mod weights;
mod workspace;

use crate::host::Host;
use crate::isa::Isa;
use crate::kernel::{self, CpuOperator, Work};
use crate::selection::Selection;
use crate::workers::{Shared, share};
use moh_operators::aggregated_attention::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, RoutedAggregatedAttention};
use std::ops::Range;
use workspace::Workspace;

/// The tensors of a call. Slice lengths have been validated against `problem`.
struct Call<'a, I, T> {
    isa: I,
    problem: &'a Problem,
    query: &'a [T],
    key: &'a [T],
    value: &'a [T],
    pooled_key: &'a [T],
    pooled_value: &'a [T],
    gates: &'a [f32],
    query_embedding: &'a [T],
    query_scale: &'a [f32],
    local_bias: &'a [T],
    pooled_bias: &'a [T],
    learnable_tokens: &'a [T],
    learnable_bias: &'a [T],
    output: Shared<T>,
}

/// A head of one image of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    batch: usize,
    index: usize,
}

impl<I, T: Element> Call<'_, I, T> {
    /// Index of a (token, head) pair, for sequences of `len` tokens.
    fn block(&self, head: Head, len: usize, token: usize) -> usize {
        (head.batch * len + token) * self.problem.num_heads + head.index
    }

    /// The elements of `tensor` from the given token and head on; sequences have `len` tokens. At least `head_dim`
    /// elements.
    fn row<'a>(&self, tensor: &'a [T], head: Head, len: usize, token: usize) -> &'a [T] {
        let (start, dim) = (self.block(head, len, token), self.problem.head_dim);
        &tensor[start * dim..]
    }

    /// Pointer to the `head_dim` output elements of a token.
    fn output(&self, head: Head, token: usize) -> *mut T {
        let p = self.problem;
        // SAFETY: the output holds head_dim elements for every (token, head) pair.
        unsafe { self.output.0.add(self.block(head, p.tokens(), token) * p.head_dim) }
    }
}

impl CpuOperator for RoutedAggregatedAttention {
    type Output<T: Element> = T;

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, problem, inputs, output, host, .. } = call;
        let Inputs { query, key, value, pooled_key, pooled_value, head_gates: gates, .. } = inputs;
        let Inputs { query_embedding, query_scale, local_bias, pooled_bias, learnable_tokens, learnable_bias, .. } =
            inputs;
        let output = Shared(output.as_mut_ptr());
        let call = Call {
            isa,
            problem,
            query,
            key,
            value,
            pooled_key,
            pooled_value,
            gates,
            query_embedding,
            query_scale,
            local_bias,
            pooled_bias,
            learnable_tokens,
            learnable_bias,
            output,
        };
        execute(&call, host)
    }
}

fn execute<I: Isa, T: Element>(call: &Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    let p = call.problem;
    if u32::try_from(p.tokens()).is_err() {
        return Err(Error::Shape {
            operator: RoutedAggregatedAttention::NAME,
            input: "head_gates",
            expected: "fewer than 2^32 tokens".to_owned(),
            found: format!("({}, {}, {})", p.batch, p.tokens(), p.num_heads),
        });
    }
    let selection = Selection::new(call.gates, p.num_heads, p.tokens())?;
    let cut = Cut::new::<I>(p, host.parallelism().max(1));
    let work = |workspace: &mut Workspace<'_>, item: usize| {
        let (band, group) = (item / cut.groups, item % cut.groups);
        let (batch, band) = (band / cut.bands, band % cut.bands);
        let rows = band * cut.rows..((band + 1) * cut.rows).min(p.height);
        let heads = group * p.num_heads / cut.groups..(group + 1) * p.num_heads / cut.groups;
        let head =
            |index: usize| attend(call, selection.tokens(batch, index), Head { batch, index }, rows.clone(), workspace);
        heads.map(head).sum()
    };
    let make = || Workspace::new::<I>(p, cut.rows, host);
    Ok(Work { macs: share(host, p.batch * cut.bands * cut.groups, make, work)? })
}

/// Partition of the output into work items: bands of grid rows, and groups of heads.
struct Cut {
    /// Rows per band.
    rows: usize,
    bands: usize,
    groups: usize,
}

impl Cut {
    fn new<I: Isa>(p: &Problem, workers: usize) -> Cut {
        /// Floats of keys and values of one head that a worker holds: they fit the L2 cache.
        const FLOATS: usize = 48 << 10;
        /// Work items per worker, for load balancing.
        const ITEMS_PER_WORKER: usize = 4;
        let reach = p.window / 2;
        let row = (p.width + reach).saturating_mul(workspace::pitch::<I>(p.head_dim)).saturating_mul(2);
        let fit = (FLOATS / row).saturating_sub(2 * reach);
        let wanted = if workers == 1 { 1 } else { workers * ITEMS_PER_WORKER };
        let even = (p.height * p.batch * p.num_heads).div_ceil(wanted);
        // A band with fewer rows than its border would copy most keys at least twice.
        let rows = fit.min(even).max(reach).clamp(1, p.height);
        let rows = p.height.div_ceil(p.height.div_ceil(rows));
        let bands = p.height.div_ceil(rows);
        // Outputs of neighbouring heads share cache lines, so an item has as many heads as load balancing allows.
        let groups = wanted.div_ceil((p.batch * bands).max(1)).min(p.num_heads);
        Cut { rows, bands, groups }
    }
}

/// Computes one head's outputs for a band of tokens. `selected` are the tokens of the whole grid that use the head.
/// Returns the number of multiply-accumulate operations.
fn attend<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    selected: &[u32],
    head: Head,
    band: Range<usize>,
    workspace: &mut Workspace<'_>,
) -> u64 {
    let p = call.problem;
    let tokens = band.start * p.width..band.end * p.width;
    let before = |end: usize| selected.partition_point(|&token| (token as usize) < end);
    let selected = &selected[before(tokens.start)..before(tokens.end)];
    clear(call, head, tokens, selected);
    if selected.is_empty() {
        return 0;
    }
    workspace.load_head(call, head);
    workspace.load_band(call, head, band.start, selected);
    selected.chunks(I::LANES * I::TILE).map(|rows| tile::attend(call, head, band.start, rows, workspace)).sum()
}

/// Writes 0 to the outputs of tokens that are not selected.
fn clear<I, T: Element>(call: &Call<'_, I, T>, head: Head, tokens: Range<usize>, selected: &[u32]) {
    let mut selected = selected.iter().copied().peekable();
    for token in tokens {
        if selected.next_if_eq(&(token as u32)).is_none() {
            // SAFETY: the output is head_dim elements long, and this item's own.
            let output = unsafe { std::slice::from_raw_parts_mut(call.output(head, token), call.problem.head_dim) };
            output.fill(T::from_f32(0.0));
        }
    }
}
