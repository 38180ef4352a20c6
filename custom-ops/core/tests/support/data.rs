//! Numbers of any type, a reproducible source of them, and a host that keeps accounts: for the tests of all operators.

use half::{bf16, f16};
use moh_kernels::cpu::{KERNELS, Kernel};
use moh_kernels::{DType, Data, DataMut, Host, Operator, Threads};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Elements of one type.
#[derive(Debug, Clone)]
pub(crate) enum Buffer {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Buffer {
    pub(crate) fn new(dtype: DType, numbers: &[f32]) -> Buffer {
        match dtype {
            DType::F32 => Buffer::F32(numbers.to_vec()),
            DType::F16 => Buffer::F16(numbers.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::BF16 => Buffer::BF16(numbers.iter().map(|&x| bf16::from_f32(x)).collect()),
        }
    }

    pub(crate) fn data(&self) -> Data<'_> {
        match self {
            Buffer::F32(x) => Data::F32(x),
            Buffer::F16(x) => Data::F16(x),
            Buffer::BF16(x) => Data::BF16(x),
        }
    }

    pub(crate) fn data_mut(&mut self) -> DataMut<'_> {
        match self {
            Buffer::F32(x) => DataMut::F32(x),
            Buffer::F16(x) => DataMut::F16(x),
            Buffer::BF16(x) => DataMut::BF16(x),
        }
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// From 0 to 1.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
    /// From -1 to 1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.unit() * 2.0 - 1.0) as f32
    }
}

/// An operator's kernels that this processor supports.
pub(crate) fn kernels_of(operator: &'static Operator) -> impl Iterator<Item = &'static Kernel> {
    KERNELS.iter().filter(move |kernel| kernel.operator == operator && (kernel.supported)())
}

/// Counts what is outstanding, and can refuse.
pub(crate) struct Accounts {
    threads: Threads,
    pub(crate) outstanding: AtomicUsize,
    pub(crate) peak: AtomicUsize,
    limit: usize,
}

impl Accounts {
    pub(crate) fn new(limit: usize) -> Accounts {
        let (outstanding, peak) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Accounts { threads: Threads::new(2), outstanding, peak, limit }
    }
}

// SAFETY: memory comes from `Threads`.
unsafe impl Host for Accounts {
    fn parallelism(&self) -> usize {
        self.threads.parallelism()
    }
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        assert!(tasks <= self.parallelism());
        self.threads.parallel_for(tasks, task);
    }
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        let outstanding = self.outstanding.fetch_add(bytes, Ordering::SeqCst) + bytes;
        self.peak.fetch_max(outstanding, Ordering::SeqCst);
        if outstanding > self.limit {
            self.outstanding.fetch_sub(bytes, Ordering::SeqCst);
            return None;
        }
        self.threads.allocate(bytes)
    }
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        self.outstanding.fetch_sub(bytes, Ordering::SeqCst);
        // SAFETY: the caller's contract.
        unsafe { self.threads.release(ptr, bytes) }
    }
}
