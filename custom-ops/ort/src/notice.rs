//! A warning for sessions that run on the CPU although the CUDA provider is loaded.

use crate::context::KernelInfo;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// Warns, once per process, that operators run on the CPU although onnxruntime's CUDA provider is loaded.
///
/// The API does not tell which providers a session uses, so this checks whether the provider's library is loaded.
pub(crate) fn runs_on_cpu(node: &KernelInfo<'_>, reason: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if cuda_provider_loaded() && !SAID.swap(true, Ordering::Relaxed) {
        let message = format!("the operators of ai.moh run on the CPU although the CUDA provider is loaded: {reason}");
        if !node.warn(&message) {
            // Standard error may be closed, which a host is not to suffer from.
            let _ = writeln!(std::io::stderr(), "libmoh_ops: {message}");
        }
    }
}

/// Whether the process has loaded onnxruntime's CUDA provider.
fn cuda_provider_loaded() -> bool {
    const PROVIDER: &str = "libonnxruntime_providers_cuda.so";
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(PROVIDER))
}
