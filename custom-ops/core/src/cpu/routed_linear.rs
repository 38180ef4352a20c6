//! RoutedProjection and RoutedCombine on a CPU.
//!
//! Tokens are cut into chunks and the weight's panels into spans; an item of work is one of each. A head is multiplied on the
//! rows of its tokens alone.

mod combine;
mod projection;

use super::Work;
use super::gemm::{self, Gemm, Matrix, Panels, Row, Source, Weight, few};
use super::isa::Isa;
use super::memory::{Memory, Sections};
use super::packed::Packed;
use super::selection::Selection;
use super::workers::{Shared, share, span};
use crate::error::Error;
use crate::host::Host;
use crate::schema::Attributes;
use crate::shape::routed_linear::Problem;
use crate::tensor::{DType, Data, DataMut, Element, Tensor};
use std::ops::Range;

/// The input that can be packed.
const WEIGHT: usize = 1;

/// The tensors. Lengths are those that the validator requires of `problem`.
struct Call<'a, I, T> {
    isa: I,
    problem: &'a Problem,
    x: &'a [T],
    weight: Weight<'a, T>,
    gates: &'a [f32],
    bias: Option<&'a [T]>,
    output: Shared<T>,
}

/// RoutedProjection. See [`super::Kernel`].
pub(super) fn project<I: Isa>(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    run::<I, projection::Projection>(attributes, inputs, output, host)
}

/// RoutedCombine. See [`super::Kernel`].
pub(super) fn combine<I: Isa>(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    run::<I, combine::Combine>(attributes, inputs, output, host)
}

fn run<I: Isa, O: Linear>(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|t| t.shape)).collect();
    let problem = &Problem::new(attributes, &shapes)?;
    let data = |i: usize| inputs.get(i).copied().flatten().map(|t| t.data);
    let missing = || Error::InputCount {
        operator: attributes.operator().name,
        expected: "validated".to_owned(),
        found: inputs.iter().flatten().count(),
    };
    let (Some(isa), Some(Data::F32(gates))) = (I::detect(), data(2)) else { return Err(missing()) };
    macro_rules! typed {
        ($variant:ident, $output:expr) => {{
            let Some(Data::$variant(x)) = data(0) else { return Err(missing()) };
            let panels = O::panels::<I>(problem);
            let source = match data(WEIGHT) {
                Some(Data::$variant(weight)) => Source::Matrix(O::matrix(problem, weight)),
                Some(Data::Packed(packed)) => Source::Packed(packed.panels(attributes.operator(), WEIGHT, &panels)?),
                _ => return Err(missing()),
            };
            let weight = Weight { panels, source };
            let bias = match data(3) {
                Some(Data::$variant(bias)) => Some(bias),
                _ => None,
            };
            let output = Shared($output.as_mut_ptr());
            execute::<I, _, O>(Call { isa, problem, x, weight, gates, bias, output }, host)
        }};
    }
    match output {
        DataMut::F32(output) => typed!(F32, output),
        DataMut::F16(output) => typed!(F16, output),
        DataMut::BF16(output) => typed!(BF16, output),
    }
}

/// Packs the weight of RoutedProjection. See [`super::Kernel`].
pub(super) fn pack_projection<I: Isa>(
    attributes: &Attributes,
    input: usize,
    weight: Tensor<'_>,
) -> Result<Option<Packed>, Error> {
    pack::<I, projection::Projection>(attributes, input, weight)
}

/// Packs the weight of RoutedCombine. See [`super::Kernel`].
pub(super) fn pack_combine<I: Isa>(
    attributes: &Attributes,
    input: usize,
    weight: Tensor<'_>,
) -> Result<Option<Packed>, Error> {
    pack::<I, combine::Combine>(attributes, input, weight)
}

fn pack<I: Isa, O: Linear>(attributes: &Attributes, input: usize, weight: Tensor<'_>) -> Result<Option<Packed>, Error> {
    let (WEIGHT, Some(isa)) = (input, I::detect()) else { return Ok(None) };
    let problem = &Problem::of_weight(attributes, weight.shape)?;
    let panels = O::panels::<I>(problem);
    macro_rules! typed {
        ($data:expr) => {
            // SAFETY: the weight's length is that of its shape, which the problem was read from.
            unsafe { Packed::new(isa, &O::matrix(problem, $data), panels, $data.len()) }.map(Some)
        };
    }
    match weight.data {
        Data::F32(data) => typed!(data),
        Data::F16(data) => typed!(data),
        Data::BF16(data) => typed!(data),
        Data::Packed(_) => Ok(None),
    }
}

/// What the two operators do differently.
trait Linear {
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
struct Item {
    chunk: usize,
    /// The chunk's tokens.
    tokens: Range<usize>,
    panels: Range<usize>,
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
struct Workspace<'h, T> {
    gemm: Gemm<'h>,
    sums: Memory<'h>,
    /// Distance of the sums' rows; 0 where the sums are the output itself.
    pitch: usize,
    copies: Memory<'h>,
    rows: Vec<Row>,
    pairs: Vec<(*const f32, *mut T)>,
}

impl<T: Element> Workspace<'_, T> {
    /// Makes a row for each of the item's tokens.
    fn load<I: Isa>(&mut self, call: &Call<'_, I, T>, item: &Item) {
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
    fn in_place(&self) -> bool {
        self.pitch == 0
    }

    /// Lets sums begin with the bias, or 0: `columns` columns of `rows`, from `column` on.
    fn begin(&self, rows: impl Iterator<Item = usize>, column: usize, columns: usize, bias: Option<&[T]>) {
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

fn execute<I: Isa, T: Element, O: Linear>(call: Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
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
