//! RoutedMLP on a CPU.
//!
//! Tokens are cut into tiles whose hidden activations fit a fixed amount of memory. For a tile, workers first share the
//! experts' hidden columns, then the output's columns; there the experts add up in their order.

mod activation;

use super::Work;
use super::gemm::{AddScaled, Gemm, Matrix, Part, Row, Store, few, padded, pitch};
use super::isa::Isa;
use super::memory::{Memory, Sections};
use super::selection::Selection;
use super::workers::{Shared, share, span};
use crate::error::Error;
use crate::host::{Host, Scratch};
use crate::schema::{Attributes, ROUTED_MLP};
use crate::shape::routed_mlp::Problem;
use crate::tensor::{Data, DataMut, Element, Tensor};
use activation::Activate;
use std::ops::Range;

/// The tensors. Lengths are those that the validator requires of `problem`.
struct Call<'a, I, T> {
    isa: I,
    problem: &'a Problem,
    x: &'a [T],
    fc1: &'a [T],
    fc2: &'a [T],
    gates: &'a [f32],
    /// Of both matrices.
    bias: Option<[&'a [T]; 2]>,
    output: Shared<T>,
}

/// See [`super::Kernel`].
pub(super) fn run<I: Isa>(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|t| t.shape)).collect();
    let problem = &Problem::new(attributes, &shapes)?;
    let data = |i: usize| inputs.get(i).copied().flatten().map(|t| t.data);
    let missing = || Error::InputCount {
        operator: ROUTED_MLP.name,
        expected: "validated".to_owned(),
        found: inputs.iter().flatten().count(),
    };
    let (Some(isa), Some(Data::F32(gates))) = (I::detect(), data(3)) else { return Err(missing()) };
    macro_rules! typed {
        ($variant:ident, $output:expr) => {{
            let (Some(Data::$variant(x)), Some(Data::$variant(fc1)), Some(Data::$variant(fc2))) =
                (data(0), data(1), data(2))
            else {
                return Err(missing());
            };
            let bias = match (data(4), data(5)) {
                (Some(Data::$variant(first)), Some(Data::$variant(second))) => Some([first, second]),
                _ => None,
            };
            let output = Shared($output.as_mut_ptr());
            execute(&Call { isa, problem, x, fc1, fc2, gates, bias, output }, host)
        }};
    }
    match output {
        DataMut::F32(output) => typed!(F32, output),
        DataMut::F16(output) => typed!(F16, output),
        DataMut::BF16(output) => typed!(BF16, output),
    }
}

/// Hidden activations of a tile, in floats, unless one token has more.
const HIDDEN: usize = 4 << 20;
/// Most tokens of a tile.
const TILE: usize = 4096;
/// Most rows of a product: their sums stay in the second-level cache.
const ROWS: usize = 384;
/// The numbers of these rows.
static ALL: [u32; ROWS] = {
    let mut all = [0; ROWS];
    let mut i = 0;
    while i < ROWS {
        all[i] = i as u32;
        i += 1;
    }
    all
};
/// Most columns of a product of many rows, and of few.
const SPAN: [usize; 2] = [256, 4096];
/// Columns are cut at multiples of this: they fill a register tile on every instruction set.
const UNIT: usize = 64;
/// Most floats of a worker's sums over the experts.
const TOTALS: usize = 1 << 18;

/// Consecutive tokens, and how many (token, expert) pairs they have.
struct Tile {
    tokens: Range<usize>,
    pairs: usize,
}

/// Cuts the tokens. Not a matter of the number of workers, because results depend on it.
fn tiles(p: &Problem, gates: &[f32]) -> Vec<Tile> {
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

/// A tile.
struct Stage<'a, I, T> {
    call: &'a Call<'a, I, T>,
    host: &'a dyn Host,
    tokens: Range<usize>,
    selection: &'a Selection,
    /// Those that the tile's tokens use.
    experts: &'a [usize],
    /// The most tokens that use the same expert.
    rows: usize,
    /// The hidden activations of all pairs, in the selection's order, `pitch` floats apart.
    hidden: &'a Shared<f32>,
    pitch: usize,
}

/// A worker's memory.
struct Workspace<'h, A, O> {
    gemm: Gemm<'h>,
    floats: Memory<'h>,
    rows: Vec<Row<A>>,
    pairs: Vec<(*const f32, *mut O)>,
}

/// Some rows of an expert.
struct Block {
    expert: usize,
    rows: Range<usize>,
}

impl<I: Isa, T: Element> Stage<'_, I, T> {
    fn blocks(&self, expert: usize) -> impl Iterator<Item = Block> {
        let rows = self.selection.tokens(0, expert).len();
        (0..rows).step_by(ROWS).map(move |start| Block { expert, rows: start..(start + ROWS).min(rows) })
    }

    fn span(&self, columns: usize, others: usize, most: usize) -> usize {
        let widest = SPAN[usize::from(few(self.rows))].min(most);
        span(columns, UNIT, widest, others, self.host.parallelism())
    }

    /// The hidden activations.
    fn first(&self) -> Result<u64, Error> {
        let p = self.call.problem;
        let blocks: Vec<Block> = self.experts.iter().flat_map(|&expert| self.blocks(expert)).collect();
        let span = self.span(p.hidden, blocks.len(), usize::MAX);
        let spans = p.hidden.div_ceil(span);
        let make = || {
            let mut sections = Sections::default();
            let rows = self.rows.min(ROWS);
            sections.add(rows, padded(span) * p.activation.columns())?;
            let gemm = Gemm::new::<I, T>(rows, p.width, self.host)?;
            Ok(Workspace { gemm, floats: sections.allocate(self.host)?, rows: Vec::new(), pairs: Vec::new() })
        };
        share(self.host, blocks.len() * spans, make, |workspace, item| {
            let start = item % spans * span;
            self.activations(&blocks[item / spans], start..(start + span).min(p.hidden), padded(span), workspace)
        })
    }

    /// Columns `columns` of the hidden activations of a block.
    fn activations(
        &self,
        block: &Block,
        columns: Range<usize>,
        width: usize,
        workspace: &mut Workspace<'_, T, f32>,
    ) -> u64 {
        let (call, p) = (self.call, self.call.problem);
        let (expert, halves) = (block.expert, p.activation.columns());
        let stride = p.hidden * halves;
        let data = call.fc1[expert * p.width * stride..].as_ptr();
        let weight = Matrix::Columns { data, stride, block: stride, block_stride: 0 };
        let mut macs = 0;
        for half in 0..halves {
            workspace.rows.clear();
            for (row, &token) in self.selection.tokens(0, expert)[block.rows.clone()].iter().enumerate() {
                let input = call.x[(self.tokens.start + token as usize) * p.width..].as_ptr();
                let output = workspace.floats.at((row * halves + half) * width);
                workspace.rows.push(Row { input, output });
            }
            let n = half * p.hidden + columns.start..half * p.hidden + columns.end;
            let parts = [Part { rows: &ALL[..block.rows.len()], n, column: 0 }];
            // SAFETY: x has `width` elements from each input on; a row of sums has room for a padded span for each half;
            // the expert's matrix has `stride` columns.
            macs +=
                unsafe { workspace.gemm.multiply(call.isa, &workspace.rows, &parts, &weight, 0..p.width, None, true) };
        }
        workspace.pairs.clear();
        for row in 0..block.rows.len() {
            let sums = workspace.floats.at(row * halves * width).cast_const();
            // SAFETY: there is a row of `pitch` floats for every pair.
            let output = unsafe { self.hidden_row(expert, block.rows.start + row).add(columns.start) };
            workspace.pairs.push((sums, output));
        }
        let bias = call.bias.map(|[bias, _]| {
            let at = |half: usize| bias[expert * stride + half * p.hidden + columns.start..].as_ptr();
            [at(0), at(halves - 1)]
        });
        let (activation, rows, columns) = (p.activation, &workspace.pairs, columns.len());
        call.isa.vectorize(Activate { activation, rows, columns, other: width, bias });
        macs
    }

    fn hidden_row(&self, expert: usize, row: usize) -> *mut f32 {
        // SAFETY: there is a row of `pitch` floats for every pair.
        unsafe { self.hidden.0.add((self.selection.start(0, expert) + row) * self.pitch) }
    }

    /// The output.
    fn second(&self) -> Result<u64, Error> {
        let p = self.call.problem;
        let span = self.span(p.out_width, 1, TOTALS / self.tokens.len());
        let spans = p.out_width.div_ceil(span);
        let make = || {
            let mut sections = Sections::default();
            let rows = self.rows.min(ROWS);
            sections.add(self.tokens.len(), padded(span))?;
            sections.add(rows, padded(span))?;
            let gemm = Gemm::new::<I, f32>(rows, p.hidden, self.host)?;
            Ok(Workspace { gemm, floats: sections.allocate(self.host)?, rows: Vec::new(), pairs: Vec::new() })
        };
        share(self.host, spans, make, |workspace, item| {
            let start = item * span;
            self.outputs(start..(start + span).min(p.out_width), padded(span), workspace)
        })
    }

    /// Columns `columns` of the output.
    fn outputs(&self, columns: Range<usize>, width: usize, workspace: &mut Workspace<'_, f32, T>) -> u64 {
        let (call, p) = (self.call, self.call.problem);
        let totals = self.tokens.len() * width;
        workspace.floats.slice(0..totals).fill(0.0);
        let mut macs = 0;
        for block in self.experts.iter().flat_map(|&expert| self.blocks(expert)) {
            let expert = block.expert;
            let parts = [Part { rows: &ALL[..block.rows.len()], n: columns.clone(), column: 0 }];
            let data = call.fc2[expert * p.hidden * p.out_width..].as_ptr();
            let weight = Matrix::Columns { data, stride: p.out_width, block: p.out_width, block_stride: 0 };
            workspace.rows.clear();
            for (i, row) in block.rows.clone().enumerate() {
                let output = workspace.floats.at(totals + i * width);
                workspace.rows.push(Row { input: self.hidden_row(expert, row).cast_const(), output });
            }
            // SAFETY: the hidden rows were written by the first stage; a row of sums has room for a padded span; the
            // expert's matrix has all columns of the output.
            macs +=
                unsafe { workspace.gemm.multiply(call.isa, &workspace.rows, &parts, &weight, 0..p.hidden, None, true) };
            let tokens = &self.selection.tokens(0, expert)[block.rows];
            let gate = |token: u32| call.gates[(self.tokens.start + token as usize) * p.num_experts + expert];
            let total = |token: u32| workspace.floats.at(token as usize * width);
            let rows: Vec<_> = tokens
                .iter()
                .zip(&workspace.rows)
                .map(|(&token, row)| (row.output.cast_const(), total(token), gate(token)))
                .collect();
            let bias = call.bias.map(|[_, bias]| bias[expert * p.out_width + columns.start..].as_ptr());
            call.isa.vectorize(AddScaled { rows: &rows, columns: columns.len(), bias });
        }
        workspace.pairs.clear();
        for token in 0..self.tokens.len() {
            let sums = workspace.floats.at(token * width).cast_const();
            // SAFETY: the output has `out_width` columns for every token.
            let output = unsafe { call.output.0.add((self.tokens.start + token) * p.out_width + columns.start) };
            workspace.pairs.push((sums, output));
        }
        call.isa.vectorize(Store { rows: &workspace.pairs, columns: columns.len(), bias: None });
        macs
    }
}
