//! Loaded models, and tensors on their way in and out.

use crate::error::Error;
use candle_core::Tensor;
use moh_runtime::{Model, Notice, Options, Tensor as Host};
use std::collections::BTreeMap;
use std::path::Path;

/// A loaded model that takes and gives tensors by name.
pub(super) struct Runner {
    model: Model,
}

impl Runner {
    pub(super) fn load(path: &Path) -> Result<Runner, Error> {
        Ok(Runner { model: Model::load(path, &Options::default())? })
    }

    /// The runtime, and whether our kernels are in it.
    pub(super) fn describe(&self) -> String {
        let bodies = self.model.notices().iter().any(|notice| matches!(notice, Notice::NoCustomOps { .. }));
        match (self.model.runtime_name(), bodies) {
            ("onnxruntime", true) => "onnxruntime without libmoh_ops".to_owned(),
            ("onnxruntime", false) => "onnxruntime and libmoh_ops".to_owned(),
            (other, _) => other.to_owned(),
        }
    }

    pub(super) fn run(&mut self, inputs: Vec<(String, Host)>) -> Result<BTreeMap<String, Host>, Error> {
        let inputs = inputs.into_iter().map(|(name, tensor)| (name, tensor.into()));
        let outputs = self.model.run(inputs)?;
        let names = self.model.outputs().iter().map(|port| port.name.clone());
        names.zip(outputs).map(|(name, value)| Ok((name, value.to_tensor()?))).collect()
    }
}

pub(super) fn host(tensor: &Tensor) -> Result<Host, Error> {
    Ok(Host::new(tensor.dims().to_vec(), values(tensor)?)?)
}

pub(super) fn values(tensor: &Tensor) -> Result<Vec<f32>, Error> {
    let flat = tensor.to_dtype(candle_core::DType::F32).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1());
    Ok(flat.map_err(moh_models::Error::from)?)
}

pub(super) fn numbers(outputs: &BTreeMap<String, Host>, name: &str) -> Result<Vec<f32>, Error> {
    let tensor = outputs.get(name).ok_or_else(|| Error::Disagreement(format!("there is no output {name}")))?;
    tensor.data().to_f32().ok_or_else(|| Error::Disagreement(format!("output {name} holds no floating-point numbers")))
}
