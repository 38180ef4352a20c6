//! What RoutedProjection and RoutedCombine have in common.
//!
//! Tokens are cut into chunks and the weight's panels into spans; an item of work is one of each. A head is multiplied on the
//! rows of its tokens alone.

use crate::gemm::{self, Gemm, Matrix, Panels, Row, Weight, few};
use crate::host::Host;
use crate::isa::Isa;
use crate::kernel::{WeightData, Work};
use crate::memory::{Memory, Sections};
use crate::packed::Packed;
use crate::selection::Selection;
use crate::workers::{Shared, share, span};
use moh_operators::routed_projection::Problem;
use moh_operators::{DType, Definition, Element, Error};
use std::ops::Range;

/// The tensors. Lengths are those that the validator requires of `problem`.
pub(crate) struct Call<'a, I, T> {
    pub(crate) isa: I,
    pub(crate) problem: &'a Problem,
    pub(crate) x: &'a [T],
    pub(crate) weight: Weight<'a, T>,
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) output: Shared<T>,
}

/// The inputs of either operator.
pub(crate) struct Tensors<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) weight: WeightData<'a, T>,
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
}

/// Computes the output of `O`.
pub(crate) fn run<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    problem: &Problem,
    tensors: Tensors<'_, T>,
    output: &mut [T],
    host: &dyn Host,
) -> Result<Work, Error> {
    let Tensors { x, weight, gates, bias } = tensors;
    let weight = weight.panels(O::NAME, "weight", O::panels::<I>(problem), |data| O::matrix(problem, data))?;
    let output = Shared(output.as_mut_ptr());
    execute::<I, T, O>(Call { isa, problem, x, weight, gates, bias, output }, host)
}

/// Packs the weight of `O`, which has this problem.
pub(crate) fn pack<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    problem: &Problem,
    shape: &[usize],
    weight: &[T],
) -> Result<Option<Packed>, Error> {
    let panels = O::panels::<I>(problem);
    // SAFETY: the weight's length is that of its shape, which the problem was read from.
    unsafe { Packed::new(isa, &O::matrix(problem, weight), panels, shape) }.map(Some)
}

/// What the two operators do differently.
pub(crate) trait HeadLinear: Definition {
    /// The weight's panels.
    fn panels<I: Isa>(p: &Problem) -> Panels;
    /// The weight in place.
    fn matrix<T: Element>(p: &Problem, weight: &[T]) -> Matrix<T>;
    /// Inner indices that should not be cut, if they need not.
    fn unit(p: &Problem) -> usize;
    /// Computes an item. The result is the number of multiply-accumulate operations.
    fn item<I: Isa, T: Element>(
        call: &Call<'_, I, T>,
        selection: &Selection,
        item: Item,
        workspace: &mut Workspace<'_, T>,
    ) -> u64;
}

/// A piece of the output.
pub(crate) struct Item {
    pub(crate) chunk: usize,
    /// The chunk's tokens.
    pub(crate) tokens: Range<usize>,
    pub(crate) panels: Range<usize>,
}

/// How the output is cut.
struct Cut {
    /// Tokens of a chunk: not a matter of the number of workers, because results depend on it.
    chunk: usize,
    /// Panels of a span.
    span: usize,
}

/// Most tokens of a chunk: a packed panel is read often, and a panel's sums stay in the second-level cache.
const CHUNK: usize = 384;
/// Most columns of a span.
const SPAN: usize = 512;
/// The same for chunks of few tokens.
const FEW_SPAN: usize = 4096;

impl Cut {
    fn new<I, T: Element>(call: &Call<'_, I, T>, workers: usize) -> Cut {
        let (p, panels) = (call.problem, &call.weight.panels);
        let chunks = p.tokens.div_ceil(gemm::rows_at_once::<T>(CHUNK, panels.k)).max(1);
        let chunk = p.tokens.div_ceil(chunks).max(1);
        let widest = (0..panels.len()).map(|panel| panels.width(panel)).max().unwrap_or(1);
        let most = if few(chunk) { FEW_SPAN } else { SPAN } / widest;
        let span = span(panels.len(), 1, most, chunks, workers);
        Cut { chunk, span }
    }
}

/// A worker's memory.
pub(crate) struct Workspace<'h, T> {
    pub(crate) gemm: Gemm<'h>,
    pub(crate) sums: Memory<'h>,
    /// Stride of the sums' rows; 0 where the sums are the output itself.
    pub(crate) pitch: usize,
    pub(crate) copies: Memory<'h>,
    pub(crate) rows: Vec<Row>,
    pub(crate) pairs: Vec<(*const f32, *mut T)>,
}

impl<T: Element> Workspace<'_, T> {
    /// Makes a row for each of the item's tokens.
    pub(crate) fn load<I: Isa>(&mut self, call: &Call<'_, I, T>, item: &Item) {
        let (tokens, panels) = (&item.tokens, &call.weight.panels);
        let width = call.weight.panels.k;
        let input = |row: usize| call.x[(tokens.start + row) * width..].as_ptr();
        // SAFETY: x has `width` elements for every token; the copies are as many as a chunk has tokens.
        unsafe { gemm::load(call.isa, tokens.len(), width, input, &mut self.copies, &mut self.rows) };
        let (columns, start) =
            (panels.all_columns(), panels.columns(&(item.panels.start..item.panels.start + 1)).start);
        for (i, row) in self.rows.iter_mut().enumerate() {
            row.output = match self.pitch {
                // SAFETY: the output has all columns for every token; it holds floats, or the sums would not be there.
                0 => unsafe { call.output.0.add((tokens.start + i) * columns + start).cast() },
                pitch => self.sums.at(i * pitch),
            };
        }
    }

    /// Whether the rows' sums are the output itself.
    pub(crate) fn in_place(&self) -> bool {
        self.pitch == 0
    }

    /// Lets sums begin with the bias, or 0: `columns` columns of `rows`, from `column` on.
    pub(crate) fn begin(&self, rows: impl Iterator<Item = usize>, column: usize, columns: usize, bias: Option<&[T]>) {
        for row in rows {
            // SAFETY: the caller has room for these columns in each row of sums, which are this worker's.
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
        Ok(Workspace { gemm, sums, pitch, copies, rows: Vec::new(), pairs: Vec::new() })
    };
    let work = |workspace: &mut Workspace<'_, T>, index: usize| {
        let (chunk, span) = (index / spans.len(), index % spans.len());
        let tokens = chunk * cut.chunk..((chunk + 1) * cut.chunk).min(p.tokens);
        O::item(&call, &selection, Item { chunk, tokens, panels: spans[span].clone() }, workspace)
    };
    let items = p.tokens.div_ceil(cut.chunk) * spans.len();
    Ok(Work { macs: share(host, items, make, work)? })
}
