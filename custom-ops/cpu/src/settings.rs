//! What the environment says.

use std::sync::OnceLock;

/// Name of the environment variable that chooses the kernels by [`crate::Kernel::isa`] instead of the best ones.
pub const ISA_VARIABLE: &str = "MOH_CPU_ISA";

/// The instruction set that the environment names. It is read once: its accessors take a lock, and changing it while kernels run
/// would mean nothing.
pub(crate) fn forced_isa() -> Option<&'static str> {
    static FORCED: OnceLock<Option<String>> = OnceLock::new();
    let read = || std::env::var(ISA_VARIABLE).ok().filter(|isa| !isa.is_empty());
    FORCED.get_or_init(read).as_deref()
}
