//! CacheUpdate's CUDA kernels against the reference, on a GPU or on the emulator.

use crate::device::on_device;
use moh_conformance::{Call, Random};
use moh_operators::{Attributes, CacheUpdate, DType, Error, cache_update};

/// A call on a cache of (batch, KV heads, capacity, dim).
fn call(past: [usize; 4], q_len: usize, total: usize, start: &[i64], dtype: DType) -> Call {
    let [batch, heads, _, dim] = past;
    let mut random = Random(past.iter().sum::<usize>() as u64);
    let mut numbers = |n: usize| -> Vec<f32> { (0..n).map(|_| random.signed()).collect() };
    let mut call = Call::new(Attributes::new::<CacheUpdate>(cache_update::Attributes {}).unwrap(), dtype);
    call.input(&past, &numbers(past.iter().product()));
    call.input(&[batch, q_len, heads * dim], &numbers(batch * q_len * heads * dim));
    call.integers(&[batch, total], &vec![1; batch * total]);
    call.integers(&[batch], start);
    call
}

/// Rows of all multiples of bytes, positions that are clamped, and caches that are copied or grow.
#[test]
fn copies() {
    on_device(|device| {
        for dtype in DType::ALL {
            for dim in [1, 4, 5, 6, 8, 72, 128] {
                for (capacity, total) in [(40, 7), (40, 40), (9, 33), (0, 12)] {
                    let call = call([3, 2, capacity, dim], 4, total, &[5, -3, 1 << 20], dtype);
                    println!("{dtype:?}, {dim} wide, {capacity} and {total} positions");
                    device.check(&call, |_| true);
                }
            }
        }
    });
}

/// More than a block copies, and more blocks than one for a head.
#[test]
fn long_caches() {
    on_device(|device| {
        for (q_len, start) in [(1, 700), (300, 299)] {
            device.check(&call([2, 3, 701, 64], q_len, 700, &[start, 0], DType::F16), |_| true);
        }
    });
}

#[test]
fn in_place() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (dim, q_len) in [(5, 3), (128, 1), (64, 40)] {
                for start in [[0, 11], [-7, 60], [24, 25]] {
                    let call = call([2, 3, 64, dim], q_len, 50, &start, dtype);
                    assert_eq!(
                        device.run_in_place(&call, 0).unwrap(),
                        call.expected(),
                        "{dtype:?} {dim} {q_len} {start:?}"
                    );
                }
            }
        }
    });
}

/// The output has another shape than the cache whose memory it is to have.
#[test]
fn a_cache_that_grows_in_place_is_an_error() {
    on_device(|device| {
        let call = call([1, 2, 8, 16], 1, 9, &[8], DType::F32);
        let error = device.run_in_place(&call, 0).unwrap_err();
        assert!(matches!(error, Error::Shape { input: "past", .. }), "{error}");
    });
}

#[test]
fn empty_calls() {
    on_device(|device| {
        device.check(&call([0, 2, 8, 16], 1, 8, &[], DType::F16), |_| true);
        device.check(&call([1, 2, 8, 16], 0, 8, &[3], DType::F16), |_| true);
        assert_eq!(device.run_in_place(&call([1, 2, 8, 16], 0, 8, &[3], DType::F16), 0).unwrap().len(), 256);
    });
}

/// A graph's launches write where `start` says then.
#[test]
fn captured_calls_read_start_at_the_launch() {
    on_device(|device| {
        let (first, second) =
            (call([1, 2, 8, 16], 1, 8, &[2], DType::F16), call([1, 2, 8, 16], 1, 8, &[6], DType::F16));
        assert_eq!(device.run_captured(&first, &second).unwrap(), second.expected());
    });
}
