//! Runs exported MoH and MoA models: in onnxruntime where its library is installed, else in tract, which is built in.
//!
//! [`Model`] loads an exported model and runs it on named [`Value`]s. The crate `moh-tasks` builds on it: texts, translations,
//! images, and the program `moh-run`.
//!
//! ```no_run
//! use moh_runtime::{Model, Options, Tensor};
//!
//! # fn main() -> moh_runtime::Result<()> {
//! let mut model = Model::load("vit/model.onnx", &Options::default())?;
//! let image = Tensor::new([1, 3, 224, 224], vec![0f32; 3 * 224 * 224])?;
//! let outputs = model.run([("pixel_values", image.into())])?;
//! println!("{:?}", outputs[0].as_slice::<f32>()?);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod backend;
mod bytes;
mod convert;
mod element;
mod error;
mod guard;
mod header;
mod info;
mod installation;
mod interrupt;
mod links;
mod locate;
mod model;
pub mod names;
mod options;
#[cfg(unix)]
mod signals;
mod tensor;
mod value;

pub use element::{Data, Element, ElementType, TensorData};
pub use error::{Error, Result};
pub use guard::guard;
pub use header::links;
pub use info::{Dim, TensorInfo};
pub use installation::{
    COMMIT, LibraryBuild, OnnxRuntime, OperatorLibrary, TRACT_VERSION, long_version, onnxruntime, operator_library,
    short_version,
};
pub use interrupt::Interrupt;
pub use links::{Digest, Link};
pub use locate::Found;
pub use model::{MODEL_FILE, Model, OnNode, find_model};
pub use moh_tract::{instruction_set, instruction_sets};
pub use options::{DeviceChoice, Notice, Options, RuntimeChoice};
#[cfg(unix)]
pub use signals::before_signals_end;
pub use tensor::Tensor;
pub use value::Value;
