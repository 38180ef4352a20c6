//! The allocators of session and device.

use super::*;

pub(super) unsafe extern "system" fn create_memory_info(
    _: OrtAllocatorType,
    _: OrtMemType,
    out: *mut *mut OrtMemoryInfo,
) -> OrtStatusPtr {
    // Not zero-sized, so that a double release is detected.
    unsafe { out.write(give(0u64)) };
    ok()
}

thread_local! {
    static REQUESTS: Cell<Requests> = const { Cell::new(Requests { probes: 0, scratch: 0 }) };
    static DEVICE_BYTES: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Numbers of calls for device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Requests {
    /// Without a stream.
    pub(crate) probes: usize,
    /// For the node's stream.
    pub(crate) scratch: usize,
}

/// This thread's calls for device memory while `run` ran, on a device with room for blocks of up to `bytes` bytes.
#[cfg(feature = "cuda")]
pub(crate) fn requests_of(bytes: usize, run: impl FnOnce()) -> Requests {
    DEVICE_BYTES.set(bytes);
    REQUESTS.set(Requests { probes: 0, scratch: 0 });
    run();
    DEVICE_BYTES.set(usize::MAX);
    REQUESTS.get()
}

/// The provider's memory info, identified by its address.
pub(super) static DEVICE_MEMORY: u64 = 0;

pub(super) unsafe extern "system" fn get_device_allocator(
    _: *const OrtKernelInfo,
    _: OrtMemType,
    out: *mut *mut OrtAllocator,
) -> OrtStatusPtr {
    unsafe { out.write(give(Lender(None))) };
    ok()
}

pub(super) unsafe extern "system" fn allocator_memory(
    _: *const OrtAllocator,
    out: *mut *const OrtMemoryInfo,
) -> OrtStatusPtr {
    unsafe { out.write((&raw const DEVICE_MEMORY).cast()) };
    ok()
}

pub(super) unsafe extern "system" fn get_stream(
    context: *const OrtKernelContext,
    out: *mut *mut c_void,
) -> OrtStatusPtr {
    let stream = if unsafe { call(context) }.default_stream { std::ptr::null_mut() } else { device::stream() };
    unsafe { out.write(stream) };
    ok()
}

pub(super) unsafe extern "system" fn scratch(
    context: *const OrtKernelContext,
    memory: *const OrtMemoryInfo,
    bytes: usize,
    out: *mut *mut c_void,
) -> OrtStatusPtr {
    assert!(memory == (&raw const DEVICE_MEMORY).cast() && bytes > 0);
    assert!(!unsafe { call(context) }.default_stream, "onnxruntime crashes without a stream");
    assert!(bytes <= DEVICE_BYTES.get(), "onnxruntime ends the process without memory");
    REQUESTS.set(Requests { scratch: REQUESTS.get().scratch + 1, ..REQUESTS.get() });
    let mut lender = Lender(None);
    unsafe { lend((&raw mut lender).cast(), bytes, out) }
}

/// An allocator that counts blocks in the given counter, or (on the device) as objects.
pub(super) struct Lender(Option<*const AtomicIsize>);

pub(super) unsafe fn count_block(of: *mut OrtAllocator, change: isize) {
    match unsafe { &*of.cast::<Lender>() }.0 {
        Some(blocks) => _ = unsafe { &*blocks }.fetch_add(change, Ordering::Relaxed),
        None => LIVE.set(LIVE.get() + change),
    }
}

pub(super) unsafe extern "system" fn get_allocator(
    context: *const OrtKernelContext,
    _: *const OrtMemoryInfo,
    out: *mut *mut OrtAllocator,
) -> OrtStatusPtr {
    unsafe { out.write(give(Lender(Some(&raw const call(context).blocks)))) };
    ok()
}

pub(super) unsafe extern "system" fn allocate(
    of: *mut OrtAllocator,
    size: usize,
    out: *mut *mut c_void,
) -> OrtStatusPtr {
    if unsafe { &*of.cast::<Lender>() }.0.is_none() {
        REQUESTS.set(Requests { probes: REQUESTS.get().probes + 1, ..REQUESTS.get() });
        if size > DEVICE_BYTES.get() {
            return fail("out of device memory");
        }
    }
    unsafe { lend(of, size, out) }
}

unsafe fn lend(of: *mut OrtAllocator, size: usize, out: *mut *mut c_void) -> OrtStatusPtr {
    if size > isize::MAX as usize / 2 {
        return fail("out of memory");
    }
    let mut block = vec![Line([0xFF; 256]); size.div_ceil(256)];
    unsafe {
        count_block(of, 1);
        out.write(block.as_mut_ptr().cast());
    }
    BLOCKS.lock().unwrap().push(block);
    ok()
}

pub(super) unsafe extern "system" fn free(of: *mut OrtAllocator, memory: *mut c_void) -> OrtStatusPtr {
    // A provider's memory stays allocated until its stream has passed the last use.
    device::synchronize();
    let mut blocks = BLOCKS.lock().unwrap();
    let index = blocks.iter().position(|block| block.as_ptr().cast() == memory.cast_const()).unwrap();
    blocks.swap_remove(index);
    unsafe { count_block(of, -1) };
    ok()
}

/// A unit of memory with the alignment of providers.
#[derive(Clone, Copy)]
#[repr(align(256))]
#[allow(dead_code)]
pub(super) struct Line([u8; 256]);

/// The allocated blocks; releasing anything else panics.
pub(super) static BLOCKS: Mutex<Vec<Vec<Line>>> = Mutex::new(Vec::new());
