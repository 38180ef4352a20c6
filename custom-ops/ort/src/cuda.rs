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
#[cfg(feature = "cuda")]
use {
    crate::context::{KernelContext, KernelInfo},
    crate::failure::Failure,
    crate::op::NodeKernel,
    std::ffi::CStr,
};

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

/// A node's kernel, which is made only where the session's GPU can run it: otherwise no session is made, rather than one whose runs fail.
#[cfg(feature = "cuda")]
struct OnThisGpu(kernel::CudaKernel);

#[cfg(feature = "cuda")]
impl NodeKernel for OnThisGpu {
    const PROVIDER: Option<&'static CStr> = kernel::CudaKernel::PROVIDER;

    fn new(
        api: Api,
        operator: &'static Operator,
        dtype: DType,
        settings: Settings,
        info: &KernelInfo<'_>,
    ) -> Result<OnThisGpu, Failure> {
        moh_cuda::Driver::get()?.check_gpu()?;
        kernel::CudaKernel::new(api, operator, dtype, settings, info).map(OnThisGpu)
    }

    fn api(&self) -> Api {
        self.0.api()
    }

    fn compute(&self, context: &KernelContext<'_>) -> Result<(), Failure> {
        self.0.compute(context)
    }
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
        true => Ok(CustomOp::new::<OnThisGpu>(api, operator, dtype, settings, None)),
        false => Err(format!("{} has no CUDA kernel", operator.name)),
    }
}

/// Without feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn custom_op(_: Api, operator: &'static Operator, _: DType, _: Settings) -> Result<CustomOp, String> {
    Err(format!("{} has no CUDA kernel", operator.name))
}
