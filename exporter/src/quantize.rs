//! Weights as integers: blocks of a matrix's rows, each with a scale and perhaps a zero point.

mod graph;
mod matrix;
mod pack;
mod report;
mod search;
#[cfg(test)]
mod tests;

pub(crate) use graph::{METADATA, MICROSOFT, apply_all};
pub use graph::{Problem, Quantization, apply};
pub use matrix::Matrix;
pub use pack::{Order, Piece};
pub(crate) use pack::{Sides, Sink};
pub use report::{KeptReason, KeptTensor, LayerError, QuantizationReport};

use serde::{Deserialize, Serialize};

/// Numbers of a block that the runtimes have kernels for.
pub const BLOCKS: [usize; 5] = [16, 32, 64, 128, 256];

/// What weights are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Bits {
    /// 8 bits a weight.
    Int8,
    /// 4 bits a weight.
    Int4,
}

impl Bits {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Bits::Int8 => "int8",
            Bits::Int4 => "int4",
        }
    }

    /// Bits of a weight.
    pub fn count(self) -> usize {
        match self {
            Bits::Int8 => 8,
            Bits::Int4 => 4,
        }
    }

    /// Numbers that share a scale where nothing else was asked for. With more of them products take less time, and errors grow: those of 4 bits are
    /// larger already.
    pub fn block(self) -> usize {
        match self {
            Bits::Int8 => 64,
            Bits::Int4 => 32,
        }
    }
}

/// What products with quantised weights are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// In floating point.
    #[default]
    Float,
    /// In 8-bit integers: activations are rounded as well, each block of a row with a scale of its own.
    Int8,
}

impl Activations {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Activations::Float => "float",
            Activations::Int8 => "int8",
        }
    }
}

/// How dense layers with quantised weights are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// As `DequantizeLinear` and `MatMul`, ONNX's own operators, which onnxruntime fuses.
    #[default]
    Qdq,
    /// As `MatMulNBits` of domain `com.microsoft`, the operator that onnxruntime fuses them to.
    Nbits,
    /// As `LinearNBits` of domain `ai.moh`: libmoh_ops and tract read the weights where they lie, other runtimes dequantise them first.
    Moh,
}

impl Form {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Form::Qdq => "qdq",
            Form::Nbits => "nbits",
            Form::Moh => "moh",
        }
    }
}

/// How weights are quantised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantize {
    /// What they are stored as.
    pub bits: Bits,
    /// Numbers of a row that share a scale: one of [`BLOCKS`].
    pub block: usize,
    /// What becomes of a tensor whose rows are no whole blocks: with `true`, its blocks are the largest of [`BLOCKS`] that fit, and it stays in floating point
    /// if none does; with `false`, as in models of earlier versions, it is an error.
    #[serde(default)]
    pub fit_blocks: bool,
    /// Whether each block has a zero point; else it is the middle of the range.
    pub zero_points: bool,
    /// Whether integers of 8 bits lie between 64 and 191 only, in the middle half of the range: on processors with AVX2 but without VNNI, products of such
    /// weights take fewer instructions.
    #[serde(default)]
    pub reduce_range: bool,
    /// What products are computed in.
    pub activations: Activations,
    /// How dense layers are written.
    pub form: Form,
    /// Names of layers or tensors that are not quantised; * stands for any text.
    pub keep: Vec<String>,
    /// Whether query projections and embedding stay in floating point where the heads are chosen by query norms. Models of earlier
    /// versions, whose metadata say nothing of it, have them quantised.
    #[serde(default)]
    pub exact_routing: bool,
}

impl Quantize {
    /// Symmetric blocks of [`Bits::block`] numbers, or smaller ones where they have to be; routing as it was for int8, and everything else as it is by default.
    pub fn new(bits: Bits) -> Quantize {
        Quantize {
            bits,
            block: bits.block(),
            fit_blocks: true,
            zero_points: false,
            reduce_range: false,
            activations: Activations::default(),
            form: Form::default(),
            keep: Vec::new(),
            exact_routing: bits == Bits::Int8,
        }
    }
}
