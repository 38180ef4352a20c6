//! Everything that can go wrong between a checkpoint on disk and a model that runs.

mod mismatch;
mod text;
mod torch;

use std::path::PathBuf;

use crate::unused_key::UnusedKey;
use crate::weight_type::WeightType;

pub use mismatch::{Mismatch, Problem};
use text::{adapter, fits, has, keys_with_tensors, listed, named, no_state_dict, quoted};
pub use torch::{ArchiveFault, PickleFault, TensorFault};

/// Result of what this crate does.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of this crate. The text names the file and the tensor or key, what was expected and what was found.
///
/// Causes are part of the text, and not sources too: a chain of errors would say them twice.
/// Names that come out of a file are quoted and escaped: they are not to be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor that cannot be trained.
    #[error("parameter {tensor:?}: expected a variable in F32 on the chosen device, found {found}")]
    Variable {
        /// The tensor.
        tensor: String,
        /// What there is.
        found: String,
    },
    /// A model whose shared heads cannot be searched for.
    #[error("a search for shared heads: {subject}: expected {expected}, found {found}")]
    Sharing {
        /// The family, layer or parameters.
        subject: String,
        /// What a search needs.
        expected: String,
        /// What there is.
        found: String,
    },
    /// The operating system refused.
    #[error("{}: {reason}", file.display())]
    Io {
        /// What was to be read.
        file: PathBuf,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// A file that was written to while it was open.
    #[error("{}: {}", file.display(), text::changed(*expected, *found))]
    Changed {
        /// The file.
        file: PathBuf,
        /// Its length when it was opened.
        expected: u64,
        /// Its length now.
        found: u64,
    },
    /// Neither a file nor a folder where a checkpoint should be.
    #[error("{}: no such file or folder; a checkpoint is {expected}", path.display())]
    NoCheckpoint {
        /// The path.
        path: PathBuf,
        /// What checkpoints are.
        expected: &'static str,
    },
    /// Weights that were trained beside a model's, which are needed too.
    #[error("{}: {}", path.display(), adapter(path, tensor.as_deref()))]
    Adapter {
        /// The file.
        path: PathBuf,
        /// A tensor that shows it; `None` where the file's name does.
        tensor: Option<String>,
    },
    /// A folder, device or socket where a file is needed.
    #[error("{}: not a file", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// A folder without weights.
    #[error("{}: the folder holds no {expected}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// The names looked for.
        expected: String,
    },
    /// A folder with several files of weights, none of them by the usual name.
    #[error("{}: the folder holds {}; give the path of one of them", folder.display(), files.join(", "))]
    SeveralWeights {
        /// The folder.
        folder: PathBuf,
        /// The files' names.
        files: Vec<String>,
    },
    /// A container format that this crate does not read.
    #[error("{}: not a checkpoint by the end of its name; a checkpoint is {expected}", file.display())]
    UnknownFormat {
        /// The file.
        file: PathBuf,
        /// The endings known.
        expected: &'static str,
    },
    /// A file that ends before the header's length does.
    #[error("{}: {found} bytes are too few for a safetensors file, which begins with 8 bytes that say its header's length", file.display())]
    TooShort {
        /// The file.
        file: PathBuf,
        /// Its length.
        found: usize,
    },
    /// A header that does not fit into its file.
    #[error("{}: the header should be {expected} bytes long, but only {found} follow (truncated?)", file.display())]
    HeaderLength {
        /// The file.
        file: PathBuf,
        /// The length that the file says.
        expected: u64,
        /// Bytes after the length.
        found: usize,
    },
    /// JSON text beyond what is reasonable.
    #[error("{}: {found} bytes of JSON, more than the limit of {limit}", file.display())]
    JsonTooLong {
        /// The file.
        file: PathBuf,
        /// Length of the text.
        found: u64,
        /// The longest one that is read.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{}: the {part} is not UTF-8: {reason}", file.display())]
    Utf8 {
        /// The file.
        file: PathBuf,
        /// Which text of the file.
        part: &'static str,
        /// Where.
        reason: std::str::Utf8Error,
    },
    /// Text that is not JSON, or not of the expected form.
    #[error("{}: the {part} cannot be read: {reason}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// Which text of the file.
        part: &'static str,
        /// What and where.
        reason: serde_json::Error,
    },
    /// A file that torch.save did not write, or in a form that is not read.
    #[error("{}: expected a file of torch.save, PyTorch 1.6 or newer; found {found}", file.display())]
    NotTorch {
        /// The file.
        file: PathBuf,
        /// What it is, and what to do.
        found: &'static str,
    },
    /// A zip file that is not what its records say.
    #[error("{}: {fault}", file.display())]
    Archive {
        /// The file.
        file: PathBuf,
        /// What and where.
        fault: ArchiveFault,
    },
    /// A pickle that is not what torch.save or pickle.dump writes.
    #[error("{}: {part}: {fault}", file.display())]
    Pickle {
        /// The file.
        file: PathBuf,
        /// Where in the file the pickle is.
        part: &'static str,
        /// What and where.
        fault: PickleFault,
    },
    /// Elements that are not little-endian.
    #[error("{}: the byte order should be little, but is {found:?}", file.display())]
    ByteOrder {
        /// The file.
        file: PathBuf,
        /// What it says.
        found: String,
    },
    /// A tensor that is not what torch.save writes.
    #[error("{}: tensor {tensor:?}: {fault}", file.display())]
    TorchTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        fault: TensorFault,
    },
    /// A file that holds an object, such as a whole module, in the place of a state dict.
    #[error("{}: an object of {found} where a state dict should be: load it in PyTorch and save its state_dict()", file.display())]
    NotAStateDict {
        /// The file.
        file: PathBuf,
        /// The object's class.
        found: String,
    },
    /// A file without a dictionary of tensors where training code keeps it.
    #[error("{}: {}", file.display(), no_state_dict(keys))]
    NoStateDict {
        /// The file.
        file: PathBuf,
        /// The keys that hold tensors.
        keys: Vec<String>,
    },
    /// A file with several state dicts.
    #[error("{}: {} all hold a state dict, of which one must be chosen", file.display(), keys.join(", "))]
    AmbiguousWeights {
        /// The file.
        file: PathBuf,
        /// The keys.
        keys: Vec<String>,
    },
    /// A key below which there are no tensors.
    #[error("{}: there are no tensors below the key {key:?}; {}", file.display(), keys_with_tensors(keys))]
    WeightsKey {
        /// The file.
        file: PathBuf,
        /// The key that was asked for.
        key: String,
        /// The keys that hold tensors.
        keys: Vec<String>,
    },
    /// A preset that this crate does not have.
    #[error("{found:?} is no preset; there are {known}")]
    UnknownPreset {
        /// The name.
        found: String,
        /// The names there are.
        known: String,
    },
    /// Weights without a configuration whose model is not known.
    #[error("{}: does not exist, and the weights are those of no published model known here; the presets are {known}", config.display())]
    NoConfig {
        /// Where the configuration should be.
        config: PathBuf,
        /// The presets.
        known: String,
    },
    /// Weights without a configuration that fit several models.
    #[error("{}: does not exist, and the weights do not say which model they are; they fit {choices}", config.display())]
    AmbiguousPreset {
        /// Where the configuration should be.
        config: PathBuf,
        /// The presets, and other models, that fit.
        choices: String,
    },
    /// A tensor of a type that this crate does not know.
    #[error("{}: tensor {tensor:?} has type {found:?}, which is not read; convert it to float32 or float16", file.display())]
    TensorType {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// A tensor with more elements than can be counted.
    #[error("{}: tensor {tensor:?} has an impossible shape: {shape:?}", file.display())]
    TensorOverflow {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor that lies outside its file.
    #[error("{}: tensor {tensor:?} lies at bytes {begin} to {end}, but the file has {available} (truncated?)", file.display())]
    TensorOffsets {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its first byte, counted from the end of the header.
        begin: usize,
        /// The byte after its last.
        end: usize,
        /// Bytes after the header.
        available: usize,
    },
    /// A tensor whose place is longer or shorter than its shape and type say.
    #[error("{}: tensor {tensor:?} of type {dtype} and shape {shape:?} needs {expected} bytes, but has {found}", file.display())]
    TensorLength {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: WeightType,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes by shape and type.
        expected: usize,
        /// Bytes by offsets.
        found: usize,
    },
    /// Two tensors on the same bytes.
    #[error("{}: tensors {first:?} and {second:?} overlap", file.display())]
    TensorOverlap {
        /// The file.
        file: PathBuf,
        /// The earlier one.
        first: String,
        /// The later one.
        second: String,
    },
    /// Bytes that belong to no tensor, which the format forbids.
    #[error("{}: bytes {begin} to {end} after the header belong to no tensor", file.display())]
    Gap {
        /// The file.
        file: PathBuf,
        /// First such byte, counted from the end of the header.
        begin: usize,
        /// The byte after the last.
        end: usize,
    },
    /// A file without tensors.
    #[error("{}: no tensors", file.display())]
    NoTensors {
        /// The file.
        file: PathBuf,
    },
    /// A tensor that two files hold.
    #[error("tensor {tensor:?} is in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A shard that an index may not name: only files at or below the index's own folder.
    #[error("{}: the index names {shard:?}; shards must be files below the index's folder", file.display())]
    ShardPath {
        /// The index.
        file: PathBuf,
        /// What it names.
        shard: String,
    },
    /// A shard that does not exist.
    #[error("{}: the index names {}, which does not exist (is the download complete?)", file.display(), shard.display())]
    ShardMissing {
        /// The index.
        file: PathBuf,
        /// The shard.
        shard: PathBuf,
    },
    /// A tensor that is not in the shard where the index says it is.
    #[error("{}: tensor {tensor:?} should be in {}, but that file does not hold it", file.display(), shard.display())]
    NotInShard {
        /// The index.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: PathBuf,
    },
    /// An infinity or NaN among the weights.
    #[error(
        "{}element {index} is {value}; weights must be finite numbers (did training diverge?)",
        named(file, tensor)
    )]
    NotFinite {
        /// The file; empty for a tensor that was computed from others.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Index of the element in row-major order.
        index: usize,
        /// The element.
        value: f64,
    },
    /// The checkpoint does not hold the tensors of its model.
    #[error("{0}")]
    Tensors(Box<Mismatch>),
    /// A key of the configuration that is absent or wrong.
    #[error("{}: {key:?}: expected {expected}, found {found}", file.display())]
    Config {
        /// The configuration file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What it should hold.
        expected: String,
        /// What it holds.
        found: String,
    },
    /// Keys of a configuration that its model does not read, although they seem to say which heads it uses.
    #[error(
        "{}: not read by family {family}: {}; correct or remove what would otherwise be ignored",
        file.display(),
        listed(keys)
    )]
    UnusedKeys {
        /// The configuration file.
        file: PathBuf,
        /// The family.
        family: String,
        /// The keys.
        keys: Vec<UnusedKey>,
    },
    /// A model family that this crate does not know.
    #[error("{}: no model family is called {:?}; there are {known}", file.display(), found)]
    Family {
        /// The configuration file.
        file: PathBuf,
        /// The name.
        found: String,
        /// The names known.
        known: String,
    },
    /// A configuration that does not say which family's it is.
    #[error("{}: the key \"family\" is missing, which says what the model is: one of {known}{}", file.display(), fits(fitting))]
    NoFamily {
        /// The configuration file.
        file: PathBuf,
        /// The names known.
        known: String,
        /// The names that the configuration fits.
        fitting: Vec<String>,
    },
    /// A configuration of another family than the one that it is read as.
    #[error("{}: this configuration belongs to {}{}, not to {reason}", file.display(), fitting.join(" or "), has(keys))]
    WrongFamily {
        /// The configuration file.
        file: PathBuf,
        /// The family that it is read as, and what that does not take.
        reason: String,
        /// The families that it fits.
        fitting: Vec<String>,
        /// Keys that these read, and that family does not.
        keys: Vec<String>,
    },
    /// A configuration of a model that no machine could hold.
    #[error("{}: it describes a model of {parameters} parameters, more than {limit}", file.display())]
    TooLarge {
        /// The configuration file.
        file: PathBuf,
        /// Parameters of the model, or the largest number that can be counted.
        parameters: usize,
        /// The most that are accepted.
        limit: usize,
    },
    /// A checkpoint that holds the model several times.
    #[error("{}: the whole model is there {} times, with the prefixes {}", file.display(), prefixes.len(), quoted(prefixes))]
    AmbiguousPrefix {
        /// The file.
        file: PathBuf,
        /// The prefixes.
        prefixes: Vec<String>,
    },
    /// A model input that was not given.
    #[error("input {0:?} is missing")]
    Input(String),
    /// An operator's validator refused what a model asked of it.
    #[error(transparent)]
    Operator(#[from] moh_operators::Error),
    /// A number that is no row of an embedding, such as a token beyond the vocabulary.
    #[error("tensor {tensor:?}: it has {rows} rows, and no row {index}")]
    Row {
        /// The embedding.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// What was asked for.
        index: i64,
    },
    /// A fault of this crate.
    #[error("internal error: {0}")]
    Internal(&'static str),
    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

#[cfg(test)]
mod tests {
    /// Results are moved often.
    #[test]
    fn errors_are_small() {
        assert!(std::mem::size_of::<super::Error>() < 128);
    }
}
