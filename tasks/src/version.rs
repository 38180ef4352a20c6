//! What `--version` says.

use std::sync::OnceLock;

/// For `-V`.
pub(crate) fn short() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| moh_runtime::short_version(env!("CARGO_PKG_VERSION")))
}

/// For `--version`.
pub(crate) fn long() -> &'static str {
    static TEXT: OnceLock<String> = OnceLock::new();
    TEXT.get_or_init(|| moh_runtime::long_version(env!("CARGO_PKG_VERSION")))
}
