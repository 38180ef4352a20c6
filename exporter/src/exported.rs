//! An exported model as it lies in its file, without its weights.

use crate::error::Error;
use crate::proto::ModelProto;
use prost::Message;
use std::path::Path;

/// Reads the model in `file`.
///
/// # Errors
/// [`Error::Exported`] for a file that is no ONNX model.
pub(crate) fn read(file: &Path) -> Result<ModelProto, Error> {
    let bytes = std::fs::read(file).map_err(Error::io(file))?;
    let bad = |e| Error::Exported { file: file.to_owned(), problem: format!("not an ONNX model: {e}") };
    ModelProto::decode(bytes.as_slice()).map_err(bad)
}
