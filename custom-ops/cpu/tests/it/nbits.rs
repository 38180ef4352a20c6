//! The operators with quantised weights: every CPU kernel that this processor supports, against the f64 reference.

use crate::support::{self, Accounts, kernels_of};
use moh_conformance::head_linear::{self, COMBINE, Gates, PROJECTION};
use moh_conformance::linear::Then;
use moh_conformance::nbits::{Case, LinearCase, MlpCase, Quantisation};
use moh_conformance::routed_mlp;
use moh_cpu::{Kernel, Threads};
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Error};
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const FOUR: Quantisation = Quantisation { bits: 4, block: 32, zero_points: false, int8: false };

/// Every way to quantise weights in blocks of `block`.
fn ways(block: usize) -> impl Iterator<Item = Quantisation> {
    let flags = [(false, false), (true, false), (false, true), (true, true)];
    let ways = [4, 8].into_iter().flat_map(move |bits| flags.map(|flags| (bits, flags)));
    ways.map(move |(bits, (zero_points, int8))| Quantisation { bits, block, zero_points, int8 })
}

/// Runs all kernels; returns their multiply-accumulate operations. x is the same when it is rounded to 8-bit integers, so the
/// bound is that of floating point, but for many rows on AMX, which rounds weights, too. (The module's own tests know to what.)
fn check(case: Case, threads: &[usize]) -> Vec<u64> {
    let linear = case.linear;
    let gates = linear.draw_gates();
    // The blocks of heads that are off, and the outputs of tokens without heads, must be exact.
    let exact = |i: usize| match linear.is_projection() {
        true => gates[i / linear.block] == 0.0,
        false if case.then != Then::Nothing => false,
        false => gates[i / linear.width * linear.heads..][..linear.heads].iter().all(|&gate| gate == 0.0),
    };
    println!("{case:?}");
    let (call, judge) = (case.call(), case.exact().call());
    let many = linear.batch * linear.q_len > 8;
    let judge = |kernel: &Kernel| if many && kernel.isa == "amx" { &call } else { &judge };
    support::check_as(&call, judge, threads, exact).iter().map(|work| work.macs).collect()
}

/// The case for both operators, of heads and tokens that blocks of `block` divide; what is done with the sums is not the same for all.
fn each(case: head_linear::Case, block: usize) -> impl Iterator<Item = Case> {
    let then = Then::linear(case.q_len).into_iter().cycle();
    let quantised = move |linear| {
        ways(block).zip(then.clone()).map(move |(quantisation, then)| Case { linear, quantisation, then })
    };
    [PROJECTION.operator, COMBINE.operator]
        .into_iter()
        .flat_map(move |operator| quantised(head_linear::Case { operator, ..case }))
}

prop_compose! {
    fn cases()(
        projection in any::<bool>(),
        bias in any::<bool>(),
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        q_len in prop_oneof![4 => 0usize..20, 2 => 20usize..120, 1 => 380usize..390],
        heads in 1usize..9,
        // A combination's heads have any part of a block: 1 to 5 sixteenths of it.
        sixteenths in 1usize..6,
        blocks in 1usize..5,
        other in prop_oneof![3 => 1usize..40, 1 => prop::sample::select(vec![64, 72, 96, 257])],
        bits in prop::sample::select(vec![4usize, 8]),
        block in prop::sample::select(vec![16usize, 32, 64, 128, 256]),
        flags in any::<(bool, bool)>(),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in prop_oneof![
            1 => Just(Gates::Off),
            1 => Just(Gates::On),
            3 => (0.02..0.98).prop_map(Gates::Random),
            2 => (0usize..6, 0.02..0.98).prop_map(|(n, p)| Gates::Shared(n, p)),
            1 => (0usize..6).prop_map(Gates::First),
        ],
        then in prop::sample::select(Then::linear(0).to_vec()),
        seed in any::<u64>(),
    ) -> Case {
        let quantisation = Quantisation { bits, block, zero_points: flags.0, int8: flags.1 };
        let base = if projection { PROJECTION } else { COMBINE };
        let (heads, of_head, width) = match projection {
            true => (heads, other, blocks * block),
            // 16 heads of a sixteenth are a block.
            false if heads.is_multiple_of(2) => (16, sixteenths * block / 16, other),
            false => (heads, blocks * block, other),
        };
        let linear = head_linear::Case { batch, q_len, heads, block: of_head, width, bias, dtype, gates, seed, ..base };
        Case { linear, quantisation, then }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn linear_kernels_equal_the_reference(case in cases()) {
        check(case, &[1, 2, 3]);
    }
}

#[test]
fn all_numbers_of_rows() {
    for q_len in (1..=18).chain([47, 48, 49, 384, 385]) {
        for case in each(head_linear::Case { q_len, heads: 4, block: 16, width: 64, bias: true, ..PROJECTION }, 32) {
            check(case, &[1, 3]);
        }
    }
}

#[test]
fn all_block_sizes_and_types() {
    for block in [16, 32, 64, 128, 256] {
        for (q_len, dtype) in [(1, DType::F32), (3, DType::F16), (20, DType::BF16)] {
            let case = head_linear::Case { q_len, dtype, heads: 3, block, width: 3 * block, bias: true, ..PROJECTION };
            for case in each(case, block) {
                check(case, &[2]);
            }
        }
    }
}

/// Weights of odd numbers of columns: threads get odd numbers of them, and begin at others.
#[test]
fn threads_do_not_change_the_result() {
    for q_len in [1, 2, 3, 4, 5, 7] {
        let projection = head_linear::Case { q_len, heads: 5, block: 15, width: 256, ..PROJECTION };
        let combine = head_linear::Case { q_len, heads: 4, block: 64, width: 75, ..COMBINE };
        for linear in [projection, combine] {
            for quantisation in ways(32) {
                check(Case { linear, quantisation, then: Then::Residual }, &[1, 2, 3, 4, 5]);
            }
        }
    }
}

/// Blocks of 64 over heads of 24 and of 40: a block belongs to up to four heads.
#[test]
fn blocks_of_several_heads() {
    for (q_len, block) in [(1, 24), (2, 40), (9, 24), (50, 40)] {
        for quantisation in ways(64) {
            let linear = head_linear::Case { q_len, heads: 8, block, width: 37, bias: true, ..COMBINE };
            check(Case { linear, quantisation, then: Then::Nothing }, &[1, 2]);
        }
    }
}

#[test]
fn empty_batches_and_sequences_do_no_work() {
    for (batch, q_len) in [(0, 3), (3, 0), (0, 0)] {
        let case = head_linear::Case { batch, q_len, heads: 4, block: 16, width: 32, bias: true, ..PROJECTION };
        for case in each(case, 32) {
            assert!(check(case, &[1, 2]).iter().all(|&macs| macs == 0));
        }
    }
}

/// Dense layers, with all that can be done with their sums: a few rows, several work items, and more rows than are converted at a time.
#[test]
fn dense_layers() {
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    for (j, (rows, out_width, len)) in
        [(1, 13, 1), (5, 1100, 5), (70, 301, 35), (2051, 40, 293)].into_iter().enumerate()
    {
        for (i, then) in Then::all(len).into_iter().enumerate() {
            for (k, quantisation) in ways(32).enumerate() {
                let (bias, dtype) = ((i + k) % 2 == 0, dtypes[(i + j + k) % 3]);
                let seed = 7;
                let case = LinearCase { rows, width: 96, out_width, bias, then, dtype, seed, quantisation };
                println!("{case:?}");
                let exact = LinearCase { quantisation: Quantisation { int8: false, ..quantisation }, ..case };
                let (call, judge) = (case.call(), exact.call());
                let judge = |kernel: &Kernel| if rows > 8 && kernel.isa == "amx" { &call } else { &judge };
                support::check_as(&call, judge, &[1, 3], |_| false);
            }
        }
    }
}

/// The multiply-accumulate operations of all kernels.
fn macs(case: &Case) -> Vec<usize> {
    let call = case.call();
    let len = call.expected().len();
    let run = |kernel| support::run(&call, kernel, len, &Threads::new(2)).unwrap().1.macs as usize;
    kernels_of(call.operator()).map(run).collect()
}

/// Heads of whole vectors: work is that of the heads that are on, up to the padding of register tiles. Few rows of a combination
/// are multiplied with the heads that any of them uses.
#[test]
fn macs_match_the_gates() {
    const HEAD: usize = 128;
    for q_len in [1, 4, 33] {
        for p in [0.0, 0.1, 0.5, 1.0] {
            let gates = Gates::Random(p);
            let linear = head_linear::Case { q_len, heads: 6, block: HEAD, width: 64, gates, ..PROJECTION };
            let gates = linear.draw_gates();
            let on = gates.iter().filter(|&&gate| gate != 0.0).count();
            let rows = |head: usize| gates.iter().skip(head).step_by(6).filter(|gate| **gate != 0.0).count();
            let of_any = (0..6).filter(|head| rows(*head) > 0).count();
            // AMX fills whole tiles, of up to twice the columns of a work item.
            let tiles: usize = (0..6).map(|head| rows(head).next_multiple_of(16)).sum();
            for case in each(linear, 32) {
                let few = q_len <= 8 && !case.linear.is_projection();
                let least = on * HEAD * 64;
                for (kernel, macs) in kernels_of(case.call().operator()).zip(macs(&case)) {
                    let most = match kernel.isa {
                        _ if few => q_len * of_any,
                        "amx" => 2 * tiles,
                        _ => 2 * on,
                    } * HEAD
                        * 64;
                    assert!((least..=most).contains(&macs), "{kernel:?}, {case:?}: {macs} not in {least}..={most}");
                }
            }
        }
    }
}

#[test]
fn heads_used_by_no_token_do_no_work() {
    for q_len in [1, 7, 70] {
        let few = head_linear::Case { q_len, heads: 8, block: 64, width: 64, gates: Gates::First(8), ..PROJECTION };
        let many = head_linear::Case { heads: 64, ..few };
        for (few, many) in each(few, 32).zip(each(many, 32)) {
            let found = check(few, &[2]);
            assert_eq!(found, check(many, &[2]), "{few:?}");
            assert!(found.iter().all(|&macs| macs > 0));
        }
    }
}

/// x of all tokens in float32 would take 8 MiB.
#[test]
fn memory_is_released_and_does_not_grow_with_the_tokens() {
    let linear = head_linear::Case { q_len: 16384, heads: 4, block: 32, width: 128, ..PROJECTION };
    for case in each(linear, 32).filter(|case| !case.quantisation.zero_points) {
        let call = case.call();
        for kernel in kernels_of(call.operator()) {
            let host = Accounts::new(4 << 20);
            support::run(&call, kernel, 16384 * 128, &host).unwrap();
            assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
            assert!(host.peak.load(Ordering::SeqCst) > 0, "{kernel:?} must use the host's memory");
        }
    }
}

#[test]
fn failed_allocation_returns_an_error() {
    for case in each(head_linear::Case { q_len: 40, heads: 4, block: 64, width: 64, ..PROJECTION }, 32) {
        let call = case.call();
        let len = call.expected().len();
        for kernel in kernels_of(call.operator()) {
            for limit in [0, 1000, 2000] {
                let host = Accounts::new(limit);
                let error = support::run(&call, kernel, len, &host).err();
                assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{kernel:?} {limit}: {error:?}");
                assert_eq!(host.outstanding.load(Ordering::SeqCst), 0, "{kernel:?}");
            }
        }
    }
}

/// A case of RoutedMLPNBits, with activations that are rounded or not.
fn check_mlp(case: &MlpCase, threads: &[usize]) -> Vec<u64> {
    let mlp = &case.mlp;
    let gates = mlp.draw_gates();
    let unused = |i: usize| gates[i / mlp.out_width * mlp.experts..][..mlp.experts].iter().all(|&gate| gate == 0.0);
    println!("{case:?}");
    support::check(&case.call(), threads, unused).iter().map(|work| work.macs).collect()
}

prop_compose! {
    fn mlps()(
        batch in prop_oneof![1 => Just(0usize), 6 => Just(1), 3 => 2usize..4],
        q_len in prop_oneof![4 => 0usize..20, 2 => 20usize..80],
        experts in 1usize..7,
        blocks in (1usize..4, 1usize..4),
        out_width in prop_oneof![3 => 1usize..40, 1 => prop::sample::select(vec![48, 64, 65, 128])],
        block in prop::sample::select(vec![16usize, 32, 64]),
        bits in prop::sample::select(vec![4usize, 8]),
        flags in any::<(bool, bool, bool)>(),
        activation in prop::sample::select(Activation::ALL.to_vec()),
        dtype in prop_oneof![3 => Just(DType::F32), 1 => Just(DType::F16), 1 => Just(DType::BF16)],
        gates in prop_oneof![
            1 => Just(routed_mlp::Gates::Off),
            1 => Just(routed_mlp::Gates::On),
            3 => (0usize..6).prop_map(routed_mlp::Gates::TopK),
        ],
        seed in any::<u64>(),
    ) -> MlpCase {
        let (width, hidden) = (blocks.0 * block, blocks.1 * block);
        let (bias, zero_points, int8) = flags;
        MlpCase {
            mlp: routed_mlp::Case { batch, q_len, experts, width, hidden, out_width, activation, bias, dtype, gates, seed },
            quantisation: Quantisation { bits, block, zero_points, int8 },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mlp_kernels_equal_the_reference(case in mlps()) {
        check_mlp(&case, &[1, 2, 3]);
    }
}

#[test]
fn mlp_macs_match_the_gates() {
    for q_len in [1, 4, 33] {
        for top_k in [0, 1, 2, 6] {
            let gates = routed_mlp::Gates::TopK(top_k);
            let mlp =
                routed_mlp::Case { q_len, experts: 6, width: 64, hidden: 64, out_width: 64, gates, ..routed_mlp::CASE };
            let least = q_len * top_k * 2 * 64 * 64;
            for macs in check_mlp(&MlpCase { mlp, quantisation: FOUR }, &[2]) {
                assert!((least..=2 * least).contains(&(macs as usize)), "{mlp:?}: {macs} for {least}");
            }
        }
    }
}

#[test]
fn mlp_inputs_larger_than_a_tile() {
    let all = routed_mlp::Gates::On;
    let wide = routed_mlp::Case { q_len: 300, width: 16, hidden: 16384, out_width: 3, gates: all, ..routed_mlp::CASE };
    let long = routed_mlp::Case { q_len: 9000, width: 16, hidden: 16, out_width: 3, ..routed_mlp::CASE };
    let quantisation = Quantisation { block: 16, ..FOUR };
    for mlp in [wide, long] {
        check_mlp(&MlpCase { mlp: routed_mlp::Case { bias: false, ..mlp }, quantisation }, &[1, 3]);
    }
}

/// Many roundings, without a fused multiply-add on the portable path.
#[test]
fn long_sums_of_eight_bits() {
    let quantisation = Quantisation { bits: 8, block: 128, zero_points: false, int8: false };
    let linear =
        head_linear::Case { q_len: 20, heads: 1, block: 512, width: 96, gates: Gates::Shared(1, 0.02), ..COMBINE };
    for seed in [13626819532647452531, 1, 2, 3] {
        let linear = head_linear::Case { seed, ..linear };
        check(Case { linear, quantisation, then: Then::Nothing }, &[1]);
    }
}
