//! The runtimes, each behind the same few functions.

mod bfloat16;
pub(crate) mod environment;
mod external;
mod onnxruntime;
mod tract;

use crate::element::ElementType;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::info::TensorInfo;
use crate::interrupt::Interrupt;
use crate::options::{DeviceChoice, Notice, Options, RuntimeChoice};
use crate::value::Value;
use onnxruntime::OrtModel;
pub(crate) use onnxruntime::cuda_provider;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tract::TractModel;

/// A model and what is known of it.
pub(crate) struct Loaded<M> {
    pub(crate) model: M,
    pub(crate) inputs: Vec<TensorInfo>,
    pub(crate) outputs: Vec<TensorInfo>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) notices: Vec<Notice>,
}

impl<M> Loaded<M> {
    fn map<N>(self, f: impl FnOnce(M) -> N) -> Loaded<N> {
        let Loaded { model, inputs, outputs, metadata, notices } = self;
        Loaded { model: f(model), inputs, outputs, metadata, notices }
    }
}

/// A model in one of the runtimes.
pub(crate) enum Backend {
    Ort(OrtModel),
    Tract(TractModel),
}

impl Backend {
    /// Loads the model in the runtime that the options choose.
    pub(crate) fn load(path: &Path, header: &Header, options: &Options) -> Result<Loaded<Backend>> {
        let tract = || TractModel::load(path, header, options).map(|loaded| loaded.map(Backend::Tract));
        let ort = || OrtModel::load(path, header, options).map(|loaded| loaded.map(Backend::Ort));
        match options.runtime {
            RuntimeChoice::Ort => ort(),
            RuntimeChoice::Tract if options.device == DeviceChoice::Cuda => Err(Error::Unsupported {
                path: path.to_owned(),
                reason: "tract runs models on the CPU only".to_owned(),
            }),
            RuntimeChoice::Tract => tract(),
            RuntimeChoice::Auto => match ort() {
                Err(Error::OrtMissing { reason }) if options.device != DeviceChoice::Cuda => {
                    let mut loaded = tract()?;
                    loaded.notices.push(Notice::TractFallback { reason });
                    Ok(loaded)
                }
                result => result,
            },
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Backend::Ort(_) => onnxruntime::NAME,
            Backend::Tract(_) => tract::NAME,
        }
    }

    /// Runs the model on values in the order of its inputs; gives its outputs in their order. Of `shared`, (input, output), each
    /// output may take its input's memory.
    pub(crate) fn run(&mut self, inputs: Vec<Value>, shared: &[(usize, usize)]) -> Result<Vec<Value>> {
        match self {
            Backend::Ort(model) if shared.is_empty() => model.run(&inputs, None),
            Backend::Ort(model) => model.run_in_place(inputs, shared),
            // Its operators see for themselves that nobody else holds a value.
            Backend::Tract(model) => model.run(inputs),
        }
    }

    /// Zeros in the memory of the runtime, as far as there is such memory beside a GPU's.
    pub(crate) fn zeros(&self, ty: ElementType, shape: Vec<usize>) -> Result<Value> {
        match self {
            Backend::Ort(model) => model.zeros(ty, shape),
            Backend::Tract(_) => tract::zeros(ty, shape),
        }
    }

    /// Runs the model until it is broken off: an error then.
    pub(crate) fn run_until(&mut self, inputs: Vec<Value>, interrupt: &Interrupt) -> Result<Vec<Value>> {
        match self {
            Backend::Ort(model) => model.run(&inputs, Some(interrupt)),
            Backend::Tract(model) => model.run_until(inputs, interrupt),
        }
    }

    /// The profile's path; `None` in a runtime that writes none.
    pub(crate) fn end_profiling(&mut self) -> Option<Result<PathBuf>> {
        match self {
            Backend::Ort(model) => Some(model.end_profiling()),
            Backend::Tract(_) => None,
        }
    }
}
