//! The provider's device: the emulator in `MOH_CUDA_DRIVER`, whose memory is the host's.

use std::ffi::c_void;
use std::sync::OnceLock;

/// The provider's stream, made at its first use. Like onnxruntime's, it does not wait for the default stream.
pub(super) fn stream() -> *mut c_void {
    static STREAM: OnceLock<usize> = OnceLock::new();
    let create = || {
        const NON_BLOCKING: u32 = 1;
        let mut stream = std::ptr::null_mut();
        let create = function::<unsafe extern "C" fn(*mut *mut c_void, u32) -> i32>(b"cuStreamCreate").unwrap();
        assert_eq!(unsafe { create(&raw mut stream, NON_BLOCKING) }, 0);
        stream.expose_provenance()
    };
    std::ptr::with_exposed_provenance_mut(*STREAM.get_or_init(create))
}

/// Waits for the device, if there is one.
pub(crate) fn synchronize() {
    if let Some(synchronize) = function::<unsafe extern "C" fn() -> i32>(b"cuCtxSynchronize") {
        assert_eq!(unsafe { synchronize() }, 0);
    }
}

/// A function of the driver, if there is one.
fn function<F: Copy>(name: &[u8]) -> Option<F> {
    let path = std::env::var_os("MOH_CUDA_DRIVER")?;
    // Loaded once, and never unloaded.
    let library = std::mem::ManuallyDrop::new(unsafe { libloading::Library::new(path) }.unwrap());
    Some(*unsafe { library.get::<F>(name) }.unwrap())
}
