//! Runs exported MoH and MoA models: in onnxruntime where its library is installed, else in tract, which is built in.
//!
//! [`Model`] loads an exported model and runs it on named [`Value`]s; [`generate::LanguageModel`] continues prompts with a
//! key-value cache; [`translate::TranslationModel`] translates; [`classify::Classifier`] names what is in a picture,
//! [`diffusion::DiffusionModel`] draws one. The command line program is `moh-run`.
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
pub mod classify;
mod convert;
pub mod diffusion;
mod error;
mod files;
pub mod generate;
mod header;
pub mod image;
mod info;
mod locate;
pub mod measure;
mod model;
mod options;
mod random;
pub mod routes;
mod task;
mod tensor;
pub mod translate;
mod value;

pub use error::{Error, Result};
pub use files::{read_tensors, write_tensors, write_text};
pub use info::{Dim, TensorInfo};
pub use model::{MODEL_FILE, Model};
pub use options::{DeviceChoice, Notice, Options, RuntimeChoice};
pub use tensor::{Data, Element, ElementType, Tensor, TensorData};
pub use value::Value;
