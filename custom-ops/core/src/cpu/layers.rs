//! Parts of models that are no operators of ai.moh, for a host whose own are slow.

mod depthwise;

pub use depthwise::Depthwise;

use super::forced;
use super::isa::{Isa, Job, portable::Portable};

/// Runs `job` on the best vectors, or on those that [`super::ISA_VARIABLE`] names; portable ones, if there are none such.
fn vectorize<J: Job>(job: J) -> J::Output {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    let wanted = |isas: &[&str]| forced().is_none_or(|forced| isas.contains(&forced));
    #[cfg(target_arch = "x86_64")]
    {
        use super::isa::{avx2::Avx2, avx512::Avx512};
        if let Some(isa) = Avx512::detect().filter(|_| wanted(&["avx512", "amx", "avx512bf16"])) {
            return isa.vectorize(job);
        }
        if let Some(isa) = Avx2::detect().filter(|_| wanted(&["avx2"])) {
            return isa.vectorize(job);
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(isa) = super::isa::neon::Neon::detect().filter(|_| wanted(&["neon"])) {
        return isa.vectorize(job);
    }
    Portable.vectorize(job)
}
