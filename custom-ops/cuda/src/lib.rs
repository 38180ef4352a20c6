//! CUDA kernels of the `ai.moh` operators. Empty without feature `kernels`. No CUDA library is needed to link or load
//! it.
//!
//! Each file `kernels/*.cu` becomes a `modules::Module`, which is loaded at its first use in a context. Everything is
//! asynchronous: `run` launches kernels on the host's `Stream` and returns.

#![cfg(feature = "kernels")]

mod call;
pub mod cublaslt;
pub mod driver;
pub mod kernel;
pub mod modules;
mod nbits;
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

/// Declares the operators with CUDA kernels: a module and an operator each.
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
    routed_projection_nbits::RoutedProjectionNBits,
    routed_combine_nbits::RoutedCombineNBits,
    routed_mlp_nbits::RoutedMlpNBits,
    linear::Linear,
    linear_activation::LinearActivation,
    linear_activation_nbits::LinearActivationNBits,
    layer_norm::LayerNorm,
    depthwise_conv::DepthwiseConv,
    linear_nbits::LinearNBits,
    cache_update::CacheUpdate,
    routed_cached_attention::RoutedCachedAttention,
}

/// The operators that have CUDA kernels.
pub fn operators() -> impl Iterator<Item = &'static Operator> {
    LAUNCHERS.iter().map(|launcher| launcher.operator)
}

/// Whether an operator has CUDA kernels.
pub fn supports(operator: &Operator) -> bool {
    operators().any(|supported| supported == operator)
}

/// Validates a call, requests memory for its output from `make`, with the output's type and shape, and launches its
/// kernels on the stream.
///
/// Kernels write every element of the output; it may be uninitialised.
///
/// # Safety
/// The tensors are device memory of the stream's context with as many elements as their shapes. The output does not
/// overlap an input; it may be the memory of the operator's [`Operator::in_place`]. Until the stream has finished the
/// call, nothing writes to the inputs or uses the output.
///
/// # Errors
/// [`Error`] naming the input, the expected and the found value; out of workspace memory; an error of the driver or of
/// `make`.
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
    // SAFETY: the caller's contract.
    unsafe { launcher.run_into(attributes, inputs, stream, workspace, make) }
}

/// As [`run_into`], into an existing output.
///
/// # Safety
/// As [`run_into`].
///
/// # Errors
/// As [`run_into`]; also if the output has another type or shape.
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
    // SAFETY: the caller's contract.
    unsafe { run_into(attributes, inputs, stream, workspace, make) }
}
