//! One word to who expects CUDA kernels where there are none.

use crate::context::KernelInfo;
use std::sync::atomic::{AtomicBool, Ordering};

/// Warns, once a process, that operators run on the CPU although onnxruntime's CUDA provider is loaded.
///
/// The API does not tell a library which providers a session has; that the provider's library is there is the sign for it.
pub(crate) fn runs_on_cpu(node: &KernelInfo<'_>, reason: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if cuda_provider_loaded() && !SAID.swap(true, Ordering::Relaxed) {
        let message = format!("operators of ai.moh run on the CPU in a process with the CUDA provider: {reason}");
        if !node.warn(&message) {
            eprintln!("libmoh_ops: {message}");
        }
    }
}

/// Whether the process has loaded onnxruntime's CUDA provider.
fn cuda_provider_loaded() -> bool {
    const PROVIDER: &str = "libonnxruntime_providers_cuda.so";
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(PROVIDER))
}
