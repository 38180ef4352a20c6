//! The `ai.moh` operators: one definition of what they are, an f64 reference, and the kernels.
//!
//! This crate knows no runtime. onnxruntime (`moh-ops`) and tract (`moh-tract`) iterate [`schema::OPERATORS`]
//! and run [`cpu::KERNELS`] through a [`Host`]; the exporter writes nodes and function bodies from the same list.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod function;
pub mod host;
pub mod reference;
pub mod schema;
pub mod shape;
pub mod tensor;
pub mod tolerance;

pub use error::Error;
pub use host::{Host, Scratch, Threads};
pub use schema::{Attributes, OPERATORS, Operator};
pub use tensor::{DType, Data, DataMut, Element, Tensor};
