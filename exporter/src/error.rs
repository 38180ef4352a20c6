//! Why an export fails.

use crate::difference::Difference;
use std::path::PathBuf;

/// A failure of an export. Nothing is left behind at the output.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint, its configuration or its tensors.
    #[error(transparent)]
    Model(#[from] moh_models::Error),
    /// An operator refuses the attributes of a node.
    #[error(transparent)]
    Operator(#[from] moh_operators::Error),
    /// Weights that cannot be quantised as asked for.
    #[error(transparent)]
    Quantize(#[from] crate::quantize::Problem),
    /// The operating system refused.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// The output is there already.
    #[error("{} exists already", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The folder to convert to is there already.
    #[error("{} exists already, and a conversion replaces nothing", path.display())]
    FolderExists {
        /// The path.
        path: PathBuf,
    },
    /// A share of heads that makes no router.
    #[error("share of {which} heads: expected {expected}, found {found}")]
    Share {
        /// Which heads: `shared` or `active`.
        which: &'static str,
        /// What it may be.
        expected: String,
        /// The share.
        found: f64,
    },
    /// Weights that no router's can be put beside.
    #[error("{}: the router's weights cannot be put beside it: {problem}", file.display())]
    Routers {
        /// The checkpoint's file.
        file: PathBuf,
        /// Why not.
        problem: &'static str,
    },
    /// A file that would be written beside the model is there already, with other contents. No other model is there.
    #[error("{} exists already and differs from what this model needs there, made from {}", path.display(), source_file.display())]
    SideFile {
        /// The file.
        path: PathBuf,
        /// What the new contents follow from.
        source_file: PathBuf,
    },
    /// The same, where it belongs to another model.
    #[error(
        "{} belongs to {} and differs from what this model needs there, made from {}",
        path.display(), owner.display(), source_file.display()
    )]
    ForeignSideFile {
        /// The file.
        path: PathBuf,
        /// What the new contents follow from.
        source_file: PathBuf,
        /// A file of the other model in that folder.
        owner: PathBuf,
    },
    /// A library of our operators that cannot go along with the model.
    #[error("library {}: {problem}", file.display())]
    Library {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The output's name is not one for a model.
    #[error("output {}: the name of the model to write must end in .onnx", path.display())]
    OutputName {
        /// The path.
        path: PathBuf,
    },
    /// The output's name is no text that a model could name its weight file with.
    #[error("output {}: the name of the model to write must be UTF-8, because the model holds the name of its weights", path.display())]
    OutputUtf8 {
        /// The path.
        path: PathBuf,
    },
    /// The output is a folder.
    #[error("output {}: this is a folder; name the model to write, such as {}", path.display(), path.join("model.onnx").display())]
    OutputFolder {
        /// The path.
        path: PathBuf,
    },
    /// The output is one model where several are written.
    #[error("output {}: both parts are three models; name the folder to write them to", path.display())]
    OutputOfParts {
        /// The path.
        path: PathBuf,
    },
    /// The output would replace a file of the checkpoint.
    #[error("output {}: this is a file of the checkpoint itself, which is never replaced", path.display())]
    OverwritesInput {
        /// The path.
        path: PathBuf,
    },
    /// A weight that the file's element type can't hold.
    #[error("{}: tensor {tensor:?}: element {index} is {value}, beyond the range of {ty}", file.display())]
    Range {
        /// The checkpoint's file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index of the element in row-major order.
        index: usize,
        /// The element.
        value: f32,
        /// The type.
        ty: crate::graph::ElementType,
    },
    /// Weights that do not fit into a model file.
    #[error("{}: the weights have {bytes} bytes, and a model file holds at most {limit}", path.display())]
    Inline {
        /// The model file.
        path: PathBuf,
        /// Bytes of the weights.
        bytes: u64,
        /// What fits.
        limit: u64,
    },
    /// Too little room for the output.
    #[error("{}: too little room on the disk: {needed} bytes are needed, {available} are free", path.display())]
    Room {
        /// The output.
        path: PathBuf,
        /// Bytes that would be written.
        needed: u64,
        /// Bytes that may be written.
        available: u64,
    },
    /// A checkpoint that is no safetensors file cannot be linked.
    #[error("{}: only weights in safetensors files can be used as they are", file.display())]
    LinkFormat {
        /// The checkpoint's file.
        file: PathBuf,
    },
    /// A tensor whose type is not the model's cannot be linked.
    #[error("{}: tensor {tensor:?} is {stored}, and the model is to be {ty}: linked weights are used as they are", file.display())]
    LinkType {
        /// The checkpoint's file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        stored: moh_models::WeightType,
        /// The model's type.
        ty: crate::graph::ElementType,
    },
    /// A hard link that cannot be made.
    #[error("{} cannot become a hard link to {}: {reason}", path.display(), file.display())]
    Link {
        /// The checkpoint's file.
        file: PathBuf,
        /// The link beside the model.
        path: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// A part of a model that has none.
    #[error("the family {family} has no encoder and decoder to choose from")]
    Part {
        /// The family.
        family: String,
    },
    /// What the target of the export cannot run.
    #[error("the target {target} cannot run {what}: {why}")]
    Target {
        /// The target.
        target: crate::Target,
        /// What was asked for.
        what: String,
        /// Why not.
        why: &'static str,
        /// The options that ask for it; `None` where the model itself is what cannot be run.
        options: Option<&'static str>,
    },
    /// A cache in place, written as standard operators.
    #[error("a cache in place is made of operators of ai.moh: it cannot be written as standard operators")]
    PortableCache,
    /// A cache in place for a model that does not know it.
    #[error(
        "--cache in-place: expected a language model of family moh-llama, moh-llm, gqe-llama, switchhead or llama, found {family}"
    )]
    Cache {
        /// The family.
        family: String,
    },
    /// A size of a dimension that the model does not have.
    #[error("this {family} has no dimension {name}; it has {known}")]
    Dimension {
        /// The dimension.
        name: String,
        /// The family.
        family: String,
        /// The dimensions that it has.
        known: String,
    },
    /// Fixed lengths beyond the model's.
    #[error(
        "sequences of {past} cached and {sequence} new tokens: the model's longest have {longest}, its max_position_embeddings"
    )]
    Lengths {
        /// New tokens.
        sequence: usize,
        /// Cached tokens.
        past: usize,
        /// The most tokens that the model was made for.
        longest: u64,
    },
    /// A number of tokens that the model cannot have.
    #[error("a {family} takes {expected} tokens, not {found}: {why}")]
    Tokens {
        /// The family.
        family: String,
        /// A number that it can have.
        expected: usize,
        /// The number asked for.
        found: usize,
        /// What decides the number.
        why: &'static str,
    },
    /// bfloat16 in standard operators, which no CPU runtime multiplies.
    #[error("attention in bf16 needs our kernels, which a model of standard operators does not use")]
    AttentionType,
    /// bfloat16 for a model none of whose attention can be written in it.
    #[error("attention in bf16: expected layers of ai.moh.RoutedAttention, found only those of ai.moh.{found}")]
    AttentionKind {
        /// The operator that the model has.
        found: &'static str,
    },
    /// Operators of ours in a model that is to have standard ones only.
    #[error("{option} writes operators of ai.moh, and a portable model has standard operators only")]
    Portable {
        /// The option that asks for them.
        option: &'static str,
    },
    /// An operator-set or IR version that exported models can't have.
    #[error("{what} {found} is not supported: expected {expected}")]
    Version {
        /// Which of them.
        what: Versioned,
        /// Accepted values.
        expected: String,
        /// The value found.
        found: i64,
    },
    /// Fixed sizes with which a model takes too much memory to be run.
    #[error(
        "verification: with these sizes, inputs, outputs and attention have {numbers} numbers, of which at most {limit} are tried"
    )]
    VerifySize {
        /// Those of the largest call.
        numbers: usize,
        /// As many are tried.
        limit: usize,
    },
    /// The written model could not be run.
    #[error("verification could not run the exported model")]
    VerifyRun(#[from] moh_runtime::Error),
    /// The written model computes something else than our own implementation of the checkpoint, in candle.
    #[error("the exported model disagrees with our own implementation of the checkpoint: {0}")]
    Disagreement(String),
    /// A model file that cannot be compared with a checkpoint.
    #[error("{}: {problem}", file.display())]
    Exported {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file of inputs and outputs that nothing can be compared with.
    #[error("{}: {problem}", file.display())]
    Reference {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The written model computes something else than the user's own code.
    #[error("{0}")]
    Differs(Box<Difference>),
}

/// What has a version in an exported model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Versioned {
    /// ONNX's operators.
    Opset,
    /// ONNX's file format.
    Ir,
}

impl std::fmt::Display for Versioned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Versioned::Opset => "ONNX operator-set version",
            Versioned::Ir => "ONNX IR version",
        })
    }
}

impl Error {
    /// An [`Error::Io`] on `path`.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.into();
        move |reason| Error::Io { path, reason }
    }
}
