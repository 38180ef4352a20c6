//! RoutedAttention: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::routed_attention::{Case, Gates, Mask, Numbers};
use moh_cpu::{Host, Kernel, Threads, Work};
use moh_operators::{DType, Definition, Error, RoutedAttention, tolerance};
use proptest::prelude::*;
use std::ops::RangeInclusive;
use std::sync::atomic::Ordering;

fn kernels() -> impl Iterator<Item = &'static Kernel> {
    kernels_of(RoutedAttention::OPERATOR)
}

/// The output and work of `kernel` on the inputs.
fn run(numbers: &Numbers, kernel: &Kernel, host: &dyn Host) -> Result<(Vec<f64>, Work), Error> {
    let case = numbers.case;
    support::run(&numbers.call(), kernel, case.batch * case.q_len * case.num_heads() * case.value_dim, host)
}

/// Runs every kernel with every number of threads; panics if one differs from the reference.
fn check(numbers: &Numbers, threads: RangeInclusive<usize>) -> Vec<(&'static Kernel, Work)> {
    let expected = numbers.call().expected();
    let mut works = Vec::new();
    for kernel in kernels() {
        let weight_rounding = match kernel.isa {
            "amx" | "avx512bf16" if numbers.case.dtype == DType::BF16 => tolerance::MATRIX_UNIT_BF16,
            _ => 0.0,
        };
        for threads in threads.clone() {
            let (found, work) = run(numbers, kernel, &Threads::new(threads))
                .unwrap_or_else(|error| panic!("{kernel:?} {:?}: {error}", numbers.case));
            numbers.compare(kernel, &found, &expected, weight_rounding);
            works.push((kernel, work));
        }
    }
    works
}

fn check_all(case: Case) {
    check(&case.draw(), 1..=3);
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)]
}

fn gates(heads: usize) -> impl Strategy<Value = Gates> {
    prop_oneof![
        1 => Just(Gates::Off),
        1 => Just(Gates::On),
        3 => (0.02..0.98).prop_map(Gates::Random),
        3 => (0..=heads).prop_map(Gates::TopK),
    ]
}

fn bias() -> impl Strategy<Value = Option<([bool; 4], Mask)>> {
    let mask = prop_oneof![Just(Mask::Finite), Just(Mask::Some), Just(Mask::WholeRows)];
    prop::option::of((any::<[bool; 4]>(), mask))
}

fn lengths() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![
        4 => (0usize..20, 0usize..20),
        3 => (1usize..150, 1usize..150),
        2 => (1usize..150).prop_map(|n| (n, n)),
        2 => (1usize..6, 1usize..700),
        1 => (100usize..300, 1usize..20),
    ]
}

fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..40, 2 => prop::sample::select(vec![16, 32, 64, 72, 80, 96, 128]), 1 => 40usize..140]
}

prop_compose! {
    fn cases()(
        heads in (1usize..5, 1usize..5),
        lengths in lengths(),
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        dims in prop_oneof![dims().prop_map(|d| (d, d)), (dims(), dims())],
        layout in any::<(bool, bool)>(),
        dtype in dtypes(),
        bias in bias(),
        seed in any::<u64>(),
    )(
        gates in gates(heads.0 * heads.1),
        heads in Just(heads), lengths in Just(lengths), batch in Just(batch), dims in Just(dims),
        layout in Just(layout), dtype in Just(dtype), bias in Just(bias), seed in Just(seed),
    ) -> Case {
        Case {
            batch,
            q_len: lengths.0,
            kv_len: lengths.1,
            kv_num_heads: heads.0,
            group_size: heads.1,
            head_dim: dims.0,
            value_dim: dims.1,
            cache_layout: layout.0,
            is_causal: layout.1,
            dtype,
            gates,
            bias,
            seed,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(case in cases()) {
        check_all(case);
    }
}

/// The element types that have their own tiles.
const TILED: [DType; 3] = DType::ALL;

#[test]
fn lengths_around_tile_sizes() {
    for rows in [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 64, 81, 95, 97, 145] {
        for kv_len in [1, 7, 8, 9, 127, 128, 129, 131, 256, 263] {
            for is_causal in [false, true] {
                for dtype in TILED {
                    let case =
                        Case { q_len: rows, kv_len, is_causal, dtype, head_dim: 9, value_dim: 11, ..Case::default() };
                    check(&case.draw(), 2..=2);
                }
            }
        }
    }
}

#[test]
fn all_head_widths() {
    for dim in (1..=80).chain([96, 127, 128, 192, 256, 384, 511, 512]) {
        for (q_len, other) in [(2, 16), (70, 5)] {
            for dtype in TILED {
                let case = Case { q_len, kv_len: 19, head_dim: dim, value_dim: other, dtype, ..Case::default() };
                check(&case.draw(), 1..=1);
                check(&Case { head_dim: other, value_dim: dim, ..case }.draw(), 1..=1);
            }
        }
    }
}

#[test]
fn decoding_splits_long_caches() {
    for (kv_num_heads, group_size) in [(1, 1), (1, 4), (3, 1), (2, 8)] {
        for dtype in DType::ALL {
            let gates = Gates::Random(0.6);
            let case = Case { kv_len: 3001, kv_num_heads, group_size, dtype, gates, seed: 5, ..Case::default() };
            check_all(Case { cache_layout: true, is_causal: true, ..case });
            check_all(Case { bias: Some(([false, false, false, true], Mask::Some)), ..case });
            check_all(Case { bias: Some(([false; 4], Mask::WholeRows)), ..case });
        }
    }
}

#[test]
fn long_sequences_use_many_blocks_and_chunks() {
    let case = Case { q_len: 1300, kv_len: 1000, head_dim: 96, value_dim: 128, seed: 7, ..Case::default() };
    for is_causal in [false, true] {
        for kv_num_heads in [1, 2] {
            for dtype in TILED {
                check_all(Case { is_causal, kv_num_heads, gates: Gates::Random(0.7), dtype, ..case });
            }
        }
    }
}

#[test]
fn empty_axes_yield_zeros_or_an_empty_output() {
    for is_causal in [false, true] {
        for (batch, q_len, kv_len) in [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0), (2, 60, 0)] {
            for cache_layout in [false, true] {
                for bias in [None, Some(([true; 4], Mask::Some))] {
                    check_all(Case { batch, q_len, kv_len, cache_layout, is_causal, bias, ..Case::default() });
                }
            }
        }
    }
}

/// The running maximum must keep all softmax weights in range, in whatever order large scores come.
#[test]
fn large_scores_do_not_overflow() {
    for ((q_len, sign), dtype) in
        [(1, 1.0), (1, -1.0), (40, 1.0), (40, -1.0)].into_iter().flat_map(|case| TILED.map(|dtype| (case, dtype)))
    {
        let mut numbers = Case { q_len, kv_len: 300, dtype, ..Case::default() }.draw();
        for (j, key) in numbers.key.chunks_exact_mut(8).enumerate() {
            key.fill(sign * j as f32);
        }
        numbers.query.fill(20.0);
        check(&numbers, 1..=2);
    }
}

#[test]
fn nan_and_infinity_affect_only_rows_that_see_the_key() {
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for ((q_len, kv_len), is_causal) in
            [(60, 60), (60, 100), (100, 60), (3, 40)].into_iter().flat_map(|case| [(case, false), (case, true)])
        {
            for in_key in [false, true] {
                for dtype in TILED {
                    let case = Case { q_len, kv_len, is_causal, gates: Gates::Random(0.8), dtype, ..Case::default() };
                    let mut numbers = case.draw();
                    let target = if in_key { &mut numbers.key } else { &mut numbers.value };
                    target[(kv_len - 20) * 8 + 3] = poison;
                    let classes = |x: &[f64]| x.iter().map(|x| x.classify()).collect::<Vec<_>>();
                    let expected = numbers.call().expected();
                    assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                    for kernel in kernels() {
                        let (found, _) = run(&numbers, kernel, &Threads::new(2)).unwrap();
                        assert_eq!(classes(&found), classes(&expected), "{kernel:?} {case:?} {poison}");
                    }
                }
            }
        }
    }
}

/// Biases as large as numbers are, with which some models mask keys: only -inf leaves a key out.
#[test]
fn finite_biases_stay_finite() {
    for dtype in [DType::F32, DType::BF16] {
        // Rows one by one, keys in several parts, and tiles, the last of which is not full.
        for (q_len, kv_len, group_size) in [(1, 40, 4), (2, 700, 3), (130, 90, 1)] {
            for axes in [[true; 4], [false, false, true, true], [false, false, false, true], [true, true, true, false]]
            {
                let bias = Some((axes, Mask::Huge));
                let case =
                    Case { batch: 2, q_len, kv_len, kv_num_heads: 2, group_size, dtype, bias, ..Case::default() };
                check(&case.draw(), 1..=2);
            }
        }
    }
}

#[test]
fn nan_in_a_selected_head_propagates() {
    for q_len in [1, 30] {
        for dtype in TILED {
            let mut numbers = Case { q_len, kv_len: 50, kv_num_heads: 2, dtype, ..Case::default() }.draw();
            numbers.query[0] = f32::NAN;
            for kernel in kernels() {
                let (found, _) = run(&numbers, kernel, &Threads::new(1)).unwrap();
                assert!(found[..8].iter().all(|x| x.is_nan()), "{kernel:?}");
                assert!(found[8..].iter().all(|x| x.is_finite()), "{kernel:?}");
            }
        }
    }
}

/// Values are what may be as large as a float32 is; scores of such keys overflow. Heads whose width fills tiles and does not.
#[test]
fn errors_are_those_of_the_precision() {
    for (head_dim, value_dim, is_causal) in [(64, 64, false), (72, 40, true), (17, 128, false)] {
        let bias = (value_dim == 40).then_some(([true, true, false, true], Mask::Finite));
        let case =
            Case { q_len: 130, kv_len: 150, group_size: 2, head_dim, value_dim, is_causal, bias, ..Case::default() };
        support::check_precisions(Case { gates: Gates::Random(0.7), ..case }.draw().call(), &[2], false);
    }
}

#[test]
fn macs_match_the_gates() {
    // A register tile covers up to 16 rows, and up to 8 keys if the rows' masks differ; a matrix unit's covers 32 of
    // each.
    let tile = |isa| if isa == "amx" { (32, 32) } else { (16, 8) };
    for (q_len, kv_len) in [(1, 200), (150, 150), (150, 40), (40, 150)] {
        for is_causal in [false, true] {
            for p in [0.0, 0.02, 0.25, 0.5, 1.0] {
                let case = Case { batch: 2, q_len, kv_len, kv_num_heads: 3, group_size: 2, ..Case::default() };
                let case = Case { is_causal, gates: Gates::Random(p), head_dim: 24, value_dim: 16, ..case };
                let numbers = case.draw();
                let visible = |token: usize| match is_causal {
                    true => (token + 1 + kv_len).saturating_sub(q_len).min(kv_len),
                    false => kv_len,
                };
                let mut heads = Vec::new();
                for head in 0..case.batch * case.kv_num_heads {
                    let (batch, kv_head) = (head / case.kv_num_heads, head % case.kv_num_heads);
                    let mut keys = Vec::new();
                    for token in 0..q_len {
                        let first = ((batch * q_len + token) * case.kv_num_heads + kv_head) * case.group_size;
                        let selected = numbers.gates[first..first + 2].iter().filter(|&&gate| gate != 0.0).count();
                        keys.extend(std::iter::repeat_n(visible(token), selected));
                    }
                    heads.push(keys);
                }
                let per_key = case.head_dim + case.value_dim;
                let least = heads.iter().flatten().sum::<usize>() * per_key;
                for (kernel, work) in check(&numbers, 2..=2) {
                    let (rows, columns) = tile(kernel.isa);
                    let filled = |keys: &[usize]| rows * keys.last().unwrap().next_multiple_of(columns);
                    let most = heads.iter().flat_map(|keys| keys.chunks(rows)).map(filled).sum::<usize>() * per_key;
                    let bounds = least..=most;
                    assert!(bounds.contains(&(work.macs as usize)), "{kernel:?} {case:?}: {work:?} not in {bounds:?}");
                }
            }
        }
    }
}

/// Full vectors without a mask need no padding.
#[test]
fn macs_are_exact_for_whole_vectors() {
    for (q_len, kv_len) in [(1, 77), (96, 64), (128, 224)] {
        let numbers = Case { q_len, kv_len, kv_num_heads: 2, ..Case::default() }.draw();
        for (_, work) in check(&numbers, 1..=2) {
            assert_eq!(work.macs as usize, 2 * q_len * kv_len * 16);
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    for dtype in TILED {
        let case = Case { q_len: 300, kv_len: 300, kv_num_heads: 2, is_causal: true, dtype, ..Case::default() };
        let numbers = Case { gates: Gates::Random(0.5), ..case }.draw();
        for kernel in kernels() {
            let one = run(&numbers, kernel, &Threads::new(1)).unwrap().0;
            for threads in [2, 3, 16] {
                assert_eq!(
                    one,
                    run(&numbers, kernel, &Threads::new(threads)).unwrap().0,
                    "{kernel:?}, {threads} threads"
                );
            }
        }
    }
}

/// Storing all scores would take 64 MiB.
#[test]
fn memory_is_released_and_is_not_quadratic() {
    let case = Case { q_len: 4096, kv_len: 4096, is_causal: true, gates: Gates::Random(0.1), ..Case::default() };
    let numbers = Case { head_dim: 64, value_dim: 64, ..case }.draw();
    for kernel in kernels() {
        let host = Accounts::new(4 << 20);
        run(&numbers, kernel, &host).unwrap();
        assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
        assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
    }
}

#[test]
fn failed_allocation_returns_an_error() {
    for kernel in kernels() {
        for q_len in [1, 40] {
            for limit in [0, 2000, 8000] {
                let host = Accounts::new(limit);
                let numbers = Case { q_len, kv_len: 40, kv_num_heads: 2, ..Case::default() }.draw();
                let error = run(&numbers, kernel, &host).err();
                if !(q_len == 1 && limit == 8000) {
                    assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
                }
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
            }
        }
    }
}
