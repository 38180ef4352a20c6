//! Products with weights in blocks of 4 or 8 bits, read where they lie, in the layout of `com.microsoft.MatMulNBits`.
//!
//! [`linear`] computes a dense layer. Inside the crate a product takes three steps:
//!
//! 1. [`NBits`] is a view of the weight. Nothing is copied. `NBits::narrowed` sees whether it has 7 bits only, where that saves instructions.
//! 2. `Activations` are the left matrix's rows, converted once per call and shared by all columns and workers: for
//!    [`Level::Int8`] quantised to 8 bits with one scale a row and block, for [`Level::Float`] as f32. The rows come from
//!    pointers, so they may be gathered, and `Parts` names the parts of a row that count as 0 and are never read.
//! 3. `Worker::multiply` adds the products of some rows with some columns to rows of f32 sums. Work items of different
//!    workers are different columns or different rows.
//!
//! Up to `FEW` rows are multiplied with the weight as it is read (`stream`); more, with panels of columns that are
//! unpacked into working memory (`panel`). Which of the two depends on the number of rows of the activations, so that a
//! result depends neither on the number of threads nor on the partition into work items.

mod activations;
mod isa;
mod linear;
mod panel;
mod row;
mod stream;
#[cfg(test)]
mod tests;
mod weight;
mod worker;

pub(crate) use crate::gemm::Start;
pub(crate) use activations::{Activations, Parts};
pub(crate) use isa::Engine;
pub(crate) use linear::layer;
pub use linear::{Linear, linear};
pub(crate) use row::Row;
pub use weight::{Level, NBits};
pub(crate) use worker::{Worker, floats};

/// Maximum rows of activations that are multiplied with the weight as it is read.
pub(crate) const FEW: usize = 8;
