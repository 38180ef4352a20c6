//! RoutedCachedAttention's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, RTX_30, compare, on_device, rerun_on_other_gpu, seed};
use moh_conformance::{Call, Random};
use moh_operators::{Attributes, DType, RoutedCachedAttention, routed_cached_attention};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// A call with a sequence for each pair of `first` and `start`.
#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    sequences: &'a [(i64, i64)],
    q_len: usize,
    capacity: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    value_dim: usize,
    /// The share of heads that are on.
    share: f64,
    scale: f32,
    dtype: DType,
    seed: u64,
}

const CASE: Case<'static> = Case {
    sequences: &[(0, 20), (3, 64)],
    q_len: 1,
    capacity: 100,
    kv_heads: 2,
    group: 4,
    head_dim: 64,
    value_dim: 64,
    share: 0.7,
    scale: 0.4,
    dtype: DType::F16,
    seed: 1,
};

impl Case<'_> {
    fn gates(&self) -> Vec<f32> {
        let mut random = Random(self.seed ^ 0x6a7e);
        let count = self.sequences.len() * self.q_len * self.kv_heads * self.group;
        (0..count).map(|_| if random.unit() < self.share { 0.1 + random.unit() as f32 } else { 0.0 }).collect()
    }

    /// The call. What no query sees is NaN: keys before `first`, keys behind the last query, queries of heads that are off.
    fn call(&self) -> Call {
        let (batch, heads) = (self.sequences.len(), self.kv_heads * self.group);
        let mut random = Random(self.seed);
        let gates = self.gates();
        let query: Vec<f32> = (0..gates.len() * self.head_dim)
            .map(|i| if gates[i / self.head_dim] == 0.0 { f32::NAN } else { random.signed() })
            .collect();
        let mut cache = |dim: usize| -> Vec<f32> {
            let position = |i: usize| (i / dim % self.capacity) as i64;
            let seen = |i: usize| {
                let (first, start) = self.sequences[i / (dim * self.capacity * self.kv_heads)];
                (first..start.saturating_add(self.q_len as i64)).contains(&position(i))
            };
            let count = batch * self.kv_heads * self.capacity * dim;
            (0..count).map(|i| if seen(i) { random.signed() } else { f32::NAN }).collect()
        };
        let (key, value) = (cache(self.head_dim), cache(self.value_dim));
        let attributes =
            routed_cached_attention::Attributes { num_heads: heads, kv_num_heads: self.kv_heads, scale: self.scale };
        let mut call = Call::new(Attributes::new::<RoutedCachedAttention>(attributes).unwrap(), self.dtype);
        call.input(&[batch, self.q_len, heads * self.head_dim], &query);
        call.input(&[batch, self.kv_heads, self.capacity, self.head_dim], &key);
        call.input(&[batch, self.kv_heads, self.capacity, self.value_dim], &value);
        call.gates(&[batch, self.q_len, heads], &gates);
        let (first, start): (Vec<i64>, Vec<i64>) = self.sequences.iter().copied().unzip();
        call.integers(&[batch], &first);
        call.integers(&[batch], &start);
        call
    }
}

fn check(device: &Device, case: Case<'_>) {
    println!("{case:?}");
    let (call, gates) = (case.call(), case.gates());
    let expected = call.expected();
    assert!(expected.iter().all(|x| x.is_finite()), "the reference sees what no query sees");
    // Also where a head that is on sees no key.
    device.check(&call, |i| gates[i / case.value_dim] == 0.0 || expected[i] == 0.0);
}

/// Lengths around blocks of keys and parts, in a cache of which they are a small or a large share.
#[test]
fn decoding() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (first, length) in [(0, 1), (0, 63), (5, 70), (0, 129), (100, 400), (1, 1000)] {
                let sequences = [(first, first + length - 1), (0, 0), (length / 2, length)];
                for capacity in [1100, 3000] {
                    let case = Case { sequences: &sequences, capacity, dtype, ..CASE };
                    check(device, Case { kv_heads: 1, seed: 2, ..case });
                    if length < 200 {
                        check(device, Case { head_dim: 128, value_dim: 128, ..case });
                    }
                }
            }
        }
    });
}

/// Several queries per sequence: drafts that decoding takes, and prompts that it does not.
#[test]
fn all_numbers_of_queries() {
    on_device(|device| {
        for dtype in DType::ALL {
            for q_len in [2, 8, 9, 33, 70, 150] {
                let sequences = [(0, 0), (7, 7), (3, 90), (20, 230 - q_len as i64)];
                let case = Case { sequences: &sequences, q_len, capacity: 260, dtype, seed: 3, ..CASE };
                check(device, case);
                check(device, Case { group: 1, head_dim: 96, value_dim: 96, ..case });
            }
        }
    });
}

#[test]
fn all_head_widths() {
    on_device(|device| {
        let widths = [(8, 8), (32, 32), (72, 72), (64, 72), (128, 96), (256, 256), (9, 11), (64, 7), (300, 400)];
        for (i, (head_dim, value_dim)) in widths.into_iter().enumerate() {
            for q_len in [1, 40] {
                for dtype in [HALVES[i % 2], DType::F32] {
                    check(device, Case { q_len, head_dim, value_dim, dtype, capacity: 110, seed: 4, ..CASE });
                }
            }
        }
    });
}

/// Queries without keys, positions before and behind the cache, a first key behind the first queries.
#[test]
fn unusual_positions() {
    on_device(|device| {
        for dtype in DType::ALL {
            for q_len in [1, 6, 50] {
                let sequences = [
                    (9, 4),
                    (100, 99),
                    (1 << 20, 1 << 20),
                    (-5, 30),
                    (0, -1),
                    (0, -4),
                    (0, -(1 << 20)),
                    (0, 1 << 20),
                    (20, 18),
                    (0, 97),
                ];
                let case = Case { sequences: &sequences, q_len, dtype, seed: 5, ..CASE };
                check(device, case);
                check(device, Case { capacity: 700, kv_heads: 1, ..case });
            }
        }
    });
}

#[test]
fn no_and_all_heads_and_scales_that_reverse_the_order() {
    on_device(|device| {
        for dtype in DType::ALL {
            for q_len in [1, 40] {
                for share in [0.0, 1.0] {
                    check(device, Case { share, q_len, dtype, seed: 6, ..CASE });
                }
                for scale in [0.0, -0.7] {
                    check(device, Case { scale, q_len, dtype, seed: 7, ..CASE });
                }
            }
        }
    });
}

#[test]
fn empty_calls() {
    on_device(|device| {
        check(device, Case { q_len: 0, ..CASE });
        check(device, Case { sequences: &[], ..CASE });
    });
}

/// A graph's launches read the positions then.
#[test]
fn captured_calls_read_positions_at_the_launch() {
    on_device(|device| {
        for (q_len, capacity) in [(1, 100), (1, 900), (40, 150)] {
            let first = Case { q_len, capacity, sequences: &[(0, 10), (5, 50)], ..CASE };
            let second = Case { sequences: &[(2, 70), (0, 3)], seed: 8, ..first }.call();
            let found = device.run_captured(&first.call(), &second).unwrap_or_else(|error| panic!("{error}"));
            compare(second.output_dtype(), &found, &second.expected(), |_| false);
        }
    });
}

/// Random calls, seeded by `MOH_SEED`: few on the emulator, many on a GPU.
#[test]
fn random_calls() {
    on_device(|device| {
        let mut random = Random(seed());
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        for number in 0..if device.emulated { 12 } else { 300 } {
            let most = [1, 8, 150][below(3)];
            let (q_len, capacity) = (1 + below(most), 150 + below(if number % 3 == 0 { 1500 } else { 100 }));
            let sequences: Vec<(i64, i64)> =
                (0..1 + below(3)).map(|_| (below(40) as i64, below(capacity - q_len + 1) as i64)).collect();
            let dim = [16, 32, 64, 72, 128][below(5)];
            let case = Case {
                sequences: &sequences,
                q_len,
                capacity,
                kv_heads: 1 + below(3),
                group: 1 + below(4),
                head_dim: dim,
                value_dim: dim,
                share: below(101) as f64 / 100.0,
                dtype: DType::ALL[below(3)],
                seed: seed() + number,
                ..CASE
            };
            check(device, case);
        }
    });
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    let tests = ["routed_cached_attention::all_numbers_of_queries", "routed_cached_attention::unusual_positions"];
    rerun_on_other_gpu(&A100, &tests);
    rerun_on_other_gpu(&RTX_30, &["routed_cached_attention::all_head_widths"]);
}

/// Sizes of published models, which would take long on the emulator.
#[test]
fn model_sizes_on_a_gpu() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for dtype in HALVES {
            for (q_len, length) in [(1, 127), (1, 1023), (1, 4095), (512, 600)] {
                let case = Case { q_len, capacity: 4096, kv_heads: 8, head_dim: 128, value_dim: 128, dtype, ..CASE };
                check(device, Case { sequences: &[(0, length), (17, length)], scale: 0.1, ..case });
            }
        }
    });
}
