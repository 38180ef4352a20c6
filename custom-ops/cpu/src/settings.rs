//! Settings from environment variables.

use std::sync::OnceLock;

/// Environment variable that selects kernels by [`crate::Kernel::isa`] instead of automatically.
pub const ISA_VARIABLE: &str = "MOH_CPU_ISA";

/// The instruction set selected by the environment. Read once: reading an environment variable takes a lock, and a
/// change while kernels run is not supported.
pub(crate) fn forced_isa() -> Option<&'static str> {
    static FORCED: OnceLock<Option<String>> = OnceLock::new();
    let read = || std::env::var(ISA_VARIABLE).ok().filter(|isa| !isa.is_empty());
    FORCED.get_or_init(read).as_deref()
}
