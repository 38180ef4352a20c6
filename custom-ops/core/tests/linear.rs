//! RoutedProjection and RoutedCombine: every CPU kernel that this processor supports, against the f64 reference.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "support/call.rs"]
mod call;
#[path = "support/data.rs"]
mod data;
#[path = "support/linear.rs"]
mod linear;

use call::Call;
use data::{Accounts, kernels_of};
use linear::{COMBINE, Case, Gates, PROJECTION, attributes, each};
use moh_kernels::schema::{ROUTED_COMBINE, ROUTED_PROJECTION, Value};
use moh_kernels::{Attributes, DType, Error};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

impl Case {
    /// Runs all kernels; gives their work.
    fn check(&self, threads: &[usize]) -> Vec<u64> {
        let gates = self.draw_gates();
        // Blocks of heads that are off, and tokens without any head, are exact.
        let exact = |i: usize| match self.is_projection() {
            true => gates[i / self.block] == 0.0,
            false => gates[i / self.width * self.heads..][..self.heads].iter().all(|&gate| gate == 0.0),
        };
        println!("{self:?}");
        self.call().check(threads, exact).iter().map(|work| work.macs).collect()
    }
}

fn gates() -> impl Strategy<Value = Gates> {
    prop_oneof![
        1 => Just(Gates::Off),
        1 => Just(Gates::On),
        3 => (0.02..0.98).prop_map(Gates::Random),
        2 => (0usize..6, 0.02..0.98).prop_map(|(n, p)| Gates::Shared(n, p)),
        1 => (0usize..6).prop_map(Gates::First),
    ]
}

prop_compose! {
    fn cases()(
        flags in any::<(bool, bool, bool)>(),
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        q_len in prop_oneof![4 => 0usize..20, 2 => 20usize..200, 1 => 380usize..390],
        heads in 1usize..9,
        block in prop_oneof![3 => 1usize..40, 1 => prop::sample::select(vec![16, 32, 64, 72, 80])],
        width in prop_oneof![3 => 1usize..80, 1 => prop::sample::select(vec![64, 96, 128, 256, 257, 300])],
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in gates(),
        seed in any::<u64>(),
    ) -> Case {
        let operator = if flags.0 { &ROUTED_PROJECTION } else { &ROUTED_COMBINE };
        let (per_head, bias) = (flags.1, flags.2);
        Case { operator, batch, q_len, heads, block, width, per_head, bias, dtype, gates, seed }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_agree_with_the_reference(case in cases()) {
        case.check(&[1, 2, 3]);
    }
}

#[test]
fn every_number_of_rows() {
    for q_len in (1..=15).chain([47, 48, 49, 383, 384, 385, 769]) {
        for dtype in DType::ALL {
            for case in each(Case { q_len, dtype, heads: 2, block: 7, width: 9, bias: true, ..PROJECTION }) {
                case.check(&[1, 3]);
            }
        }
    }
}

#[test]
fn every_width_of_a_block_and_of_a_token() {
    for size in (1..=80).chain([96, 127, 128, 129, 192, 255, 256, 257, 320, 511, 512, 513]) {
        for q_len in [1, 3, 5, 8] {
            for case in each(Case { q_len, heads: 2, bias: true, ..PROJECTION }) {
                Case { block: size, width: 5, ..case }.check(&[2]);
                Case { block: 5, width: size, ..case }.check(&[2]);
            }
        }
    }
}

#[test]
fn shared_heads_are_multiplied_together() {
    for (q_len, block) in [(1, 72), (5, 24), (60, 72), (60, 64), (61, 5)] {
        for dtype in [DType::F32, DType::F16] {
            let gates = Gates::Shared(5, 0.5);
            for case in each(Case { q_len, block, dtype, heads: 9, width: 70, gates, bias: true, ..PROJECTION }) {
                case.check(&[1, 2, 3, 16]);
            }
        }
    }
}

#[test]
fn empty_batches_and_sequences_give_nothing() {
    for (batch, q_len) in [(0, 3), (3, 0), (0, 0)] {
        for case in each(Case { batch, q_len, bias: true, ..PROJECTION }) {
            assert!(case.check(&[1, 2]).iter().all(|&macs| macs == 0));
        }
    }
}

/// What is used must not be skipped: 0 times a NaN is none.
#[test]
fn a_nan_reaches_exactly_what_uses_it() {
    for q_len in [1, 4, 40] {
        for case in each(Case { q_len, block: 20, width: 20, gates: Gates::Shared(1, 0.5), ..PROJECTION }) {
            for input in [0, 1] {
                for poison in [f32::NAN, f32::INFINITY] {
                    let mut call = case.call();
                    let data::Buffer::F32(numbers) = &mut call.inputs[input].1 else { panic!("not f32") };
                    let Some(target) = numbers.iter_mut().rev().find(|x| x.is_finite()) else {
                        panic!("nothing is used")
                    };
                    *target = poison;
                    let classes = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                    let expected = call.expected();
                    assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                    for kernel in kernels_of(case.operator) {
                        let found = call.run(kernel, expected.len(), &moh_kernels::Threads::new(2)).unwrap().0;
                        assert_eq!(classes(&found), classes(&expected), "{kernel:?} {case:?} input {input}");
                    }
                }
            }
        }
    }
}

/// Register tiles are up to 64 columns wide.
#[test]
fn work_follows_the_gates() {
    for q_len in [1, 4, 33, 400] {
        for p in [0.0, 0.1, 0.5, 1.0] {
            for case in each(Case { q_len, heads: 6, block: 24, width: 40, gates: Gates::Random(p), ..PROJECTION }) {
                let on = case.draw_gates().iter().filter(|&&gate| gate != 0.0).count();
                let least = on * case.block * case.width;
                let most = on * case.block.next_multiple_of(16) * case.width.next_multiple_of(16);
                for macs in case.check(&[2]) {
                    assert!((least..=most).contains(&(macs as usize)), "{case:?}: {macs} not in {least}..={most}");
                }
            }
        }
    }
}

#[test]
fn work_of_whole_tiles_is_exact() {
    for q_len in [1, 5, 60] {
        for case in each(Case { q_len, heads: 4, block: 64, width: 128, gates: Gates::Shared(2, 0.5), ..PROJECTION }) {
            let on = case.draw_gates().iter().filter(|&&gate| gate != 0.0).count();
            for macs in case.check(&[1]) {
                assert_eq!(macs as usize, on * 64 * 128, "{case:?}");
            }
        }
    }
}

#[test]
fn heads_that_nobody_uses_cost_nothing() {
    for q_len in [1, 7, 70] {
        for case in each(Case { q_len, heads: 8, block: 64, width: 64, gates: Gates::First(8), ..PROJECTION }) {
            let few = case.check(&[2]);
            assert_eq!(few, Case { heads: 64, ..case }.check(&[2]), "{case:?}");
            assert!(few.iter().all(|&macs| macs > 0));
        }
    }
}

/// The sums alone of all tokens would be 8 MiB.
#[test]
fn memory_does_not_grow_with_the_tokens_and_is_given_back() {
    for dtype in [DType::F32, DType::F16] {
        for case in each(Case { q_len: 16384, heads: 4, block: 32, width: 128, dtype, ..PROJECTION }) {
            let call = case.call();
            for kernel in kernels_of(case.operator) {
                let host = Accounts::new(2 << 20);
                call.run(kernel, 16384 * 128, &host).unwrap();
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
                assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
            }
        }
    }
}

#[test]
fn a_host_without_memory_is_an_error() {
    for case in each(Case { q_len: 40, heads: 4, block: 64, width: 64, ..PROJECTION }) {
        for kernel in kernels_of(case.operator) {
            for limit in [0, 1000, 2000] {
                let host = Accounts::new(limit);
                let error = case.call().run(kernel, 40 * if case.is_projection() { 256 } else { 64 }, &host).err();
                assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
            }
        }
    }
}

/// The output's columns: what [`Case::call`] has, unless an attribute or a shape is wrong.
fn error(case: Case, change: impl FnOnce(&mut Call)) -> Error {
    let mut call = case.call();
    change(&mut call);
    let columns = if case.is_projection() { case.heads * case.block } else { case.width };
    let kernel = kernels_of(case.operator).next().unwrap();
    call.run(kernel, case.tokens() * columns, &moh_kernels::Threads::new(1)).unwrap_err()
}

#[test]
fn attributes_out_of_range_are_refused() {
    for case in [PROJECTION, COMBINE] {
        for (name, heads, layout) in [
            ("num_heads", 0, 0),
            ("num_heads", -1, 0),
            ("num_heads", i64::MAX, 0),
            ("weight_layout", 3, 2),
            ("weight_layout", 3, -1),
        ] {
            match error(case, |call| call.attributes = attributes(case.operator, heads, layout)) {
                Error::Attribute { attribute, .. } => assert_eq!(attribute, name),
                other => panic!("{name}: {other}"),
            }
        }
        for missing in ["num_heads", "weight_layout"] {
            let read = Attributes::read(case.operator, |def| (def.name != missing).then_some(Value::Int(1)));
            assert!(matches!(read, Err(Error::Attribute { attribute, .. }) if attribute == missing), "{missing}");
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_by_name() {
    let base = Case { batch: 2, q_len: 3, heads: 3, block: 4, width: 5, bias: true, ..PROJECTION };
    for case in each(base) {
        let wide = if case.is_projection() { 5 } else { 12 };
        let valid = case.call().inputs;
        let (weight, out) = (valid[1].0.clone(), valid[3].0[0]);
        let mut wrong: Vec<(usize, Vec<usize>, usize)> = vec![
            (0, vec![2, 3], 0),
            (0, vec![2, 3, 0], 0),
            (0, vec![2, 3, wide, 1], 0),
            (1, weight[1..].to_vec(), 1),
            (1, [&[1], &weight[..]].concat(), 1),
            (2, vec![2, 3, 4], 2),
            (2, vec![1, 3, 3], 2),
            (2, vec![2, 4, 3], 2),
            (2, vec![6, 3], 2),
            (3, vec![out + 1], 3),
            (3, vec![1, out], 3),
            (3, vec![1], 3),
        ];
        for axis in 0..weight.len() {
            for size in [0, weight[axis] + 1] {
                let mut shape = weight.clone();
                shape[axis] = size;
                // Another width of the output fits the weight, and is found where the bias differs.
                let free = match (case.is_projection(), case.per_head) {
                    (true, false) => None,
                    (false, false) => Some(0),
                    (_, true) => Some(2),
                };
                let reported = if free == Some(axis) && size > 0 { 3 } else { 1 };
                wrong.push((1, shape, reported));
            }
        }
        for (i, shape, reported) in wrong {
            let name = case.operator.inputs[reported].name;
            let found = error(case, |call| call.inputs[i].0 = shape.clone());
            match &found {
                Error::Shape { input, .. } => assert_eq!(*input, name, "{case:?} {shape:?}: {found}"),
                other => panic!("{case:?} {name} {shape:?}: {other}"),
            }
        }
    }
}

#[test]
fn numbers_types_and_lengths_are_checked() {
    for case in each(Case { q_len: 2, bias: true, ..PROJECTION }) {
        let name = |i: usize| case.operator.inputs[i].name;
        for n in [0, 2] {
            let found = error(case, |call| call.inputs.truncate(n));
            assert!(matches!(found, Error::InputCount { found, .. } if found == n), "{found}");
        }
        let found = error(case, |call| call.input(&[1], &[1.0]));
        assert!(matches!(found, Error::InputCount { found: 5, .. }), "{found}");
        for i in 0..4 {
            let half = |call: &mut Call| {
                let numbers = vec![0.5; call.inputs[i].0.iter().product()];
                call.inputs[i].1 = data::Buffer::new(DType::F16, &numbers);
            };
            // Where x is the odd one, the weight differs from it.
            let expected = name(if i == 0 { 1 } else { i });
            let found = error(case, half);
            assert!(matches!(found, Error::Type { input, .. } if input == expected), "{found}");
            let short = |call: &mut Call| {
                let numbers = vec![0.5; call.inputs[i].0.iter().product::<usize>() - 1];
                call.inputs[i].1 = data::Buffer::new(DType::F32, &numbers);
            };
            let found = error(case, short);
            assert!(matches!(found, Error::Length { tensor, .. } if tensor == name(i)), "{found}");
        }
        let call = case.call();
        let kernel = kernels_of(case.operator).next().unwrap();
        let found = call.run(kernel, 1, &moh_kernels::Threads::new(1)).unwrap_err();
        assert!(matches!(found, Error::Length { tensor: "output", found: 1, .. }), "{found}");
    }
}

#[test]
fn sizes_beyond_memory_are_refused() {
    for operator in [&ROUTED_PROJECTION, &ROUTED_COMBINE] {
        let shapes = [vec![1 << 40, 1 << 40, 4], vec![4, 4], vec![1 << 40, 1 << 40, 4]];
        let inputs: Vec<_> =
            shapes.iter().map(|shape| Some(moh_kernels::Tensor { shape, data: moh_kernels::Data::F32(&[]) })).collect();
        let output = moh_kernels::DataMut::F32(&mut []);
        let result = moh_kernels::cpu::run(&attributes(operator, 4, 0), &inputs, output, &moh_kernels::Threads::new(1));
        assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
    }
}
