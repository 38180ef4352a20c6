//! Outputs in the memory of an input, as callers arrange for caches.

use super::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// The largest block that this thread has allocated.
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// Notes how large blocks are.
struct Noting;

#[global_allocator]
static ALLOCATOR: Noting = Noting;

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        unsafe { System.dealloc(block, layout) };
    }
}

const CAPACITY: usize = 4096;
const DIM: usize = 4;
/// One head, CAPACITY tokens.
const CACHE: usize = CAPACITY * DIM;

fn past(i: usize) -> f32 {
    (i % 1001) as f32
}

/// One new token for each of two sequences, at positions 7 and CAPACITY - 1; `spare` numbers follow the cache in its buffer.
fn call(kernel: &Made, shared: Option<(usize, usize)>, spare: usize) -> (Vec<f64>, Call, usize) {
    let numbers: Vec<f32> = (0..2 * CACHE + spare).map(past).collect();
    let mut cache = Tensor::new(&[2 * CACHE + spare], Data::F32(&numbers), 0);
    cache.info = Info::sized(DType::F32, &[2, 1, CAPACITY, DIM]);
    let update = Tensor::new(&[2, 1, DIM], Data::F32(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]), 0);
    let mask = Tensor::new(&[2, CAPACITY], Data::I64(&[1; 2 * CAPACITY]), 0);
    let start = Tensor::new(&[2], Data::I64(&[7, CAPACITY as i64 - 1]), 0);
    let mut call = Call::new(DType::F32, vec![Some(cache), Some(update), Some(mask), Some(start)]);
    call.shared = shared;
    LARGEST.set(0);
    let status = kernel.compute(&mut call);
    let largest = LARGEST.get();
    assert_eq!(status, None);
    (call.output.as_ref().unwrap().values(), call, largest)
}

fn kernel() -> Made {
    // The update of a cache.
    let operator = OPERATORS.iter().find(|operator| operator.in_place == Some(0)).unwrap();
    let table = table(operator, DType::F32);
    let sized = |dtype, shape: &[usize]| Some(Info::sized(dtype, shape));
    let inputs = vec![
        sized(DType::F32, &[2, 1, CAPACITY, DIM]),
        sized(DType::F32, &[2, 1, DIM]),
        sized(DType::I64, &[2, CAPACITY]),
        sized(DType::I64, &[2]),
    ];
    Made::of(table, &Node { attributes: vec![], inputs, output: None, constants: vec![] }).unwrap()
}

/// The cache with both new tokens.
fn expected() -> Vec<f64> {
    let mut expected: Vec<f64> = (0..2 * CACHE).map(|i| f64::from(past(i))).collect();
    for (at, first) in [(7 * DIM, 1.0), (2 * CACHE - DIM, 5.0)] {
        for i in 0..DIM {
            expected[at + i] = -(first + i as f64);
        }
    }
    expected
}

const BYTES: usize = 2 * CACHE * size_of::<f32>();

#[test]
fn the_cache_in_its_own_memory_is_not_copied() {
    let (found, call, largest) = call(&kernel(), Some((0, 0)), 0);
    assert_eq!(found, expected());
    assert_eq!(call.inputs[0].as_ref().unwrap().values(), expected());
    assert!(largest < BYTES / 4, "a block of {largest} bytes for a cache of {BYTES}");
}

#[test]
fn a_cache_elsewhere_is_copied_to_the_output() {
    let (found, call, _) = call(&kernel(), None, 0);
    assert_eq!(found, expected());
    let before: Vec<f64> = (0..2 * CACHE).map(|i| f64::from(past(i))).collect();
    assert_eq!(call.inputs[0].as_ref().unwrap().values(), before);
}

/// The output begins three tokens after the cache, in the same buffer: what is written would be read again.
#[test]
fn a_cache_that_overlaps_the_output_is_copied_first() {
    let distance = 3 * DIM;
    let (found, _call, largest) = call(&kernel(), Some((0, distance * size_of::<f32>())), distance);
    assert_eq!(found, expected());
    assert!(largest >= BYTES, "a block of {largest} bytes for a cache of {BYTES}");
}
