//! The host's view of a node: when its kernel is created, when it runs, and during shape inference.

mod attribute;
mod creation;
mod inference;
mod run;
mod tensor;

pub(crate) use creation::KernelInfo;
pub(crate) use inference::{Dimension, InferredInput, ShapeContext};
pub(crate) use run::KernelContext;
pub(crate) use tensor::{MAX_RANK, TensorPtr};
