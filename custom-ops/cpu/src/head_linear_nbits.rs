//! Shared implementation of RoutedProjectionNBits and RoutedCombineNBits.
//!
//! Tokens are cut into chunks. A chunk's x is converted once; then workers share spans of the output's columns.

use crate::epilogue::{Epilogue, Finish};
use crate::host::Host;
use crate::isa::Isa;
use crate::kernel::Work;
use crate::memory::{Memory, Sections, pitch};
use crate::nbits::{Activations, Engine, FEW, Level, NBits, Parts, Row, Start, Worker, floats};
use crate::selection::Selection;
use crate::workers::{Shared, share, span};
use moh_operators::routed_projection::Problem;
use moh_operators::{DType, Element, Error};
use std::ops::Range;

/// What the heads are blocks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heads {
    /// The output: RoutedProjectionNBits.
    Output,
    /// x: RoutedCombineNBits.
    Input,
}

/// The tensors of a call. Slice lengths have been validated against `problem`.
pub(crate) struct Call<'a, I, T> {
    pub(crate) isa: I,
    pub(crate) engine: Engine,
    pub(crate) heads: Heads,
    pub(crate) problem: &'a Problem,
    pub(crate) level: Level,
    pub(crate) x: &'a [T],
    pub(crate) weight: NBits<'a>,
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
    /// What becomes of a combination's sums.
    pub(crate) epilogue: Epilogue<'a, T>,
    pub(crate) output: Shared<T>,
}

/// Tokens of a chunk, which bounds the working memory: so many, or as many as have so many elements of x. Independent of the
/// number of workers, because the rounding of results depends on it.
const TOKENS: usize = 1024;
const ELEMENTS: usize = 8 << 20;
/// Columns of a span at most, and for few tokens.
const SPAN: usize = 256;
const FEW_SPAN: usize = 1024;

/// Computes the output.
pub(crate) fn run<I: Isa, T: Element>(mut call: Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    call.weight = call.weight.narrowed(call.engine, call.level, call.problem.tokens, host);
    let call = &call;
    let (p, k) = (call.problem, call.weight.inner());
    let most = (ELEMENTS / k.max(1)).clamp(1, TOKENS);
    let mut macs = 0;
    for start in (0..p.tokens).step_by(most) {
        let tokens = start..(start + most).min(p.tokens);
        let gates = &call.gates[tokens.start * p.num_heads..tokens.end * p.num_heads];
        let used = |token: usize, head: usize| gates[token * p.num_heads + head] != 0.0;
        let parts = (call.heads == Heads::Input).then_some(Parts { width: p.block, used: &used });
        let input = |token: usize| call.x[(tokens.start + token) * k..].as_ptr();
        let (engine, format) = (call.engine, call.weight.format);
        // SAFETY: x has `k` elements for every token.
        let x = unsafe { Activations::new(engine, host, format, call.level, tokens.len(), &input, parts) }?;
        let selection = &Selection::new(gates, p.num_heads, tokens.len())?;
        let all = &(0..tokens.len() as u32).collect::<Vec<u32>>();
        macs += Chunk { call, tokens, x: &x, selection, all }.run(host)?;
    }
    Ok(Work { macs })
}

/// Consecutive tokens.
struct Chunk<'a, I, T> {
    call: &'a Call<'a, I, T>,
    tokens: Range<usize>,
    x: &'a Activations<'a>,
    selection: &'a Selection,
    /// The indices of all tokens.
    all: &'a [u32],
}

/// A worker's memory.
struct Workspace<'h, T> {
    worker: Worker<'h>,
    sums: Memory<'h>,
    rows: Vec<Row>,
    pairs: Vec<(*const f32, *mut T)>,
}

impl<I: Isa, T: Element> Chunk<'_, I, T> {
    fn run(&self, host: &dyn Host) -> Result<u64, Error> {
        let columns = self.call.weight.columns();
        let most = if self.tokens.len() <= FEW { FEW_SPAN } else { SPAN };
        let span = span(columns, self.x.columns(), most, 1, host.parallelism());
        let make = || {
            let mut sums = Sections::default();
            if T::DTYPE != DType::F32 {
                sums.add(self.tokens.len(), pitch(span))?;
            }
            let (worker, sums) = (Worker::new(self.x, host)?, sums.allocate(host)?);
            Ok(Workspace { worker, sums, rows: Vec::new(), pairs: Vec::new() })
        };
        let work = |workspace: &mut Workspace<'_, T>, item: usize| {
            self.item(item * span..((item + 1) * span).min(columns), workspace)
        };
        share(host, columns.div_ceil(span), make, work)
    }

    /// A span of the output's columns. Returns the number of multiply-accumulate operations.
    fn item(&self, span: Range<usize>, workspace: &mut Workspace<'_, T>) -> u64 {
        let block = self.call.problem.block;
        if self.call.heads == Heads::Input {
            return self.product(self.all, span, workspace);
        }
        let of_span = |heads: Range<usize>| (heads.start * block).max(span.start)..(heads.end * block).min(span.end);
        let heads = span.start / block..span.end.div_ceil(block);
        for head in heads.clone() {
            self.clear(self.selection.tokens(0, head), of_span(head..head + 1));
        }
        let runs = self.selection.runs(0, heads);
        runs.map(|run| self.product(run.tokens, of_span(run.heads), workspace)).sum()
    }

    /// Some columns of some tokens.
    fn product(&self, tokens: &[u32], columns: Range<usize>, workspace: &mut Workspace<'_, T>) -> u64 {
        let Workspace { worker, sums, rows, pairs } = workspace;
        let in_place = T::DTYPE == DType::F32;
        rows.clear();
        pairs.clear();
        for (i, &index) in tokens.iter().enumerate() {
            let output = self.output(index, columns.start);
            let place = if in_place { output.cast() } else { sums.at(i * pitch(columns.len())) };
            rows.push(Row { index, output: place });
            pairs.push((place.cast_const(), output));
        }
        let bias = self.call.bias.map(|bias| &bias[columns.clone()]);
        let start = Start::New(bias.and_then(floats));
        // SAFETY: an output that is used in place is float32, and these columns belong to this work item alone; a row of sums has room for
        // a span.
        let macs = unsafe { worker.multiply(&self.call.weight, self.x, rows, columns.clone(), start) };
        if !in_place || !self.call.epilogue.is_nothing() {
            let (epilogue, first) = (&self.call.epilogue, self.tokens.start);
            self.call.isa.vectorize(Finish { epilogue, rows: pairs, first, columns, bias });
        }
        macs
    }

    fn output(&self, token: u32, column: usize) -> *mut T {
        // SAFETY: the output has the weight's columns for every token.
        unsafe { self.call.output.0.add((self.tokens.start + token as usize) * self.call.weight.columns() + column) }
    }

    /// Writes 0 to `columns` of the tokens that are not in `used`.
    fn clear(&self, used: &[u32], columns: Range<usize>) {
        let mut used = used.iter().copied().peekable();
        for &token in self.all {
            if used.next_if_eq(&token).is_none() {
                // SAFETY: these columns of this token belong to this work item alone.
                let block = unsafe { std::slice::from_raw_parts_mut(self.output(token, columns.start), columns.len()) };
                block.fill(T::from_f32(0.0));
            }
        }
    }
}
