//! The ai.moh operators for tract.
//!
//! [`register`] teaches a [`tract_onnx::Onnx`] every operator of [`moh_operators::OPERATORS`]; nothing here knows one of them by
//! name. [`optimize`] takes the place of tract's `into_optimized`: other parts of a model then run on our kernels too. The kernels run on the threads of tract's current executor: a plan's own ([`executor`]), or the default one
//! ([`set_threads`]).
//!
//! tract has no bfloat16 and ignores model-local functions, so a model runs on these operators or not at all.

mod constant;
mod convolution;
mod elementwise;
mod facts;
mod host;
mod kernel;
mod linear;
mod op;
mod optimize;
mod parse;
mod softmax;
mod threads;

pub use moh_cpu::{instruction_set, instruction_sets};
pub use optimize::optimize;
pub use threads::{ThreadsError, executor, set_threads};

use moh_operators::OPERATORS;
use tract_onnx::Onnx;

/// Makes `onnx` parse the nodes of every ai.moh operator.
///
/// tract looks operators up without their domain, so a node of the same name from another domain is refused, not misread.
pub fn register(onnx: &mut Onnx) {
    for operator in OPERATORS {
        onnx.op_register.insert(operator.name, parse::parse);
    }
}
