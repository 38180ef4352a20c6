//! Shared implementation of RoutedProjection and RoutedCombine.
//!
//! Tokens are cut into chunks and the weight's panels into spans; a work item is a chunk and a span. Each head is
//! multiplied only with the rows of the tokens that use it.

mod matrix;

use crate::epilogue::Epilogue;
use crate::gemm::{self, Gemm, Matrix, Panels, Row, Source, Weight, few};
use crate::host::Host;
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{CpuOperator, ToPack, WeightData, Work};
use crate::matrix::WIDTH;
use crate::memory::{Memory, Sections};
use crate::packed::Packed;
use crate::selection::Selection;
use crate::terms::unit_for;
use crate::workers::{Shared, share, span};
pub(crate) use matrix::Heads;
use moh_operators::routed_projection::Problem;
use moh_operators::{DType, Element, Error, Float};
use std::ops::Range;

/// The tensors of a call. Slice lengths have been validated against `problem`.
pub(crate) struct Call<'a, I, T> {
    pub(crate) isa: I,
    pub(crate) problem: &'a Problem,
    pub(crate) x: &'a [T],
    pub(crate) weight: Weight<'a, T>,
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
    /// What becomes of the sums, only for a projection to one head.
    pub(crate) epilogue: Option<&'a Epilogue<'a, T>>,
    pub(crate) output: Shared<T>,
}

/// The inputs of either operator.
pub(crate) struct Tensors<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) weight: WeightData<'a, T>,
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
    /// As of [`Call`]; without a matrix unit.
    pub(crate) epilogue: Option<&'a Epilogue<'a, T>>,
}

/// Computes the output of `O`.
pub(crate) fn run<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    unit: Option<MatrixUnit>,
    problem: &Problem,
    tensors: Tensors<'_, T>,
    output: &mut [T],
    host: &dyn Host,
) -> Result<Work, Error> {
    if let Some(unit) = unit
        && let Some(macs) = matrix::run::<I, T, O>(isa, unit, problem, &tensors, Shared(output.as_mut_ptr()), host)?
    {
        return Ok(Work { macs });
    }
    let Tensors { x, weight, gates, bias, epilogue } = tensors;
    let weight = weight.panels(O::NAME, "weight", O::panels::<I>(problem), |data| O::matrix(problem, data))?;
    let output = Shared(output.as_mut_ptr());
    execute::<I, T, O>(Call { isa, problem, x, weight, gates, bias, epilogue, output }, host)
}

/// Packs a weight of `O`: for a matrix unit in parts, beside the tensor, else for vectors. 16-bit elements are packed on request only, because
/// that may double their memory.
pub(crate) fn pack<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    of: &ToPack<'_, O, T>,
    problem: impl FnOnce(&[usize]) -> Result<Problem, Error>,
) -> Result<Option<Packed>, Error> {
    let &ToPack { unit, input, shape, weight, packing, .. } = of;
    if input != WEIGHT || !packing.all && T::FLOAT != Float::F32 {
        return Ok(None);
    }
    let problem = &problem(shape)?;
    let Some(unit) = unit_for::<T>(unit, packing.precision) else {
        return pack_panels::<I, T, O>(isa, problem, shape, weight).map(Some);
    };
    // A unit that is not for few tokens leaves them the tensor: both would be in memory.
    if unit.most_terms() == 1 || !packing.beside {
        return Ok(None);
    }
    // A head's inner indices may be multiplied together with another's, which are 0 then; so must be the products.
    let is_finite =
        O::HEADS == Heads::Columns || T::FLOAT == Float::F32 || weight.iter().all(|x| x.to_f32().is_finite());
    match is_finite && O::matrix(problem, weight).has_whole(WIDTH) {
        true => matrix::pack::<I, T, O>(isa, problem, shape, weight, packing.precision),
        false => Ok(None),
    }
}

/// Number of the input that can be packed.
const WEIGHT: usize = 1;

/// Packs the weight of `O` for vectors. Its length has been checked against its shape, from which `problem` was made.
pub(crate) fn pack_panels<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    problem: &Problem,
    shape: &[usize],
    weight: &[T],
) -> Result<Packed, Error> {
    let panels = O::panels::<I>(problem);
    // SAFETY: the matrix has the sizes of `problem`, as the panels do.
    unsafe { Packed::new(isa, &O::matrix(problem, weight), panels, shape) }
}

/// The parts in which the two operators differ.
pub(crate) trait HeadLinear: CpuOperator {
    /// What heads are.
    const HEADS: Heads;

    /// The panels of the weight.
    fn panels<I: Isa>(p: &Problem) -> Panels;
    /// Inner indices and columns of the weight.
    fn size(p: &Problem) -> [usize; 2] {
        let (heads, width) = (p.num_heads * p.block, p.width);
        match Self::HEADS {
            Heads::Columns => [width, heads],
            Heads::Inner => [heads, width],
        }
    }
    /// The weight, read in place.
    fn matrix<T: Element>(p: &Problem, weight: &[T]) -> Matrix<T>;
    /// Blocks of the inner dimension are cut at multiples of this, if possible.
    fn unit(p: &Problem) -> usize;
    /// Computes a work item. Returns the number of multiply-accumulate operations.
    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64;
}

/// A work item.
pub(crate) struct Item {
    pub(crate) chunk: usize,
    /// The tokens of the chunk.
    pub(crate) tokens: Range<usize>,
    /// Those of them that belong to the item, counted from the chunk's first.
    pub(crate) part: Range<usize>,
    pub(crate) panels: Range<usize>,
}

impl Item {
    /// The item's tokens among those of the chunk, which ascend.
    pub(crate) fn part_of<'a>(&self, tokens: &'a [u32]) -> &'a [u32] {
        let before = |end: usize| tokens.partition_point(|&token| (token as usize) < end);
        &tokens[before(self.part.start)..before(self.part.end)]
    }
}

/// Partition of the output into work items.
struct Cut {
    /// Tokens per chunk. Independent of the number of workers, because the rounding of results depends on it.
    chunk: usize,
    /// Tokens of an item. All of a chunk, unless the weight is packed: else each item would pack it.
    part: usize,
    /// Panels per span.
    span: usize,
}

/// Maximum columns per span.
const SPAN: usize = 512;
/// Maximum columns per span for chunks of few tokens.
const FEW_SPAN: usize = 4096;
/// Tokens of an item at least, if a chunk's are divided.
const LEAST_PART: usize = 32;
/// What an item takes besides multiplying, in tokens: to read a panel from another cache, and to begin.
const PANEL: usize = 4;
const BEGIN: usize = 4;

impl Cut {
    fn new<I: Isa, T: Element>(call: &Call<'_, I, T>, workers: usize) -> Cut {
        let (p, panels) = (call.problem, &call.weight.panels);
        let chunks = p.tokens.div_ceil(gemm::rows_at_once::<T>(call.weight.blocks::<I>().rows, panels.k)).max(1);
        let chunk = p.tokens.div_ceil(chunks).max(1);
        let widest = (0..panels.len()).map(|panel| panels.width(panel)).max().unwrap_or(1);
        let most = if few(chunk) { FEW_SPAN } else { SPAN } / widest;
        match call.weight.source {
            Source::Packed(_) if workers > 1 => {
                let (part, span) = divide(chunk, panels.len(), most.max(1), chunks, workers);
                Cut { chunk, part, span }
            }
            _ => Cut { chunk, part: chunk, span: span(panels.len(), 1, most, chunks, workers) },
        }
    }
}

/// Tokens of an item and panels of a span, at most `most`, with which `workers` workers are done first.
fn divide(chunk: usize, panels: usize, most: usize, chunks: usize, workers: usize) -> (usize, usize) {
    let parts = (1..=chunk.div_ceil(LEAST_PART)).map(|parts| chunk.div_ceil(parts));
    let ways = parts.flat_map(|part| (1..=most.min(panels)).map(move |span| (part, span)));
    // Until the last worker ends. Workers are not equally fast, so the last item may begin late.
    let time = |&(part, span): &(usize, usize)| {
        let item = span * (part + PANEL) + BEGIN;
        let rounds = (chunks * chunk.div_ceil(part) * panels.div_ceil(span)).div_ceil(workers);
        rounds * item + item / 4
    };
    ways.min_by_key(time).unwrap_or((chunk, 1))
}

/// A worker's memory.
pub(crate) struct Workspace<'h, T> {
    pub(crate) gemm: Gemm<'h>,
    pub(crate) sums: Memory<'h>,
    /// Stride of the rows of sums; 0 if the sums are accumulated in the output itself.
    pub(crate) pitch: usize,
    pub(crate) copies: Memory<'h>,
    /// Of the tokens of a chunk, and which that is.
    pub(crate) rows: Vec<Row>,
    pub(crate) chunk: Option<usize>,
    pub(crate) pairs: Vec<(*const f32, *mut T)>,
}

impl<T: Element> Workspace<'_, T> {
    /// Sets up a row for each token of the item's chunk, unless that is done. Returns the panel whose columns come first in the rows of sums.
    pub(crate) fn load<I: Isa>(&mut self, call: &Call<'_, I, T>, item: &Item) -> usize {
        let (tokens, panels) = (&item.tokens, &call.weight.panels);
        if self.chunk != Some(item.chunk) {
            let input = |row: usize| call.x[(tokens.start + row) * panels.k..].as_ptr();
            // SAFETY: x has `k` elements for every token; `copies` has room for all tokens of a chunk.
            unsafe { gemm::load(call.isa, tokens.len(), panels.k, input, &mut self.copies, &mut self.rows) };
            for (i, row) in self.rows.iter_mut().enumerate() {
                row.output = match self.pitch {
                    // SAFETY: the output has all columns for every token, and its elements are floats if the pitch is 0.
                    0 => unsafe { call.output.0.add((tokens.start + i) * panels.all_columns()).cast() },
                    pitch => self.sums.at(i * pitch),
                };
            }
            self.chunk = Some(item.chunk);
        }
        if self.in_place() { 0 } else { item.panels.start }
    }

    /// What the next span of columns begins with, which this worker mostly multiplies next: to prefetch.
    pub(crate) fn after<I>(&self, call: &Call<'_, I, T>, item: &Item) -> Option<(usize, Range<usize>)> {
        let Panels { k, .. } = call.weight.panels;
        let panel = Some(item.panels.end).filter(|&panel| panel < call.weight.panels.len())?;
        Some((panel, self.gemm.blocks(k).next()?))
    }

    /// Whether sums are accumulated in the output itself.
    pub(crate) fn in_place(&self) -> bool {
        self.pitch == 0
    }

    /// Initialises sums with the bias, or 0: `columns` columns of `rows`, from `column` on.
    pub(crate) fn begin(&self, rows: impl Iterator<Item = usize>, column: usize, columns: usize, bias: Option<&[T]>) {
        for row in rows {
            // SAFETY: each row of sums has room for these columns, and belongs to this worker.
            let sums = unsafe { std::slice::from_raw_parts_mut(self.rows[row].output.add(column), columns) };
            match bias {
                Some(bias) => sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum = bias.to_f32()),
                None => sums.fill(0.0),
            }
        }
    }
}

fn execute<I: Isa, T: Element, O: HeadLinear>(call: Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    let (p, panels) = (call.problem, &call.weight.panels);
    let cut = Cut::new(&call, host.parallelism());
    let selection = Selection::new(call.gates, p.num_heads, cut.chunk)?;
    let spans = (0..panels.len()).step_by(cut.span).map(|start| start..(start + cut.span).min(panels.len()));
    let spans: Vec<Range<usize>> = spans.collect();
    let parts = cut.chunk.div_ceil(cut.part);
    let pitch = match T::DTYPE == DType::F32 && panels.exact() {
        true => 0,
        false => spans.iter().map(|span| panels.padded(span.start, span.end)).max().unwrap_or(0),
    };
    let make = || {
        let (mut sums, mut copies) = (Sections::default(), Sections::default());
        sums.add(cut.chunk, pitch)?;
        gemm::copies::<T>(cut.chunk, call.weight.panels.k, &mut copies)?;
        let gemm = Gemm::new::<I, T>(cut.chunk, O::unit(p), &call.weight, host)?;
        let (sums, copies) = (sums.allocate(host)?, copies.allocate(host)?);
        let rows = Vec::with_capacity(cut.chunk);
        Ok(Workspace { gemm, sums, pitch, copies, rows, chunk: None, pairs: Vec::new() })
    };
    let work = |workspace: &mut Workspace<'_, T>, index: usize| {
        let (chunk, part, span) = (index / spans.len() / parts, index / spans.len() % parts, index % spans.len());
        let tokens = chunk * cut.chunk..((chunk + 1) * cut.chunk).min(p.tokens);
        let part = part * cut.part..((part + 1) * cut.part).min(tokens.len());
        if part.is_empty() {
            return 0;
        }
        O::item(&call, &selection, Item { chunk, tokens, part, panels: spans[span].clone() }, workspace)
    };
    let items = p.tokens.div_ceil(cut.chunk) * parts * spans.len();
    Ok(Work { macs: share(host, items, make, work)? })
}
