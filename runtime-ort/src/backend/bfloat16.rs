//! Models in bfloat16, which no CPU runtime here computes: one message for all runtimes.

use crate::error::Error;
use std::path::Path;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{GraphProto, type_proto};
use tract_onnx::prelude::Framework;

/// Whether the model in `path` computes in bfloat16.
pub(super) fn computes(path: &Path) -> bool {
    let model = tract_onnx::onnx().proto_model_for_path(path).ok();
    model.and_then(|model| model.graph).is_some_and(|graph| is_in(&graph))
}

/// Whether weights, or an input, are bfloat16: more than a cast of single values.
pub(super) fn is_in(graph: &GraphProto) -> bool {
    let is = |ty: i32| ty == DataType::Bfloat16 as i32;
    let input = |ty: &type_proto::Value| match ty {
        type_proto::Value::TensorType(tensor) => is(tensor.elem_type),
    };
    graph.initializer.iter().any(|tensor| is(tensor.data_type))
        || graph.input.iter().filter_map(|input| input.r#type.as_ref()?.value.as_ref()).any(input)
}

/// What is wrong, and what to do.
pub(super) fn refusal(path: &Path) -> Error {
    let reason = "bfloat16 models do not run on CPUs; export with --dtype f32 or f16";
    Error::Unsupported { path: path.to_owned(), reason: reason.to_owned() }
}
