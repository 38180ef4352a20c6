//! RoutedAttention's CUDA kernels against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, RTX_30, on_device, rerun_on_other_gpu, seed};
use moh_conformance::Random;
use moh_conformance::routed_attention::{Case, Gates, Mask};
use moh_operators::{Attributes, DType, RoutedAttention, routed_attention};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn check(device: &Device, case: Case) {
    check_scaled(device, case, None);
}

fn check_scaled(device: &Device, case: Case, scale: Option<f32>) {
    println!("{case:?}");
    let numbers = case.draw();
    let mut call = numbers.call();
    if let Some(scale) = scale {
        let own = *call.attributes.get::<RoutedAttention>().unwrap();
        call.attributes = Attributes::new::<RoutedAttention>(routed_attention::Attributes { scale, ..own }).unwrap();
    }
    device.check(&call, |i| numbers.gates[i / case.value_dim] == 0.0);
}

#[test]
fn all_lengths_and_layouts() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (q_len, kv_len) in [(1, 1), (37, 53), (130, 64), (64, 129), (200, 200)] {
                for (is_causal, cache_layout) in [(false, false), (true, true), (true, false), (false, true)] {
                    let gates = Gates::Random(0.7);
                    let case = Case { q_len, kv_len, is_causal, cache_layout, dtype, gates, ..Case::default() };
                    check(device, Case { head_dim: 64, value_dim: 64, kv_num_heads: 2, seed: 3, ..case });
                }
            }
        }
    });
}

#[test]
fn all_head_widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (head_dim, value_dim) in [
                (8, 8),
                (32, 32),
                (72, 72),
                (64, 72),
                (80, 16),
                (96, 96),
                (128, 128),
                (40, 128),
                (256, 256),
                (200, 136),
            ] {
                let case = Case { q_len: 70, kv_len: 90, head_dim, value_dim, dtype, seed: 4, ..Case::default() };
                check(device, Case { gates: Gates::Random(0.6), ..case });
                check(device, Case { is_causal: true, bias: Some(([false, true, true, true], Mask::Some)), ..case });
            }
            // Widths that are not multiples of 8.
            for (head_dim, value_dim) in [(1, 1), (9, 11), (33, 64), (64, 7), (511, 300)] {
                let case = Case { q_len: 20, kv_len: 40, head_dim, value_dim, dtype, seed: 5, ..Case::default() };
                check(device, Case { gates: Gates::Random(0.6), ..case });
            }
        }
    });
}

/// Heads that are not in shared memory as a whole.
#[test]
fn wide_heads() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (head_dim, value_dim) in [(300, 400), (1024, 1000), (513, 640), (100, 1023)] {
                let case = Case { q_len: 40, kv_len: 50, head_dim, value_dim, dtype, seed: 7, ..Case::default() };
                check(device, Case { gates: Gates::Random(0.6), is_causal: head_dim > 512, ..case });
            }
        }
    });
}

/// Widths on both sides of a panel of 64 columns, and of the narrower panel after it.
#[test]
fn widths_around_a_panel() {
    on_device(|device| {
        for dtype in HALVES {
            for (head_dim, value_dim) in [
                (56, 64),
                (64, 72),
                (72, 64),
                (72, 72),
                (72, 80),
                (80, 72),
                (80, 80),
                (8, 80),
                (88, 96),
                (96, 88),
                (104, 120),
            ] {
                // More than two blocks of keys, the last one of which is not full.
                let case = Case { batch: 2, q_len: 67, kv_len: 301, head_dim, value_dim, dtype, ..Case::default() };
                let case = Case { kv_num_heads: 2, gates: Gates::Random(0.6), seed: 7, ..case };
                check(device, case);
                check(device, Case { is_causal: true, cache_layout: true, ..case });
            }
        }
    });
}

#[test]
fn biases_broadcast_and_mask() {
    on_device(|device| {
        for dtype in DType::ALL {
            for axes in [0, 1, 2, 4, 9, 10, 15] {
                let axes = [axes & 8 != 0, axes & 4 != 0, axes & 2 != 0, axes & 1 != 0];
                for mask in [Mask::Finite, Mask::Some, Mask::WholeRows] {
                    let bias = Some((axes, mask));
                    let case =
                        Case { batch: 2, q_len: 21, kv_len: 35, kv_num_heads: 2, dtype, bias, ..Case::default() };
                    let is_causal = axes[3];
                    check(device, Case { gates: Gates::Random(0.7), head_dim: 16, value_dim: 24, is_causal, ..case });
                }
            }
        }
    });
}

/// Biases that are finite, unlike their products with log2(e).
#[test]
fn finite_biases_stay_finite() {
    on_device(|device| {
        for dtype in [DType::F32, DType::BF16] {
            // Decoding in one part and in several; tiles, the last of which is not full.
            for (q_len, kv_len, group_size) in [(1, 40, 4), (2, 700, 3), (130, 90, 1)] {
                for (axes, dim) in [([true; 4], 64), ([false, true, true, true], 24), ([true, true, true, false], 72)] {
                    let bias = Some((axes, Mask::Huge));
                    let case =
                        Case { batch: 2, q_len, kv_len, kv_num_heads: 2, group_size, dtype, bias, ..Case::default() };
                    check(device, Case { gates: Gates::Random(0.7), head_dim: dim, value_dim: dim, seed: 8, ..case });
                }
            }
        }
    });
}

/// Biases of all shapes; their rows start at multiples of 16, of 4 and of 2 bytes.
#[test]
fn biases_of_all_shapes_and_alignments() {
    on_device(|device| {
        let masks = [Mask::Finite, Mask::Some, Mask::WholeRows];
        for dtype in HALVES {
            for shape in 0..16 {
                let axes = [shape & 8 != 0, shape & 4 != 0, shape & 2 != 0, shape & 1 != 0];
                for (i, kv_len) in [264, 130, 203].into_iter().enumerate() {
                    let bias = Some((axes, masks[(shape + i) % 3]));
                    let case = Case { batch: 2, q_len: 71, kv_len, group_size: 2, dtype, bias, ..Case::default() };
                    let case = Case { head_dim: 72, value_dim: 72, gates: Gates::Random(0.6), seed: 9, ..case };
                    check(device, Case { is_causal: (shape + i) % 2 == 0, cache_layout: i == 1, ..case });
                }
            }
            for (dim, kv_len) in [(64, 400), (64, 399), (96, 272), (96, 271), (128, 304), (128, 301)] {
                for axes in [[true, true, true, true], [true, false, false, true]] {
                    let bias = Some((axes, Mask::Some));
                    let case = Case { batch: 2, q_len: 80, kv_len, kv_num_heads: 2, dtype, bias, ..Case::default() };
                    check(device, Case { head_dim: dim, value_dim: dim, gates: Gates::Random(0.7), seed: 10, ..case });
                }
            }
        }
    });
}

/// Tiles whose first rows see fewer blocks of keys, and of the bias, than their last ones.
#[test]
fn causal_tiles_with_a_bias() {
    on_device(|device| {
        for (dtype, dim, kv_num_heads, q_len, kv_len) in [
            (DType::F16, 64, 16, 260, 300), // keys and values stay in shared memory
            (DType::BF16, 72, 4, 290, 611), // keys and values are streamed
        ] {
            let bias = Some(([false, true, true, true], Mask::Some));
            let case = Case { kv_num_heads, q_len, kv_len, dtype, bias, is_causal: true, ..Case::default() };
            check(device, Case { head_dim: dim, value_dim: dim, gates: Gates::Random(0.9), seed: 11, ..case });
        }
    });
}

#[test]
fn groups_of_query_heads_share_keys() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (kv_num_heads, group_size) in [(1, 4), (2, 3), (3, 8)] {
                for (q_len, kv_len) in [(1, 70), (3, 100), (40, 40), (33, 90)] {
                    for gates in [Gates::Random(0.5), Gates::TopK(1)] {
                        let case =
                            Case { batch: 2, kv_num_heads, group_size, q_len, kv_len, dtype, gates, ..Case::default() };
                        check(
                            device,
                            Case { head_dim: 32, value_dim: 40, cache_layout: true, is_causal: true, ..case },
                        );
                    }
                }
            }
        }
    });
}

#[test]
fn no_some_and_all_heads_on() {
    on_device(|device| {
        for dtype in DType::ALL {
            for gates in [Gates::Off, Gates::On, Gates::TopK(0), Gates::TopK(1), Gates::TopK(4), Gates::Random(0.02)] {
                for q_len in [1, 2, 150] {
                    let case = Case { batch: 3, q_len, kv_len: 150, kv_num_heads: 4, dtype, gates, ..Case::default() };
                    check(device, Case { head_dim: 64, value_dim: 64, is_causal: true, ..case });
                }
            }
        }
    });
}

#[test]
fn rows_without_keys_are_zero() {
    on_device(|device| {
        for dtype in DType::ALL {
            // More queries than keys: the first queries see no keys.
            let case = Case { q_len: 150, kv_len: 20, is_causal: true, dtype, kv_num_heads: 2, ..Case::default() };
            check(device, Case { head_dim: 32, value_dim: 32, ..case });
            check(device, Case { kv_len: 0, is_causal: false, ..case });
            check(device, Case { kv_len: 0, ..case });
            check(device, Case { q_len: 2, kv_len: 0, ..case });
        }
    });
}

#[test]
fn empty_axes_yield_an_empty_output() {
    on_device(|device| {
        for (batch, q_len) in [(0, 3), (2, 0)] {
            check(device, Case { batch, q_len, kv_len: 5, dtype: DType::F16, ..Case::default() });
        }
    });
}

#[test]
fn zero_and_negative_scales() {
    on_device(|device| {
        for dtype in HALVES {
            for scale in [0.0, -0.7] {
                let case = Case { q_len: 40, kv_len: 70, dtype, head_dim: 16, value_dim: 16, ..Case::default() };
                check_scaled(device, case, Some(scale));
                check_scaled(device, Case { q_len: 1, ..case }, Some(scale));
            }
        }
    });
}

#[test]
fn decoding_all_head_widths() {
    on_device(|device| {
        for dtype in HALVES {
            for dim in [32, 64, 72, 96, 128, 256] {
                // Lists of up to 16 and of more entries.
                for group_size in [2, 20] {
                    let case =
                        Case { q_len: 1, kv_len: 290, group_size, head_dim: dim, value_dim: dim, ..Case::default() };
                    check(device, Case { dtype, gates: Gates::Random(0.6), is_causal: true, ..case });
                }
            }
        }
    });
}

#[test]
fn decoding_splits_long_caches() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (q_len, kv_num_heads, group_size) in [(1, 3, 1), (2, 1, 1), (1, 1, 4), (4, 2, 1), (3, 1, 8), (1, 1, 32)]
            {
                for (dim, kv_len) in [(64, 900), (128, 513), (72, 700), (256, 300), (33, 600), (300, 400)] {
                    let gates = Gates::Random(0.6);
                    let case = Case { q_len, kv_len, kv_num_heads, group_size, dtype, gates, ..Case::default() };
                    let case = Case { head_dim: dim, value_dim: dim, batch: 2, seed: 5, ..case };
                    check(device, Case { cache_layout: true, is_causal: true, ..case });
                    if dim == 64 {
                        check(device, Case { bias: Some(([true, false, false, true], Mask::Some)), ..case });
                        check(device, Case { bias: Some(([false; 4], Mask::WholeRows)), ..case });
                    }
                }
            }
        }
    });
}

#[test]
fn long_sequences_in_tiles() {
    on_device(|device| {
        for (dtype, dim, q_len, kv_len) in [
            (DType::F16, 64, 500, 256), // tiles with many rows; keys and values stay in shared memory
            (DType::BF16, 72, 300, 512),
            (DType::F16, 64, 400, 800),   // keys and values are streamed
            (DType::BF16, 128, 330, 460), // without a causal mask, in blocks of 160 keys
            (DType::F16, 128, 330, 620),
            (DType::F16, 128, 400, 310),
            (DType::F16, 96, 260, 500),
            (DType::BF16, 256, 200, 330),
        ] {
            let case = Case { dtype, q_len, kv_len, head_dim: dim, value_dim: dim, seed: 6, ..Case::default() };
            for (is_causal, group_size) in [(false, 1), (true, 2)] {
                let case = Case { is_causal, group_size, batch: 3 - group_size, ..case };
                check(device, Case { gates: Gates::Random(0.8), cache_layout: is_causal, ..case });
            }
            let bias = Some(([false, true, false, true], Mask::Some));
            check(device, Case { gates: Gates::Random(0.5), bias, ..case });
        }
    });
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    rerun_on_other_gpu(
        &A100,
        &[
            "routed_attention::all_lengths_and_layouts",
            "routed_attention::all_head_widths",
            "routed_attention::finite_biases",
            "routed_attention::groups_of_query_heads",
            "routed_attention::long_sequences",
            "routed_attention::no_some_and_all",
        ],
    );
    rerun_on_other_gpu(
        &RTX_30,
        &["routed_attention::all_head_widths", "routed_attention::decoding_all_head", "routed_attention::wide_heads"],
    );
}

/// Random calls, seeded by `MOH_SEED`: few on the emulator, many and larger ones on a GPU.
#[test]
fn random_calls() {
    on_device(|device| {
        let (calls, longest, most_heads) = if device.emulated { (100, 160, 3) } else { (200, 300, 4) };
        let mut random = Random(seed());
        let mut below = |n: usize| (random.bits() % n as u64) as usize;
        for number in 0..calls {
            let widths = [8, 16, 32, 40, 64, 72, 80, 96, 128, 136, 256];
            let lengths = [1 + below(4), 1 + below(longest), 1 + below(longest / 4)];
            let q_len = lengths[below(3)];
            let kv_len = [q_len, 1 + below(2 * longest), 1 + below(longest / 2)][below(3)];
            let head_dim = [widths[below(widths.len())], 1 + below(150)][usize::from(below(5) == 0)];
            let masks = [Mask::Finite, Mask::Some, Mask::WholeRows];
            let axes = [below(2) == 0, below(2) == 0, below(2) == 0, below(2) == 0];
            let share = below(101) as f64 / 100.0;
            let case = Case {
                batch: 1 + below(3),
                q_len,
                kv_len,
                kv_num_heads: 1 + below(most_heads),
                group_size: [1, 1, 2, 3, 4][below(5)],
                head_dim,
                value_dim: [head_dim, head_dim, widths[below(widths.len())]][below(3)],
                cache_layout: below(2) == 0,
                is_causal: below(2) == 0,
                dtype: DType::ALL[below(3)],
                gates: [Gates::On, Gates::TopK(1), Gates::Random(share), Gates::Random(share)][below(4)],
                bias: [None, None, Some((axes, masks[below(3)]))][below(3)],
                seed: seed() + number,
            };
            check(device, case);
        }
    });
}

/// A NaN in a value must reach every row that sees it, and no other sequence or KV head. Rows of its tile that do not
/// see it may become NaN too: see docs/cuda-attention.md.
#[test]
fn nan_in_a_value_stays_in_its_sequence_and_kv_head() {
    on_device(|device| {
        for dtype in DType::ALL {
            for q_len in [1, 100] {
                let case =
                    Case { batch: 2, q_len, kv_len: 100, kv_num_heads: 2, is_causal: true, dtype, ..Case::default() };
                let case = Case { head_dim: 64, value_dim: 64, gates: Gates::Random(0.6), seed: 8, ..case };
                let mut numbers = case.draw();
                let at = case.kv_index(0, 60, 1, case.value_dim) + 5;
                numbers.value[at] = f32::NAN;
                let call = numbers.call();
                let (expected, found) = (call.expected(), device.run(&call).unwrap());
                let (heads, width) = (case.num_heads(), case.value_dim);
                for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let (batch, head) = (i / width / heads / q_len, i / width % heads);
                    let own =
                        batch == 0 && head / case.group_size == 1 && i % width == 5 && numbers.gates[i / width] != 0.0;
                    assert!(!expected.is_nan() || found.is_nan(), "{case:?}: element {i} sees the NaN, found {found}");
                    assert!(own || !found.is_nan(), "{case:?}: element {i} is NaN");
                }
            }
        }
    });
}
