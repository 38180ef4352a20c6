//! RoutedProjection and RoutedCombine on a CPU.
//!
//! Tokens are cut into chunks and the output's columns into spans; an item of work is one of each. The heads of a chunk
//! that the same tokens use are multiplied together, others one by one, always on the rows of their tokens alone.

mod combine;
mod projection;

use super::Work;
use super::gemm::{Gemm, Row, few};
use super::isa::{Isa, MAX_LANES};
use super::memory::{Memory, Sections};
use super::selection::Selection;
use super::workers::{Shared, share, span};
use crate::error::Error;
use crate::host::Host;
use crate::schema::Attributes;
use crate::shape::routed_linear::Problem;
use crate::tensor::{Data, DataMut, Element, Tensor};
use std::ops::Range;

/// The tensors. Lengths are those that the validator requires of `problem`.
struct Call<'a, I, T> {
    isa: I,
    problem: &'a Problem,
    x: &'a [T],
    weight: &'a [T],
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
            let (Some(Data::$variant(x)), Some(Data::$variant(weight))) = (data(0), data(1)) else {
                return Err(missing());
            };
            let bias = match data(3) {
                Some(Data::$variant(bias)) => Some(bias),
                _ => None,
            };
            let output = Shared($output.as_mut_ptr());
            execute::<I, _, O>(&Call { isa, problem, x, weight, gates, bias, output }, host)
        }};
    }
    match output {
        DataMut::F32(output) => typed!(F32, output),
        DataMut::F16(output) => typed!(F16, output),
        DataMut::BF16(output) => typed!(BF16, output),
    }
}

/// What the two operators do differently.
trait Linear {
    /// Columns of the output.
    fn columns(p: &Problem) -> usize;
    /// The longest inner length of a product.
    fn depth(p: &Problem) -> usize;
    /// The widest set of columns that a worker should not cut, if it need not.
    fn unit(p: &Problem) -> usize;
    /// Length of a token's sums over a span.
    fn sums(p: &Problem, span: usize) -> usize;
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
    columns: Range<usize>,
}

/// How the output is cut.
struct Cut {
    /// Tokens of a chunk: not a matter of the number of workers, because results depend on it.
    chunk: usize,
    /// Columns of a span.
    span: usize,
    spans: usize,
}

/// Most tokens of a chunk: what is packed for them is read often, and their sums stay in the second-level cache.
const CHUNK: usize = 384;
/// Most columns of a span, unless one head has more.
const SPAN: usize = 512;
/// The same for chunks of few tokens.
const FEW_SPAN: usize = 4096;
/// A span is not cut below this but for chunks of few tokens: it fills a register tile on every instruction set.
const NARROW: usize = 64;
impl Cut {
    fn new(tokens: usize, columns: usize, unit: usize, workers: usize) -> Cut {
        let chunks = tokens.div_ceil(CHUNK).max(1);
        let chunk = tokens.div_ceil(chunks).max(1);
        let (unit, most) = match () {
            _ if few(chunk) => (MAX_LANES, FEW_SPAN),
            _ if unit <= 2 * NARROW => (unit, SPAN),
            _ => (NARROW, SPAN),
        };
        let span = span(columns, unit, most, chunks, workers);
        Cut { chunk, span, spans: columns.div_ceil(span) }
    }
}

/// A worker's memory.
struct Workspace<'h, T> {
    gemm: Gemm<'h>,
    sums: Memory<'h>,
    /// Distance of the sums' rows.
    pitch: usize,
    rows: Vec<Row<T>>,
    pairs: Vec<(*const f32, *mut T)>,
}

impl<T: Element> Workspace<'_, T> {
    /// The sums of a row.
    fn sums(&self, row: usize) -> *mut f32 {
        self.sums.at(row * self.pitch)
    }
}

fn execute<I: Isa, T: Element, O: Linear>(call: &Call<'_, I, T>, host: &dyn Host) -> Result<Work, Error> {
    let p = call.problem;
    let columns = O::columns(p);
    let cut = Cut::new(p.tokens, columns, O::unit(p), host.parallelism());
    let selection = Selection::new(call.gates, p.num_heads, cut.chunk)?;
    let make = || {
        let mut sections = Sections::default();
        let pitch = O::sums(p, cut.span);
        sections.add(cut.chunk, pitch)?;
        let gemm = Gemm::new::<I, T>(cut.chunk, O::depth(p), host)?;
        Ok(Workspace { gemm, sums: sections.allocate(host)?, pitch, rows: Vec::new(), pairs: Vec::new() })
    };
    let work = |workspace: &mut Workspace<'_, T>, index: usize| {
        let (chunk, span) = (index / cut.spans, index % cut.spans);
        let tokens = chunk * cut.chunk..((chunk + 1) * cut.chunk).min(p.tokens);
        let columns = span * cut.span..((span + 1) * cut.span).min(columns);
        O::item(call, &selection, Item { chunk, tokens, columns }, workspace)
    };
    let items = p.tokens.div_ceil(cut.chunk) * cut.spans;
    Ok(Work { macs: share(host, items, make, work)? })
}
