//! CUDA kernels of the `ai.moh` operators. Empty without feature `kernels`; needs no CUDA library to link or load.
//!
//! Kernels are in `kernels/*.cu`; each file becomes a `modules::Module`, loaded at its first use in a context. Everything
//! here is asynchronous: `run` puts its launches on the host's `Stream` and returns.

#![cfg(feature = "kernels")]

mod call;
pub mod driver;
pub mod kernel;
pub mod modules;
pub mod params;
pub mod plan;
mod product;
pub mod stream;
mod tensor_map;
pub mod workspace;

pub use call::{Call, CudaOperator, DeviceTensor};
pub use driver::{Driver, RawPtr, RawStream};
pub use stream::Stream;
pub use workspace::{Arena, Workspace};

use call::{Launcher, check_output, launcher};
use moh_operators::{Attributes, DType, Error, Operator};

/// Declares the operators that have CUDA kernels, for every element type: a module and an operator each.
macro_rules! operators {
    ($($module:ident::$operator:ident),+ $(,)?) => {
        $(mod $module;)+

        static LAUNCHERS: &[Launcher] = &[$(launcher::<moh_operators::$operator>()),+];
    };
}

operators! {
    routed_attention::RoutedAttention,
    routed_projection::RoutedProjection,
    routed_combine::RoutedCombine,
    routed_mlp::RoutedMlp,
    aggregated_attention::RoutedAggregatedAttention,
    top_k_router::TopKRouter,
}

/// The operators that have CUDA kernels.
pub fn operators() -> impl Iterator<Item = &'static Operator> {
    LAUNCHERS.iter().map(|launcher| launcher.operator)
}

/// Whether an operator has CUDA kernels.
pub fn supports(operator: &Operator) -> bool {
    operators().any(|supported| supported == operator)
}

/// Validates a call, asks `make` for memory for its output, of this type and shape, and puts its kernels on the stream.
///
/// Kernels write every element of the output, which starts out undefined.
///
/// # Safety
/// The tensors are device memory of the stream's context with as many elements as their shapes say; the output shares no
/// memory with an input; nothing writes to the inputs or uses the output until the stream has come past the call.
///
/// # Errors
/// [`Error`] naming the input, what was expected and what was found; no workspace; what the driver refuses; what `make` fails with.
pub unsafe fn run_into<E: From<Error>>(
    attributes: &Attributes,
    inputs: &[Option<DeviceTensor<'_>>],
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
    make: impl FnOnce(DType, &[usize]) -> Result<RawPtr, E>,
) -> Result<(), E> {
    let operator = attributes.operator();
    let launcher = LAUNCHERS.iter().find(|launcher| launcher.operator == operator).ok_or_else(|| Error::Kernel {
        operator: operator.name,
        expected: operators().map(|operator| operator.name).collect(),
        found: "no CUDA kernel".to_owned(),
    })?;
    // SAFETY: as the caller promises.
    unsafe { launcher.run_into(attributes, inputs, stream, workspace, make) }
}

/// As [`run_into`], into an output that is there.
///
/// # Safety
/// As [`run_into`].
///
/// # Errors
/// As [`run_into`]; an output of another type or shape.
pub unsafe fn run(
    attributes: &Attributes,
    inputs: &[Option<DeviceTensor<'_>>],
    output: DeviceTensor<'_>,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<(), Error> {
    let make = |dtype, shape: &[usize]| {
        check_output(attributes.operator(), &output, dtype, shape)?;
        Ok(output.ptr)
    };
    // SAFETY: as the caller promises.
    unsafe { run_into(attributes, inputs, stream, workspace, make) }
}
