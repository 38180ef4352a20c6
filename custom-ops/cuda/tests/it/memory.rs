//! Memory of the test device, between guard bytes.

use cudarc::driver::result;
use cudarc::driver::sys;
use moh_cuda::driver::Checked;
use moh_cuda::{RawPtr, RawStream};
use moh_operators::{Data, DataMut};

/// Guard bytes before and after every tensor, NaN in every type: reading them makes results NaN, and writes are
/// detected. The emulator has inaccessible pages there.
const FRAME: usize = 1 << 10;
const POISON: u8 = 0xFF;
/// Device memory, accessed on one stream, freed on drop.
pub(crate) struct Memory {
    base: RawPtr,
    bytes: usize,
    frame: usize,
    stream: RawStream,
}

impl Memory {
    /// `bytes` bytes of the current context's memory, all poisoned; `framed` puts guard bytes around them.
    pub(crate) fn new(bytes: usize, framed: bool, stream: RawStream) -> Memory {
        let frame = if framed { FRAME } else { 0 };
        // SAFETY: a context is current.
        let base = unsafe { result::malloc_sync((bytes + 2 * frame).max(1)) };
        let memory = Memory { base: base.unwrap_or_else(|error| panic!("{error}")), bytes, frame, stream };
        // The emulator, without frames, poisons what it allocates.
        if framed {
            memory.poison_at(memory.base, bytes + 2 * frame);
        }
        memory
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Poisons all of it.
    pub(crate) fn poison(&self) {
        self.poison_at(self.ptr(), self.bytes);
    }

    pub(crate) fn ptr(&self) -> RawPtr {
        self.base + self.frame as u64
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        // SAFETY: the memory has room for the bytes, which are borrowed until the copy is done.
        let copied = unsafe {
            let copied = result::memcpy_htod_async(self.ptr(), bytes, self.stream);
            copied.and_then(|()| result::stream::synchronize(self.stream))
        };
        copied.about("cuMemcpyHtoDAsync").unwrap_or_else(|error| panic!("{error}"));
    }

    pub(crate) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.bytes);
        self.read_at(self.ptr(), bytes);
    }

    /// Poisons a part of the memory.
    fn poison_at(&self, from: RawPtr, bytes: usize) {
        // SAFETY: callers stay within the memory and its guard bytes.
        let set = unsafe { sys::cuMemsetD8Async(from, POISON, bytes, self.stream) };
        set.about("cuMemsetD8Async").unwrap_or_else(|error| panic!("{error}"));
    }

    fn read_at(&self, from: RawPtr, bytes: &mut [u8]) {
        // SAFETY: callers stay within the memory and its guard bytes; `bytes` is borrowed until the copy is done.
        let copied = unsafe {
            let copied = result::memcpy_dtoh_async(bytes, from, self.stream);
            copied.and_then(|()| result::stream::synchronize(self.stream))
        };
        copied.about("cuMemcpyDtoHAsync").unwrap_or_else(|error| panic!("{error}"));
    }

    pub(crate) fn check_frame(&self) {
        for (side, at) in [("before", self.base), ("behind", self.ptr() + self.bytes as u64)] {
            let mut frame = vec![0; self.frame];
            self.read_at(at, &mut frame);
            assert!(frame.iter().all(|&byte| byte == POISON), "a kernel wrote {side} its memory");
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::memory`, freed once, after everything on the GPU.
        let _ = unsafe { sys::cuMemFree_v2(self.base) };
    }
}

pub(crate) fn bytes(data: Data<'_>) -> &[u8] {
    fn view<T>(x: &[T]) -> &[u8] {
        // SAFETY: elements without padding, viewed as bytes.
        unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
    }
    match data {
        Data::F32(x) => view(x),
        Data::F16(x) => view(x),
        Data::BF16(x) => view(x),
        Data::U8(x) => view(x),
        Data::I64(x) => view(x),
    }
}

pub(crate) fn bytes_mut(data: DataMut<'_>) -> &mut [u8] {
    fn view<T>(x: &mut [T]) -> &mut [u8] {
        // SAFETY: elements without padding, for which every bit pattern is valid, viewed as bytes.
        unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(x)) }
    }
    match data {
        DataMut::F32(x) => view(x),
        DataMut::F16(x) => view(x),
        DataMut::BF16(x) => view(x),
        DataMut::U8(x) => view(x),
        DataMut::I64(x) => view(x),
    }
}
