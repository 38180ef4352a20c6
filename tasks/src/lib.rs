//! What exported MoH and MoA models are for.
//!
//! [`generate::LanguageModel`] continues prompts with a key-value cache; [`translate::TranslationModel`] translates;
//! [`classify::Classifier`] names what is in a picture, [`diffusion::DiffusionModel`] draws one; [`routes`] shows which heads
//! tokens use, [`measure`] where time goes, [`doctor`] whether
//! our kernels work on this machine. All of them take a [`moh_runtime::Model`]. `moh-run` has a command for each.
#![forbid(unsafe_code)]

pub mod classify;
pub mod diffusion;
pub mod doctor;
mod error;
mod files;
pub mod generate;
pub mod image;
pub mod measure;
mod random;
pub mod routes;
mod task;
pub mod text;
pub mod translate;

pub use error::{Error, Result};
pub use files::{read_tensors, write_tensors, write_text};
