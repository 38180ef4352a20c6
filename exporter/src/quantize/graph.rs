//! Puts quantised weights into a recorded graph.

mod candidates;
mod embedding;
mod nodes;
mod rewriter;
mod routing;

use super::matrix::Matrix;
use super::report::KeptReason;
use super::search::Grid;
use super::{Activations, BLOCKS, Bits, Form, Quantize};
use crate::graph::{ElementType, Graph};
use candidates::{Candidate, candidates};
use moh_models::Weight;
pub(crate) use nodes::MICROSOFT;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Where a model keeps how it was quantised.
pub(crate) const METADATA: &str = "moh.quantize";

/// Why weights cannot be quantised as asked for.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Problem {
    /// Rows that are no whole blocks.
    #[error(
        "{}: tensor {tensor:?} has rows of {columns} numbers, which are no whole blocks of {block}{}{}",
        file.display(), fitting(fits), more(others)
    )]
    Block {
        /// The checkpoint's file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Numbers of a row.
        columns: usize,
        /// Numbers of a block.
        block: usize,
        /// Blocks that divide the rows of all tensors.
        fits: Vec<usize>,
        /// Other tensors that the blocks do not divide either.
        others: Box<[String]>,
    },
    /// Numbers of a block that runtimes have no kernels for.
    #[error("blocks of {block} numbers: expected 16, 32, 64, 128 or 256")]
    BlockSize {
        /// Numbers of a block.
        block: usize,
    },
    /// A type of model whose weights cannot be quantised.
    #[error("a model in {ty} cannot be quantised: expected f32 or f16")]
    Type {
        /// The type.
        ty: ElementType,
    },
    /// Operators that the operator set does not have.
    #[error(
        "ONNX operator set {opset} has no DequantizeLinear with blocks: expected 21 or higher, or the form nbits or moh"
    )]
    Opset {
        /// The version.
        opset: i64,
    },
    /// Integer activations in a form that cannot say so.
    #[error("int8 activations need the form nbits or moh: DequantizeLinear and MatMul compute in floating point")]
    Activations,
    /// A pattern that no layer has the name of.
    #[error("no layer that could be quantised is named {pattern:?}; names are {}, for example", known.join(", "))]
    Keep {
        /// The pattern.
        pattern: String,
        /// Some names of layers.
        known: Vec<String>,
    },
    /// A model without a layer that is large enough.
    #[error("this model has no layer that is large enough to be quantised")]
    Nothing,
    /// A reduced range of weights that have 4 bits.
    #[error("a reduced range is one of weights of 8 bits: those of 4 bits have a smaller one")]
    ReduceRange,
    /// A model all of whose layers are kept.
    #[error(
        "no layer of this model is left to be quantised: all are kept by their names, because they choose heads, or because their \
         rows are no whole blocks"
    )]
    NothingLeft,
    /// A model none of whose layers has rows that can be quantised.
    #[error("no layer of this model can be quantised: their rows are no whole blocks of any size")]
    NothingFits,
}

fn fitting(fits: &[usize]) -> String {
    match fits {
        [] => "; no size of a block divides them".to_owned(),
        _ => {
            let sizes: Vec<String> = fits.iter().map(usize::to_string).collect();
            format!("; blocks of {} would do", sizes.join(" or "))
        }
    }
}

fn more(others: &[String]) -> String {
    match others.len() {
        0 => String::new(),
        1 => " (1 more tensor has no whole blocks either)".to_owned(),
        count => format!(" ({count} more tensors have no whole blocks either)"),
    }
}

/// What was quantised.
#[derive(Debug, Clone)]
pub struct Quantization {
    pub(super) options: Quantize,
    /// By the tensors' names.
    pub(super) matrices: BTreeMap<String, Matrix>,
    /// The tensors that were not.
    pub(super) kept: BTreeMap<String, KeptReason>,
    /// Whether some of those that were quantised decide which heads are on.
    decides_heads: bool,
}

/// Quantises the weights of `graph`, as recorded: values keep their names.
///
/// # Errors
/// [`Problem`].
pub fn apply(graph: &mut Graph, options: &Quantize) -> Result<Quantization, Problem> {
    apply_all(&mut [graph], options)?.pop().ok_or(Problem::Nothing)
}

/// Quantises the weights of graphs that are exported together: a pattern has to name a layer of one of them.
///
/// # Errors
/// [`Problem`].
pub(crate) fn apply_all(graphs: &mut [&mut Graph], options: &Quantize) -> Result<Vec<Quantization>, Problem> {
    let mut found = Vec::new();
    for graph in graphs.iter() {
        check(graph, options)?;
        found.push(candidates(graph));
    }
    if found.iter().all(Vec::is_empty) {
        return Err(Problem::Nothing);
    }
    let all: Vec<&Candidate> = found.iter().flatten().collect();
    let named = |pattern: &&String| all.iter().any(|candidate| candidate.is_named(pattern));
    if let Some(pattern) = options.keep.iter().find(|pattern| !named(pattern)) {
        /// Names in a message.
        const SHOWN: usize = 3;
        let known = all.iter().take(SHOWN).map(|candidate| candidate.weight.name().to_owned()).collect();
        return Err(Problem::Keep { pattern: pattern.clone(), known });
    }
    let unfit = found.iter().all(|found| found.iter().all(|one| block_of(one, found, options).is_none()));
    let parts: Vec<(Vec<Candidate>, Quantize, BTreeMap<String, KeptReason>)> =
        graphs.iter().zip(found).map(|(graph, found)| keep(graph, found, options)).collect();
    let all: Vec<&Candidate> = parts.iter().flat_map(|(found, ..)| found).collect();
    if all.is_empty() {
        return Err(if unfit { Problem::NothingFits } else { Problem::NothingLeft });
    }
    if !options.fit_blocks {
        check_blocks(&all, options.block)?;
    }
    let quantized = graphs.iter_mut().zip(parts).map(|(graph, (found, options, kept))| {
        let matrix = |candidate: &Candidate| {
            let Quantize { bits, zero_points, reduce_range, .. } = options;
            let grid = Grid { bits, zero_points, reduce_range, scale: candidate.ty };
            let block = block_of(candidate, &found, &options).unwrap_or(options.block);
            (candidate.weight.name().to_owned(), candidate.matrix(grid, block))
        };
        let matrices = found.iter().map(matrix).collect();
        let decides_heads = !routing::deciding(graph, &found).is_empty();
        nodes::rewrite(graph, &options, &matrices);
        if let Ok(text) = serde_json::to_string(&options) {
            graph.metadata.insert(METADATA.to_owned(), text);
        }
        Quantization { options, matrices, kept, decides_heads }
    });
    Ok(quantized.collect())
}

/// The candidates without those that are to be kept, which are the last part; and the options with those patterns only that name a
/// layer of theirs. Whoever shares a node with a layer that is kept stays as well.
fn keep(
    graph: &Graph,
    mut found: Vec<Candidate>,
    options: &Quantize,
) -> (Vec<Candidate>, Quantize, BTreeMap<String, KeptReason>) {
    let mut options = options.clone();
    options.keep.retain(|pattern| found.iter().any(|candidate| candidate.is_named(pattern)));
    let deciding = if options.exact_routing { routing::deciding(graph, &found) } else { BTreeSet::new() };
    let reason = |candidate: &Candidate| {
        let is_named = options.keep.iter().any(|pattern| candidate.is_named(pattern));
        let rows = || block_of(candidate, &found, &options).is_none().then_some(KeptReason::Rows);
        let routing = || deciding.contains(candidate.weight.name()).then_some(KeptReason::Routing);
        is_named.then_some(KeptReason::Asked).or_else(routing).or_else(rows)
    };
    let mut kept = BTreeMap::new();
    for candidate in &found {
        let Some(reason) = reason(candidate) else { continue };
        kept.insert(candidate.weight.name().to_owned(), reason);
        for partner in &candidate.partners {
            kept.entry(partner.clone()).or_insert(KeptReason::Together);
        }
    }
    found.retain(|candidate| !kept.contains_key(candidate.weight.name()));
    (found, options, kept)
}

/// The numbers that share a scale in one of the weights, the same in those of its node. `None` if no blocks fit its rows.
fn block_of(candidate: &Candidate, all: &[Candidate], options: &Quantize) -> Option<usize> {
    if !options.fit_blocks {
        return Some(options.block);
    }
    let is_partner = |other: &&Candidate| candidate.partners.iter().any(|name| name == other.weight.name());
    let fits = |block: &usize| {
        let mut together = all.iter().filter(is_partner).chain([candidate]);
        together.all(|candidate| candidate.columns().is_multiple_of(*block))
    };
    BLOCKS.into_iter().rev().filter(|&block| block <= options.block).find(fits)
}

fn check(graph: &Graph, options: &Quantize) -> Result<(), Problem> {
    if !BLOCKS.contains(&options.block) {
        return Err(Problem::BlockSize { block: options.block });
    }
    if options.reduce_range && options.bits != Bits::Int8 {
        return Err(Problem::ReduceRange);
    }
    if options.form == Form::Qdq && options.activations == Activations::Int8 {
        return Err(Problem::Activations);
    }
    if options.form == Form::Qdq && graph.opset < 21 {
        return Err(Problem::Opset { opset: graph.opset });
    }
    match graph.outputs.iter().any(|output| output.ty == ElementType::BF16) {
        true => Err(Problem::Type { ty: ElementType::BF16 }),
        false => Ok(()),
    }
}

fn check_blocks(found: &[&Candidate], block: usize) -> Result<(), Problem> {
    let fits = |candidate: &Candidate, block: &usize| candidate.columns().is_multiple_of(*block);
    // Those that no size fits come first, alone: the others are not to be left in floating point for their sake.
    let never = |candidate: &&&Candidate| !BLOCKS.iter().any(|block| fits(candidate, block));
    let hopeless: Vec<&&Candidate> = found.iter().filter(never).collect();
    let wrong: Vec<&&Candidate> = found.iter().filter(|candidate| !fits(candidate, &block)).collect();
    let mut wrong = if hopeless.is_empty() { wrong } else { hopeless }.into_iter();
    let Some(first) = wrong.next() else { return Ok(()) };
    let name = |candidate: &&Candidate| candidate.weight.name().to_owned();
    let divides_all = |block: &usize| found.iter().all(|candidate| fits(candidate, block));
    Err(Problem::Block {
        file: first.weight.place(0).file.to_owned(),
        tensor: name(first),
        columns: first.columns(),
        block,
        fits: BLOCKS.into_iter().filter(divides_all).collect(),
        others: wrong.map(name).collect(),
    })
}

impl Quantization {
    /// Whether products are computed in integers.
    pub(crate) fn rounds_activations(&self) -> bool {
        self.options.activations == Activations::Int8
    }

    /// What to know where the routing was to be quantised too.
    pub(crate) fn note(&self) -> Option<String> {
        let asked = self.options.bits == Bits::Int8 && !self.options.exact_routing;
        let note = "quantising the routing too changed nothing: no quantised weight decides which heads are on";
        (asked && !self.decides_heads).then(|| note.to_owned())
    }

    /// The numbers that a weight has in the quantised model, in f32: the checkpoint's own where it is not quantised.
    ///
    /// # Errors
    /// A file that cannot be read, or numbers that cannot be quantised.
    pub fn read(&self, weight: &Weight) -> moh_models::ops::Result<Vec<f32>> {
        // Rows of a matrix are quantised alike, with the others or without them.
        let name = weight.name();
        let whole = || name.rsplit_once('[').and_then(|(whole, _)| self.matrices.get(whole));
        match self.matrices.get(name).or_else(whole) {
            None => weight.to_f32(),
            Some(matrix) => matrix.of_other(weight).dequantized().map_err(|error| match error {
                crate::Error::Model(error) => error,
                // The model would not have been written.
                _ => moh_models::Error::Internal("a weight that cannot be quantised"),
            }),
        }
    }
}
