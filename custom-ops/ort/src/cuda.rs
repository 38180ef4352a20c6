//! Kernels on the CUDA provider: available if the library was built with them, the host is new enough, and the machine
//! has a driver.

#[cfg(feature = "cuda")]
mod kernel;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use crate::api::Api;
use crate::op::CustomOp;
use crate::settings::Settings;
use moh_operators::{DType, Operator};
use ort_sys::OrtApiBase;

/// The first version of the C API with stream-ordered scratch memory for kernels: onnxruntime 1.18.
#[cfg(feature = "cuda")]
const API_VERSION: u32 = 18;

/// The host's API for CUDA kernels, or the reason why there are none.
#[cfg(feature = "cuda")]
pub(crate) fn host(base: &OrtApiBase) -> Result<Api, String> {
    moh_cuda::Driver::get().map_err(|error| error.to_string())?;
    // SAFETY: the base belongs to the host.
    let api = unsafe { Api::new(base, API_VERSION) };
    api.ok_or_else(|| format!("CUDA kernels need onnxruntime 1.{API_VERSION} or newer"))
}

/// Without feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn host(_: &OrtApiBase) -> Result<Api, String> {
    Err("this library was built without CUDA kernels (cargo build --features cuda)".to_owned())
}

/// The operator for the CUDA provider, or the reason why it has no kernel.
#[cfg(feature = "cuda")]
pub(crate) fn custom_op(
    api: Api,
    operator: &'static Operator,
    dtype: DType,
    settings: Settings,
) -> Result<CustomOp, String> {
    match moh_cuda::supports(operator) {
        true => Ok(CustomOp::new::<kernel::CudaKernel>(api, operator, dtype, settings, None)),
        false => Err(format!("{} has no CUDA kernel", operator.name)),
    }
}

/// Without feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn custom_op(_: Api, operator: &'static Operator, _: DType, _: Settings) -> Result<CustomOp, String> {
    Err(format!("{} has no CUDA kernel", operator.name))
}
