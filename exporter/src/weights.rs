//! The weight file: its plan, and the conversion of weights in small parts, so that memory does not grow with the model.

mod convert;
pub(crate) mod links;
mod stream;

use crate::background::{self, Buffer};
use crate::error::Error;
use crate::graph::{ElementType, Graph, Initializer, Source};
use crate::place::Place;
use crate::quantize::Piece;
use crate::text::bytes;
use convert::Converter;
pub(crate) use convert::{check, put};
use links::Linked;
use moh_runtime::Digest;
use std::ops::Range;
use std::path::Path;

/// Bytes of a matrix as it is that are in memory at a time.
const PART_BYTES: usize = 16 << 20;

/// Bytes of a transposed matrix that are in memory at a time: the largest matrices of the largest published model but one.
const BAND_BYTES: usize = if cfg!(test) { 4 << 20 } else { 112 << 20 };

/// Tensors shorter than this stay in the model file: shapes and scalars, which runtimes read while they load.
pub(crate) const INLINE_BYTES: usize = 1024;

/// Alignment of tensors in the weight file: what CUDA's libraries want, and more than any CPU does.
const ALIGNMENT: u64 = 256;

/// Where an export's weights go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Weights {
    /// Into a file beside the model.
    #[default]
    Copy,
    /// Nowhere: the checkpoint's safetensors files are used as they are, by hard links beside the model.
    Link,
    /// Into the model file, which holds up to 2 GB.
    Inline,
}

/// The largest message that protobuf allows, less what nodes, names and shapes may take.
const INLINE_LIMIT: u64 = (1 << 31) - (32 << 20);

/// Where a large tensor begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    /// The linked file, by its number; `None`: the weight file.
    pub(crate) link: Option<usize>,
    pub(crate) offset: u64,
}

/// Where the large tensors lie beside the model.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// By name; those in the weight file in order of offset.
    starts: Vec<(String, Start)>,
    /// Bytes of the weight file.
    length: u64,
    inline: bool,
    pub(crate) links: Vec<Linked>,
}

impl Plan {
    /// Places the large tensors of `graph`, a model of type `dtype`.
    ///
    /// # Errors
    /// [`Error::Inline`] where they do not fit into the model file, and should; [`Error::Link`], [`Error::LinkType`] or
    /// [`Error::LinkFormat`] where the checkpoint's files cannot be used as they are, and should.
    pub(crate) fn with(graph: &Graph, weights: Weights, dtype: ElementType, place: &Place) -> Result<Plan, Error> {
        match weights {
            Weights::Copy => return Ok(Plan::new(graph)),
            Weights::Link => return links::plan(graph, dtype, place),
            Weights::Inline => {}
        }
        let bytes = graph.initializers.iter().map(|init| init.bytes() as u64).sum();
        if bytes > INLINE_LIMIT {
            return Err(Error::Inline { path: place.output(), bytes, limit: INLINE_LIMIT });
        }
        Ok(Plan { inline: true, ..Plan::default() })
    }

    /// Whether the model file holds that tensor itself.
    pub(crate) fn holds_inline(&self, init: &Initializer) -> bool {
        self.inline || init.bytes() < INLINE_BYTES
    }

    /// Places the large tensors of `graph` one after the other.
    pub fn new(graph: &Graph) -> Plan {
        let mut plan = Plan::default();
        graph.initializers.iter().filter(|init| init.bytes() >= INLINE_BYTES).for_each(|init| plan.add(init));
        plan
    }

    /// Places a tensor in the weight file.
    fn add(&mut self, init: &Initializer) {
        let offset = self.length.next_multiple_of(ALIGNMENT);
        self.length = offset + init.bytes() as u64;
        self.starts.push((init.name.clone(), Start { link: None, offset }));
    }

    /// Bytes of the weight file.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of all tensors that are written, to the weight file or the model file.
    pub(crate) fn written(&self, graph: &Graph) -> u64 {
        let inline = graph.initializers.iter().filter(|init| self.holds_inline(init));
        self.length + inline.map(|init| init.bytes() as u64).sum::<u64>()
    }

    /// What to know of weights that are nowhere written, or were to be.
    pub(crate) fn note(&self, weights: Weights) -> Option<String> {
        let files = match self.links.len() {
            0 if weights == Weights::Link => {
                return Some(
                    "the model needs every tensor in another type or form than the checkpoint's: nothing is linked, and all weights \
                     were copied"
                        .to_owned(),
                );
            }
            0 => return None,
            1 => "a file of the checkpoint".to_owned(),
            count => format!("{count} files of the checkpoint"),
        };
        let copied = match self.length {
            0 => String::new(),
            length => format!("; {} that the model needs in another form were copied", bytes(length)),
        };
        Some(format!("the weights stay in {files}, hard-linked beside the model: do not change them in place{copied}"))
    }

    /// Names of the tensors beside the model, and where they begin.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Start)> {
        self.starts.iter().map(|(name, start)| (name.as_str(), *start))
    }
}

/// Writes the weight file that `plan` lays out, and adds its bytes to `digest`; writes none where the model has no large tensor.
/// `progress` is told how many bytes of it are ready.
///
/// # Errors
/// [`Error::Io`]; a weight that is NaN or infinite, or beyond the file's type.
pub(crate) fn write_data(
    graph: &Graph,
    plan: &Plan,
    path: &Path,
    digest: Option<&mut Digest>,
    progress: &dyn Fn(u64),
) -> Result<(), Error> {
    let mut tensors = Vec::new();
    for (name, start) in plan.iter().filter(|(_, start)| start.link.is_none()) {
        let Some(init) = graph.initializers.iter().find(|init| init.name == name) else {
            return Err(moh_models::Error::Internal("a place in the weight file without a tensor").into());
        };
        tensors.push((start.offset, init));
    }
    if tensors.is_empty() {
        return Ok(());
    }
    background::write(path, digest, |out| stream::write(&tensors, out, progress))?;
    Ok(())
}

/// An initializer's elements, converted to its type.
///
/// # Errors
/// A checkpoint's file that cannot be read; a weight that is NaN or infinite, or beyond the type.
pub(crate) fn bytes_of(init: &Initializer) -> Result<Vec<u8>, Error> {
    let (mut converter, mut out) = (Converter::default(), Buffer::default());
    match &init.source {
        Source::Bytes(bytes) => out.put(bytes),
        Source::Weight { .. } => {
            for part in parts(init) {
                converter.convert(init, &part, out.grow(part.bytes(init)))?;
            }
        }
        Source::Quantized { matrix, order, piece } => {
            let sides = order.write(matrix, &mut out)?;
            return Ok(match piece {
                Piece::Data => out.into_bytes(),
                Piece::Scales => sides.scales,
                Piece::ZeroPoints => sides.zero_points,
            });
        }
    }
    Ok(out.into_bytes())
}

/// What of a weight is made at a time.
enum Part {
    /// Of the weight as it is.
    Elements(Range<usize>),
    /// Of a matrix that is transposed.
    Columns(Range<usize>),
}

impl Part {
    fn bytes(&self, init: &Initializer) -> usize {
        let elements = match self {
            Part::Elements(elements) => elements.len(),
            Part::Columns(columns) => columns.len() * init.dims.last().copied().unwrap_or(0),
        };
        elements * init.ty.size()
    }
}

/// The parts of an initializer's weight, one after the other.
///
/// The columns of a matrix that is transposed are as many as memory allows, because the whole matrix is read for each part.
fn parts(init: &Initializer) -> Vec<Part> {
    let Source::Weight { weight, transposed } = &init.source else { return Vec::new() };
    let ranges =
        |all: usize, step: usize| (0..all).step_by(step.max(1)).map(move |start| start..all.min(start + step.max(1)));
    if !*transposed {
        return ranges(weight.elements(), PART_BYTES / init.ty.size()).map(Part::Elements).collect();
    }
    let (rows, columns) = (weight.shape()[0], weight.elements() / weight.shape()[0].max(1));
    ranges(columns, BAND_BYTES / (rows * init.ty.size()).max(1)).map(Part::Columns).collect()
}

#[cfg(test)]
mod tests;
