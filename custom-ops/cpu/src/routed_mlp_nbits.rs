//! RoutedMLPNBits on a CPU, in the two stages of RoutedMLP.

use crate::activation::Activate;
use crate::gemm::{AddScaled, Store};
use crate::host::{Host, Scratch};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, Work};
use crate::memory::{Memory, Sections, pitch};
use crate::nbits::{Activations, Engine, FEW, Level, NBits, Row, Start, Worker};
use crate::routed_mlp::{Tile, tiles};
use crate::selection::Selection;
use crate::workers::{Shared, share, span};
use moh_operators::routed_mlp::Problem;
use moh_operators::{Definition, Element, Error, RoutedMlpNBits};
use std::ops::Range;

/// The tensors of a call. Slice lengths have been validated against `problem`.
struct Call<'a, I, T> {
    isa: I,
    engine: Engine,
    problem: &'a Problem,
    level: Level,
    x: &'a [T],
    fc1: NBits<'a>,
    fc2: NBits<'a>,
    gates: &'a [f32],
    /// The biases of both matrices.
    bias: Option<[&'a [T]; 2]>,
    output: Shared<T>,
}

impl CpuOperator for RoutedMlpNBits {
    type Output<T: Element> = T;

    fn uses(unit: MatrixUnit) -> bool {
        unit.beats_bytes()
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        let (p, format) = (&problem.mlp, problem.format);
        let weight = |shape, weight, scales, zero_points| {
            NBits::new(Self::NAME, format.bits, format.block, shape, weight, scales, zero_points)
        };
        let (e, columns) = (p.num_experts, p.hidden * p.activation.columns());
        let call = Call {
            isa,
            engine: Engine::of::<I>(unit),
            problem: p,
            level: Level::of_int8(problem.int8_activations),
            x: inputs.x,
            fc1: weight([e * columns, p.width], inputs.fc1_weight, inputs.fc1_scales, inputs.fc1_zero_points)?,
            fc2: weight([e * p.out_width, p.hidden], inputs.fc2_weight, inputs.fc2_scales, inputs.fc2_zero_points)?,
            gates: inputs.expert_gates,
            bias: inputs.fc1_bias.zip(inputs.fc2_bias).map(|(first, second)| [first, second]),
            output: Shared(output.as_mut_ptr()),
        };
        execute(call, host)
    }
}

/// Maximum rows per product, which bounds a worker's sums.
const ROWS: usize = 1024;
/// Columns of a span at most, and for few rows. They are whole vectors, so that spans do not write to each other's columns.
const SPAN: usize = 256;
const FEW_SPAN: usize = 1024;

fn execute<I: Isa, T: Element>(mut call: Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    let p = call.problem;
    let tiles = tiles(p, call.gates);
    let pairs = tiles.iter().map(|tile| tile.pairs).max().unwrap_or(0);
    let rows = pairs / p.num_experts.max(1);
    call.fc1 = call.fc1.narrowed(call.engine, call.level, rows, host);
    call.fc2 = call.fc2.narrowed(call.engine, call.level, rows, host);
    let call = &call;
    let pitch = pitch(p.hidden);
    let Some(floats) = pairs.checked_mul(pitch) else { return Err(Error::OutOfMemory { bytes: usize::MAX }) };
    let mut hidden = Scratch::new::<f32>(host, floats)?;
    let hidden = Shared(hidden.as_mut_slice::<f32>().as_mut_ptr());
    let mut macs = 0;
    for Tile { tokens, pairs } in tiles {
        let gates = &call.gates[tokens.start * p.num_experts..tokens.end * p.num_experts];
        let selection = &Selection::new(gates, p.num_experts, tokens.len())?;
        let stage = Stage { call, host, tokens, pairs, selection, hidden: &hidden, pitch };
        macs += stage.first()? + stage.second()?;
    }
    Ok(Work { macs })
}

/// The computation of one tile.
struct Stage<'a, I, T> {
    call: &'a Call<'a, I, T>,
    host: &'a dyn Host,
    tokens: Range<usize>,
    /// The number of (token, expert) pairs.
    pairs: usize,
    selection: &'a Selection,
    /// The hidden activations of all pairs, in the selection's order, `pitch` floats apart.
    hidden: &'a Shared<f32>,
    pitch: usize,
}

/// A worker's memory.
struct Workspace<'h, O> {
    worker: Worker<'h>,
    /// Rows of sums; from offset `totals` on, one row of totals per token.
    floats: Memory<'h>,
    totals: usize,
    rows: Vec<Row>,
    pairs: Vec<(*const f32, *mut O)>,
}

impl<I: Isa, T: Element> Stage<'_, I, T> {
    /// The experts that the tile's tokens use, cut into ranges of at most [`ROWS`] of these tokens.
    fn blocks(&self) -> Vec<(usize, Range<usize>)> {
        let of_expert = |expert: usize| {
            let rows = self.selection.tokens(0, expert).len();
            (0..rows).step_by(ROWS).map(move |start| (expert, start..(start + ROWS).min(rows)))
        };
        (0..self.call.problem.num_experts).flat_map(of_expert).collect()
    }

    fn span(&self, x: &Activations<'_>, columns: usize, rows: usize, others: usize) -> usize {
        let most = if rows <= FEW { FEW_SPAN } else { SPAN };
        span(columns, x.columns(), most, others, self.host.parallelism())
    }

    fn workspace<O>(&self, x: &Activations<'_>, floats: [usize; 2]) -> Result<Workspace<'_, O>, Error> {
        let mut sections = Sections::default();
        sections.add(self.pairs.min(ROWS), floats[0])?;
        let totals = sections.add(self.tokens.len(), floats[1])?;
        let (worker, floats) = (Worker::new(x, self.host)?, sections.allocate(self.host)?);
        Ok(Workspace { worker, floats, totals, rows: Vec::new(), pairs: Vec::new() })
    }

    /// Stage 1: the hidden activations.
    fn first(&self) -> Result<u64, Error> {
        let (call, p, rows) = (self.call, self.call.problem, self.tokens.len());
        let input = |token: usize| call.x[(self.tokens.start + token) * p.width..].as_ptr();
        // SAFETY: x has `width` elements for every token.
        let x = unsafe { Activations::new(call.engine, self.host, call.fc1.format, call.level, rows, &input, None) }?;
        let blocks = self.blocks();
        let span = self.span(&x, p.hidden, rows, blocks.len());
        let spans = p.hidden.div_ceil(span);
        let make = || self.workspace(&x, [pitch(span) * p.activation.columns(), 0]);
        share(self.host, blocks.len() * spans, make, |workspace, item| {
            let start = item % spans * span;
            let (expert, ref rows) = blocks[item / spans];
            self.activations(&x, expert, rows.clone(), start..(start + span).min(p.hidden), workspace)
        })
    }

    /// A span of the hidden activations of an expert's rows.
    fn activations(
        &self,
        x: &Activations<'_>,
        expert: usize,
        of_expert: Range<usize>,
        span: Range<usize>,
        workspace: &mut Workspace<'_, f32>,
    ) -> u64 {
        let (call, p) = (self.call, self.call.problem);
        let Workspace { worker, floats, rows, pairs, .. } = workspace;
        let (halves, width) = (p.activation.columns(), pitch(span.len()));
        let tokens = &self.selection.tokens(0, expert)[of_expert.clone()];
        let mut macs = 0;
        for half in 0..halves {
            let first = (expert * halves + half) * p.hidden;
            let row = |(i, &index): (usize, &u32)| Row { index, output: floats.at((i * halves + half) * width) };
            rows.clear();
            rows.extend(tokens.iter().enumerate().map(row));
            // SAFETY: a row of sums has room for a span of each half.
            macs +=
                unsafe { worker.multiply(&call.fc1, x, rows, first + span.start..first + span.end, Start::New(None)) };
        }
        pairs.clear();
        for (i, row) in of_expert.enumerate() {
            // SAFETY: the hidden activations have a row of `pitch` floats for every pair.
            let output = unsafe { self.hidden_row(self.selection.start(0, expert) + row).add(span.start) };
            pairs.push((floats.at(i * halves * width).cast_const(), output));
        }
        let bias = call.bias.map(|[bias, _]| {
            let at = |half: usize| bias[(expert * halves + half) * p.hidden + span.start..].as_ptr();
            [at(0), at(halves - 1)]
        });
        call.isa.vectorize(Activate { activation: p.activation, rows: pairs, columns: span.len(), other: width, bias });
        macs
    }

    fn hidden_row(&self, pair: usize) -> *mut f32 {
        // SAFETY: the hidden activations have a row of `pitch` floats for every pair.
        unsafe { { self.hidden }.0.add(pair * self.pitch) }
    }

    /// Stage 2: the output.
    fn second(&self) -> Result<u64, Error> {
        let (call, p) = (self.call, self.call.problem);
        let input = |pair: usize| self.hidden_row(pair).cast_const();
        // SAFETY: stage 1 wrote `hidden` floats for every pair.
        let x =
            unsafe { Activations::new(call.engine, self.host, call.fc2.format, call.level, self.pairs, &input, None) }?;
        let span = self.span(&x, p.out_width, self.pairs, 1);
        let make = || self.workspace(&x, [pitch(span), pitch(span)]);
        share(self.host, p.out_width.div_ceil(span), make, |workspace, item| {
            self.outputs(&x, item * span..((item + 1) * span).min(p.out_width), workspace)
        })
    }

    /// A span of the output's columns: the experts' results are added in ascending order.
    fn outputs(&self, x: &Activations<'_>, span: Range<usize>, workspace: &mut Workspace<'_, T>) -> u64 {
        let (call, p, width) = (self.call, self.call.problem, pitch(span.len()));
        let &mut Workspace { ref mut worker, ref mut floats, totals, ref mut rows, ref mut pairs } = workspace;
        floats.slice(totals..totals + self.tokens.len() * width).fill(0.0);
        let mut macs = 0;
        for (expert, of_expert) in self.blocks() {
            let (start, first) = (self.selection.start(0, expert), expert * p.out_width);
            let row = |(i, row): (usize, usize)| Row { index: (start + row) as u32, output: floats.at(i * width) };
            rows.clear();
            rows.extend(of_expert.clone().enumerate().map(row));
            // SAFETY: a row of sums has room for a span.
            macs +=
                unsafe { worker.multiply(&call.fc2, x, rows, first + span.start..first + span.end, Start::New(None)) };
            let tokens = &self.selection.tokens(0, expert)[of_expert];
            let gate = |token: u32| call.gates[(self.tokens.start + token as usize) * p.num_experts + expert];
            let total = |token: u32| floats.at(totals + token as usize * width);
            let scaled = tokens.iter().zip(rows.iter());
            let scaled: Vec<_> =
                scaled.map(|(&token, row)| (row.output.cast_const(), total(token), gate(token))).collect();
            let bias = call.bias.map(|[_, bias]| bias[first + span.start..].as_ptr());
            call.isa.vectorize(AddScaled { rows: &scaled, columns: span.len(), bias });
        }
        pairs.clear();
        for token in 0..self.tokens.len() {
            let sums = floats.at(totals + token * width).cast_const();
            // SAFETY: the output has `out_width` columns for every token.
            let output = unsafe { call.output.0.add((self.tokens.start + token) * p.out_width + span.start) };
            pairs.push((sums, output));
        }
        call.isa.vectorize(Store { rows: pairs, columns: span.len(), bias: None });
        macs
    }
}
