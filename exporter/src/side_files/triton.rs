//! config.pbtxt, for NVIDIA's Triton Inference Server with its onnxruntime backend.

use super::facts::{Facts, Kind};
use crate::error::Error;
use crate::graph::{Dim, ElementType, Value};
use std::path::Path;

pub(super) const NAME: &str = "config.pbtxt";

/// Rows that the server puts into one call at most.
const BATCH: usize = 8;

fn data_type(ty: ElementType) -> &'static str {
    match ty {
        ElementType::F32 => "TYPE_FP32",
        ElementType::F16 => "TYPE_FP16",
        ElementType::BF16 => "TYPE_BF16",
        ElementType::I64 => "TYPE_INT64",
        ElementType::U8 | ElementType::U4 => "TYPE_UINT8",
        ElementType::I8 | ElementType::I4 => "TYPE_INT8",
        ElementType::Bool => "TYPE_BOOL",
    }
}

/// An input or output. Batching leaves the batch out of the dimensions; Triton has no tensor without any, so that one of a
/// number a row comes as (batch, 1) and is reshaped.
fn port(value: &Value, batched: bool) -> String {
    let dim = |dim: &Dim| match dim {
        Dim::Fixed(n) => n.to_string(),
        Dim::Named(_) | Dim::Unknown => "-1".to_owned(),
    };
    let dims: Vec<String> = value.dims.iter().skip(usize::from(batched)).map(dim).collect();
    let (dims, reshape) = match dims.is_empty() {
        true => ("1".to_owned(), "\n    reshape { shape: [ ] }"),
        false => (dims.join(", "), ""),
    };
    format!(
        "  {{\n    name: {:?}\n    data_type: {}\n    dims: [ {dims} ]{reshape}\n  }}",
        value.name,
        data_type(value.ty)
    )
}

/// `library` is the path that the server loads our operators from.
pub(super) fn write(facts: &Facts<'_>, library: Option<&str>) -> String {
    // Requests of one shape can share a call: those of a language model differ in length from step to step.
    let graph = facts.graph;
    let batch = |value: &Value| value.dims.first() == Some(&Dim::Named("batch".to_owned()));
    let symbolic = matches!(facts.kind, Kind::Classifier { .. } | Kind::Diffusion) && graph.inputs.iter().all(batch);
    let ports = |values: &[Value]| values.iter().map(|value| port(value, symbolic)).collect::<Vec<_>>().join(",\n");
    let mut text = format!("backend: \"onnxruntime\"\nmax_batch_size: {}\n", if symbolic { BATCH } else { 0 });
    if facts.place.model != "model.onnx" {
        text += &format!("default_model_filename: {:?}\n", facts.place.model);
    }
    text += &format!("input [\n{}\n]\n", ports(&graph.inputs));
    text += &format!("output [\n{}\n]\n", ports(&graph.outputs));
    if symbolic {
        text += "dynamic_batching { }\n";
    }
    if let Some(library) = library {
        text += &format!("model_operations {{ op_library_filename: {library:?} }}\n");
    }
    text
}

/// The path to name in the configuration: absolute as it is given, because it is the server's; else that of the file here.
pub(super) fn library(path: &Path) -> Result<String, Error> {
    let mut absolute = path.to_owned();
    if !path.is_absolute() {
        super::check_library(path)?;
        absolute = path.canonicalize().map_err(Error::io(path))?;
    }
    absolute.into_os_string().into_string().map_err(|path| {
        let problem = "its path must be UTF-8, because config.pbtxt holds it".to_owned();
        Error::Library { file: path.into(), problem }
    })
}
