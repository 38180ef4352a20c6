//! The emulator's streams: whatever CUDA leaves open happens, so that a missing order shows in results.

use crate::device::Device;
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::{result, sys};

/// Bytes written at a time.
const BYTES: usize = 100;
const ROUNDS: usize = 64;

/// In how many of [`ROUNDS`] rounds the second of two operations ran first. They write the same memory, one on the
/// default stream, by a function that does not wait, and one on another stream of this kind.
fn overtaken(kind: StreamKind, default_first: bool, by_copy: bool) -> Option<usize> {
    let device = Device::get().filter(|device| device.emulated)?;
    let memory = device.memory(BYTES);
    let at = memory.ptr();
    device.stream().synchronize().unwrap();
    let stream = result::stream::create(kind).unwrap();
    // SAFETY: the memory has this size; the stream is destroyed after its last use.
    let count = unsafe {
        let on_stream = || sys::cuMemsetD8Async(at, 1, BYTES, stream).result().unwrap();
        let on_default = || match by_copy {
            true => result::memcpy_htod_sync(at, &[2u8; BYTES]).unwrap(),
            false => sys::cuMemsetD8_v2(at, 2, BYTES).result().unwrap(),
        };
        let round = |_: &usize| {
            let (first, second): (&dyn Fn(), &dyn Fn()) =
                if default_first { (&on_default, &on_stream) } else { (&on_stream, &on_default) };
            first();
            second();
            // Waits for one of the two, and then for all.
            result::stream::synchronize(stream).unwrap();
            sys::cuCtxSynchronize().result().unwrap();
            let mut found = [0u8; BYTES];
            memory.read(&mut found);
            assert!(found == [1; BYTES] || found == [2; BYTES]);
            (found[0] == 1) != default_first
        };
        let count = (0..ROUNDS).filter(round).count();
        result::stream::destroy(stream).unwrap();
        count
    };
    Some(count)
}

#[test]
fn default_stream_overtakes_and_falls_behind_streams_that_do_not_wait_for_it() {
    for by_copy in [false, true] {
        for default_first in [false, true] {
            let Some(count) = overtaken(StreamKind::NonBlocking, default_first, by_copy) else { return };
            assert!((1..ROUNDS).contains(&count), "{count} of {ROUNDS}: by_copy {by_copy}, first {default_first}");
        }
    }
}

#[test]
fn default_stream_is_ordered_with_streams_that_wait_for_it() {
    for by_copy in [false, true] {
        for default_first in [false, true] {
            let Some(count) = overtaken(StreamKind::Default, default_first, by_copy) else { return };
            assert_eq!(count, 0, "by_copy {by_copy}, default stream first {default_first}");
        }
    }
}
