//! The ai.moh operators for tract.
//!
//! [`register`] teaches a [`tract_onnx::Onnx`] every operator of [`moh_operators::OPERATORS`]; nothing here knows one of them by
//! name. [`prepare()`] goes before parsing: quantised models need it, and weights are then mapped where tract would copy them. [`optimize`]
//! takes the place of tract's `into_optimized`: other parts of a model then run on our kernels too.
//!
//! The kernels run on the threads of a [`Pool`] within [`Pool::run`], and else on those of tract's current executor: a plan's own
//! ([`executor`]), or the default one ([`set_threads`]).
//!
//! tract has no bfloat16 and ignores model-local functions, so a model runs on these operators or not at all.

mod bytes;
mod constant;
mod convolution;
mod elementwise;
mod facts;
mod host;
mod kernel;
mod linear;
mod nbits;
mod op;
mod optimize;
mod parse;
mod pool;
mod prepare;
mod softmax;
mod threads;
mod widen;

pub use moh_cpu::{checked_precision, instruction_set, instruction_sets};
pub use optimize::optimize;
pub use pool::Pool;
pub use prepare::prepare;
pub use threads::{ThreadsError, executor, set_threads};

use moh_operators::OPERATORS;
use tract_onnx::Onnx;

/// Makes `onnx` parse the nodes of every ai.moh operator, and, in place of tract's own, those that read matrices in blocks of 4 or
/// 8 bits: MatMulNBits and GatherBlockQuantized of com.microsoft, and what [`prepare()`] makes of DequantizeLinear.
///
/// tract looks operators up without their domain, so a node of the same name from another domain is refused, not misread.
pub fn register(onnx: &mut Onnx) {
    for operator in OPERATORS {
        onnx.op_register.insert(operator.name, parse::parse);
    }
    nbits::register(onnx);
    onnx.op_register.insert(prepare::hold::CONSTANT_PRODUCT, linear::parse);
}
