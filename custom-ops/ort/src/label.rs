//! What the library is, as text in its file, for programs that must not load it to know: `moh-run doctor`.

#[cfg(feature = "cuda")]
macro_rules! cuda {
    () => {
        "cuda"
    };
}
#[cfg(not(feature = "cuda"))]
macro_rules! cuda {
    () => {
        "no cuda"
    };
}

/// Version, commit, and whether CUDA kernels are compiled in. `moh_runtime::operator_library` looks for it.
#[used]
static LABEL: &str =
    concat!("libmoh_ops build: ", env!("CARGO_PKG_VERSION"), ", ", env!("MOH_COMMIT"), ", ", cuda!(), ";");
