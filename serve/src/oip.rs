//! The Open Inference Protocol, version 2: every model, on tensors.

mod datatype;
mod grpc;
mod infer;
mod json;
pub mod proto;
mod rest;

pub(crate) use grpc::service;
pub(crate) use rest::{pages, routes};

use crate::model::Served;
use crate::problem::{Kind, Problem};
use crate::server::App;
use datatype::name;
use moh_runtime::{Dim, TensorInfo};

/// The only version of a model that there is.
const VERSION: &str = "1";
/// What the server is called.
const SERVER: &str = "moh-run";
/// What it has besides the protocol's required parts.
const EXTENSIONS: [&str; 1] = ["binary_tensor_data"];

/// The model of a request; `version`: empty for any.
fn model<'a>(app: &'a App, name: &str, version: &str) -> Result<&'a Served, Problem> {
    let served = app.model(name)?;
    match version {
        "" | VERSION => Ok(served),
        _ => Err(Problem::new(Kind::NotFound, format!("model {name} has version {VERSION} only, not {version:?}"))),
    }
}

/// A tensor's shape, -1 where it varies.
fn shape(info: &TensorInfo) -> Vec<i64> {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
        Dim::Symbol(_) => -1,
    };
    info.dims.iter().map(size).collect()
}
