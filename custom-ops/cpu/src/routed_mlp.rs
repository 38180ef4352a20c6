//! RoutedMLP on a CPU.
//!
//! Tokens are cut into tiles, so that hidden activations fit a fixed amount of memory. Per tile, workers first share
//! the experts' hidden columns, then the output columns, for which the experts' results are added in ascending order.

use crate::activation::Activate;
use crate::gemm::{self, AddScaled, Gemm, Matrix, Panels, Product, Row, Start, Store, Weight, few};
use crate::host::{Host, Scratch};
use crate::isa::Isa;
use crate::kernel::{self, CpuOperator, ToPack, WeightData, Work};
use crate::memory::{Memory, Sections, pitch};
use crate::packed::{Packed, Packing};
use crate::selection::Selection;
use crate::workers::{Shared, share, span};
use moh_operators::routed_mlp::{Inputs, Problem};
use moh_operators::{Definition, Element, Error, RoutedMlp};
use std::ops::Range;

/// The tensors of a call. Slice lengths have been validated against `problem`.
struct Call<'a, I, T> {
    isa: I,
    problem: &'a Problem,
    x: &'a [T],
    fc1: Weight<'a, T>,
    fc2: Weight<'a, T>,
    gates: &'a [f32],
    /// The biases of both matrices.
    bias: Option<[&'a [T]; 2]>,
    output: Shared<T>,
}

impl CpuOperator for RoutedMlp {
    type Output<T: Element> = T;

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, problem, inputs, output, host, .. } = call;
        let Inputs { x, fc1_weight, fc2_weight, expert_gates: gates, fc1_bias, fc2_bias } = inputs;
        let fc1 = weight::<I, T>(problem, fc1_weight, FC1)?;
        let fc2 = weight::<I, T>(problem, fc2_weight, FC2)?;
        let bias = fc1_bias.zip(fc2_bias).map(|(first, second)| [first, second]);
        execute(&Call { isa, problem, x, fc1, fc2, gates, bias, output: Shared(output.as_mut_ptr()) }, host)
    }

    /// On request only: experts have few tokens each, with which packing saves little.
    fn pack<I: Isa, T: Element>(isa: I, of: &ToPack<'_, Self, T>) -> Result<Option<Packed>, Error> {
        let &ToPack {
            attributes, input: input @ (FC1 | FC2), shape, weight, packing: Packing { all: true, .. }, ..
        } = of
        else {
            return Ok(None);
        };
        let problem = &RoutedMlp::of_weight(attributes, input, shape)?;
        // SAFETY: the weight's length has been checked against its shape, from which `problem` was made.
        unsafe { Packed::new(isa, &matrix(problem, input, weight), panels::<I>(problem, input), shape) }.map(Some)
    }
}

/// Index of the first input that can be packed.
const FC1: usize = 1;
const FC2: usize = 2;

/// The weight of input `input`, packed or in place.
fn weight<'a, I: Isa, T: Element>(
    problem: &Problem,
    data: WeightData<'a, T>,
    input: usize,
) -> Result<Weight<'a, T>, Error> {
    let name = RoutedMlp::INPUTS[input].name;
    data.panels(RoutedMlp::NAME, name, panels::<I>(problem, input), |data| matrix(problem, input, data))
}

/// The panels of a weight. The first matrix has one block of columns per expert, or two for gated activations.
fn panels<I: Isa>(p: &Problem, input: usize) -> Panels {
    match input {
        FC1 => Panels::new::<I>(p.width, p.num_experts * p.activation.columns(), p.hidden),
        _ => Panels::new::<I>(p.hidden, p.num_experts, p.out_width),
    }
}

/// The weight of input `input`, read in place.
fn matrix<T>(p: &Problem, input: usize, weight: &[T]) -> Matrix<T> {
    let (inner, stride) = match input {
        FC1 => (p.width, p.hidden * p.activation.columns()),
        _ => (p.hidden, p.out_width),
    };
    Matrix::Columns { data: weight.as_ptr(), stride, block: stride, block_stride: inner * stride }
}

/// Maximum floats of hidden activations per tile; a single token may exceed it.
const HIDDEN: usize = 4 << 20;
/// Maximum tokens per tile.
const TILE: usize = 4096;
/// Maximum rows per product: their sums fit the L2 cache.
const ROWS: usize = 384;
/// The indices 0 to `ROWS - 1`.
static ALL: [u32; ROWS] = {
    let mut all = [0; ROWS];
    let mut i = 0;
    while i < ROWS {
        all[i] = i as u32;
        i += 1;
    }
    all
};
/// Maximum columns per product of many rows, and of few rows.
const SPAN: [usize; 2] = [256, 4096];
/// Maximum floats of a worker's sums over the experts.
const TOTALS: usize = 1 << 18;

/// Consecutive tokens, and their number of (token, expert) pairs.
pub(crate) struct Tile {
    pub(crate) tokens: Range<usize>,
    pub(crate) pairs: usize,
}

/// Cuts the tokens into tiles. Independent of the number of workers, because the rounding of results depends on it.
pub(crate) fn tiles(p: &Problem, gates: &[f32]) -> Vec<Tile> {
    let most = HIDDEN / pitch(p.hidden);
    let mut tiles: Vec<Tile> = Vec::new();
    for (token, gates) in gates.chunks_exact(p.num_experts).enumerate() {
        let pairs = gates.iter().filter(|&&gate| gate != 0.0).count();
        match tiles.last_mut() {
            Some(tile) if tile.pairs + pairs <= most && tile.tokens.len() < TILE => {
                tile.tokens.end += 1;
                tile.pairs += pairs;
            }
            _ => tiles.push(Tile { tokens: token..token + 1, pairs }),
        }
    }
    tiles
}

fn execute<I: Isa, T: Element>(call: &Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    let p = call.problem;
    let tiles = tiles(p, call.gates);
    let pairs = tiles.iter().map(|tile| tile.pairs).max().unwrap_or(0);
    let pitch = pitch(p.hidden);
    let Some(floats) = pairs.checked_mul(pitch) else { return Err(Error::OutOfMemory { bytes: usize::MAX }) };
    let mut hidden = Scratch::new::<f32>(host, floats)?;
    let hidden = Shared(hidden.as_mut_slice::<f32>().as_mut_ptr());
    let mut macs = 0;
    for Tile { tokens, .. } in tiles {
        let gates = &call.gates[tokens.start * p.num_experts..tokens.end * p.num_experts];
        let selection = &Selection::new(gates, p.num_experts, tokens.len())?;
        let used = |expert: &usize| !selection.tokens(0, *expert).is_empty();
        let experts = &(0..p.num_experts).filter(used).collect::<Vec<usize>>();
        let rows = experts.iter().map(|&expert| selection.tokens(0, expert).len()).max().unwrap_or(0);
        let stage = Stage { call, host, tokens, selection, experts, rows, hidden: &hidden, pitch };
        macs += stage.first()? + stage.second()?;
    }
    Ok(Work { macs })
}

/// The computation of one tile.
struct Stage<'a, I, T> {
    call: &'a Call<'a, I, T>,
    host: &'a dyn Host,
    tokens: Range<usize>,
    selection: &'a Selection,
    /// The experts that the tile's tokens use.
    experts: &'a [usize],
    /// The maximum number of tokens that use the same expert.
    rows: usize,
    /// The hidden activations of all (token, expert) pairs, in the selection's order, `pitch` floats apart.
    hidden: &'a Shared<f32>,
    pitch: usize,
}

/// A worker's memory.
struct Workspace<'h, O> {
    gemm: Gemm<'h>,
    /// Rows of sums; from offset `totals` on, one row of totals per token.
    floats: Memory<'h>,
    totals: usize,
    copies: Memory<'h>,
    rows: Vec<Row>,
    pairs: Vec<(*const f32, *mut O)>,
}

/// A range of one expert's rows.
struct Block {
    expert: usize,
    rows: Range<usize>,
}

impl<I: Isa, T: Element> Stage<'_, I, T> {
    fn blocks(&self, expert: usize) -> impl Iterator<Item = Block> {
        let (rows, most) = (self.selection.tokens(0, expert).len(), self.most_rows());
        (0..rows).step_by(most).map(move |start| Block { expert, rows: start..(start + most).min(rows) })
    }

    fn most_rows(&self) -> usize {
        gemm::rows_at_once::<T>(ROWS, self.call.problem.width)
    }

    /// Cuts the panels of a block of columns into spans of at most `most` columns; `others` is the number of items per
    /// span.
    fn spans(&self, panels: &Panels, others: usize, most: usize) -> Vec<Range<usize>> {
        let widest = SPAN[usize::from(few(self.rows))].min(most);
        let Range { start, end } = panels.of_block(0);
        let width = (start..end).map(|panel| panels.width(panel)).max().unwrap_or(1);
        let span = span(end, 1, widest / width, others, self.host.parallelism());
        (start..end).step_by(span).map(|start| start..(start + span).min(end)).collect()
    }

    fn workspace<O>(
        &self,
        floats: [usize; 2],
        copies: bool,
        weight: &Weight<'_, T>,
    ) -> Result<Workspace<'_, O>, Error> {
        let rows = self.rows.min(self.most_rows());
        let (mut sections, mut copied) = (Sections::default(), Sections::default());
        sections.add(rows, floats[0])?;
        let totals = sections.add(self.tokens.len(), floats[1])?;
        if copies {
            gemm::copies::<T>(rows, weight.panels.k, &mut copied)?;
        }
        let gemm = Gemm::new::<I, T>(rows, 1, weight, self.host)?;
        let (floats, copies) = (sections.allocate(self.host)?, copied.allocate(self.host)?);
        Ok(Workspace { gemm, floats, totals, copies, rows: Vec::new(), pairs: Vec::new() })
    }

    /// Stage 1: the hidden activations.
    fn first(&self) -> Result<u64, Error> {
        let (p, weight) = (self.call.problem, &self.call.fc1);
        let blocks: Vec<Block> = self.experts.iter().flat_map(|&expert| self.blocks(expert)).collect();
        let spans = self.spans(&weight.panels, blocks.len(), usize::MAX);
        let width = spans.iter().map(|span| weight.panels.padded(span.start, span.end)).max().unwrap_or(0);
        let make = || self.workspace([width * p.activation.columns(), 0], true, weight);
        share(self.host, blocks.len() * spans.len(), make, |workspace, item| {
            self.activations(&blocks[item / spans.len()], &spans[item % spans.len()], width, workspace)
        })
    }

    /// The hidden activations of a block of rows, for a span of the panels.
    fn activations(&self, block: &Block, span: &Range<usize>, width: usize, workspace: &mut Workspace<'_, f32>) -> u64 {
        let (call, p, panels) = (self.call, self.call.problem, &self.call.fc1.panels);
        let (expert, halves) = (block.expert, p.activation.columns());
        let tokens = &self.selection.tokens(0, expert)[block.rows.clone()];
        let input = |row: usize| call.x[(self.tokens.start + tokens[row] as usize) * p.width..].as_ptr();
        let Workspace { gemm, floats, copies, rows, pairs, .. } = workspace;
        // SAFETY: x has `width` elements for every token; `copies` has room for the rows of a block.
        unsafe { gemm::load(call.isa, tokens.len(), p.width, input, copies, rows) };
        for (row, sums) in rows.iter_mut().enumerate() {
            sums.output = floats.at(row * halves * width);
        }
        let wanted: Vec<(usize, usize)> = (0..halves)
            .flat_map(|half| span.clone().map(move |panel| (half, panel)))
            .map(|(half, panel)| {
                let column = half * width + panels.padded(span.start, panel);
                (panels.of_block(expert * halves + half).start + panel, column)
            })
            .collect();
        let mut macs = 0;
        let mut blocks = gemm.blocks(p.width).peekable();
        while let Some(k) = blocks.next() {
            let products = [Product { rows: &ALL[..tokens.len()], k: k.clone() }];
            for (i, &(panel, column)) in wanted.iter().enumerate() {
                let next = match wanted.get(i + 1) {
                    Some(&(panel, _)) => Some((panel, k.clone())),
                    None => blocks.peek().map(|k| (wanted[0].0, k.clone())),
                };
                // SAFETY: from each input on, x has `width` elements; a row of sums has room for the padded span of
                // each half; the weight has all elements of its panels.
                macs += unsafe {
                    gemm.multiply(call.isa, rows, &products, &call.fc1, panel, column, next, Start::of_block(&k, None))
                };
            }
        }
        let columns = panels.columns(span);
        pairs.clear();
        for (row, sums) in rows.iter().enumerate() {
            // SAFETY: the hidden activations have a row of `pitch` floats for every pair.
            let output = unsafe { self.hidden_row(expert, block.rows.start + row).add(columns.start) };
            pairs.push((sums.output.cast_const(), output));
        }
        let bias = call.bias.map(|[bias, _]| {
            let at = |half: usize| bias[(expert * halves + half) * p.hidden + columns.start..].as_ptr();
            [at(0), at(halves - 1)]
        });
        call.isa.vectorize(Activate {
            activation: p.activation,
            rows: pairs,
            columns: columns.len(),
            other: width,
            bias,
        });
        macs
    }

    fn hidden_row(&self, expert: usize, row: usize) -> *mut f32 {
        // SAFETY: the hidden activations have a row of `pitch` floats for every pair.
        unsafe { self.hidden.0.add((self.selection.start(0, expert) + row) * self.pitch) }
    }

    /// Stage 2: the output.
    fn second(&self) -> Result<u64, Error> {
        let weight = &self.call.fc2;
        let spans = self.spans(&weight.panels, 1, TOTALS / self.tokens.len());
        let width = spans.iter().map(|span| weight.panels.padded(span.start, span.end)).max().unwrap_or(0);
        let make = || self.workspace([width, width], false, weight);
        share(self.host, spans.len(), make, |workspace, item| self.outputs(&spans[item], width, workspace))
    }

    /// The outputs for a span of the panels.
    fn outputs(&self, span: &Range<usize>, width: usize, workspace: &mut Workspace<'_, T>) -> u64 {
        let (call, p, panels) = (self.call, self.call.problem, &self.call.fc2.panels);
        let columns = panels.columns(span);
        let &mut Workspace { ref mut gemm, ref mut floats, totals, ref mut rows, ref mut pairs, .. } = workspace;
        floats.slice(totals..totals + self.tokens.len() * width).fill(0.0);
        let mut macs = 0;
        for block in self.experts.iter().flat_map(|&expert| self.blocks(expert)) {
            let expert = block.expert;
            rows.clear();
            for (i, row) in block.rows.clone().enumerate() {
                let input = self.hidden_row(expert, row).cast_const();
                rows.push(Row { input, output: floats.at(i * width) });
            }
            let of_expert = panels.of_block(expert).start;
            let mut blocks = gemm.blocks(p.hidden).peekable();
            while let Some(k) = blocks.next() {
                let products = [Product { rows: &ALL[..rows.len()], k: k.clone() }];
                for panel in span.clone() {
                    let next = match panel + 1 < span.end {
                        true => Some((of_expert + panel + 1, k.clone())),
                        false => blocks.peek().map(|k| (of_expert + span.start, k.clone())),
                    };
                    let (column, panel) = (panels.padded(span.start, panel), of_expert + panel);
                    // SAFETY: stage 1 wrote the hidden rows; a row of sums has room for a padded span; the weight has
                    // all elements of its panels.
                    macs += unsafe {
                        gemm.multiply(
                            call.isa,
                            rows,
                            &products,
                            &call.fc2,
                            panel,
                            column,
                            next,
                            Start::of_block(&k, None),
                        )
                    };
                }
            }
            let tokens = &self.selection.tokens(0, expert)[block.rows];
            let gate = |token: u32| call.gates[(self.tokens.start + token as usize) * p.num_experts + expert];
            let total = |token: u32| floats.at(totals + token as usize * width);
            let scaled: Vec<_> = tokens
                .iter()
                .zip(rows.iter())
                .map(|(&token, row)| (row.output.cast_const(), total(token), gate(token)))
                .collect();
            let bias = call.bias.map(|[_, bias]| bias[expert * p.out_width + columns.start..].as_ptr());
            call.isa.vectorize(AddScaled { rows: &scaled, columns: columns.len(), bias });
        }
        pairs.clear();
        for token in 0..self.tokens.len() {
            let sums = floats.at(totals + token * width).cast_const();
            // SAFETY: the output has `out_width` columns for every token.
            let output = unsafe { call.output.0.add((self.tokens.start + token) * p.out_width + columns.start) };
            pairs.push((sums, output));
        }
        call.isa.vectorize(Store { rows: pairs, columns: columns.len(), bias: None });
        macs
    }
}
