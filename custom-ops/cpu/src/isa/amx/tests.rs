//! Kernels on AMX, which is emulated where the processor lacks it.

#![allow(clippy::unwrap_used)]

use super::emulator::emulate;
use crate::isa::Isa;
use crate::isa::avx512::Avx512;
use crate::{Host, Input, Kernel, Packed, Packing, Precision, Threads, Work};
use moh_conformance::head_linear::{self, COMBINE, PROJECTION};
use moh_conformance::linear::{self, Then};
use moh_conformance::nbits::{self, MlpCase, Quantisation};
use moh_conformance::routed_attention::{Case, Gates, Mask};
use moh_conformance::routed_mlp;
use moh_conformance::{Buffer, Call, examples};
use moh_operators::{DType, Definition, Linear, OPERATORS, RoutedAttention, RoutedCombine, tolerance};
use std::ptr::NonNull;

fn output(call: &Call, kernel: &Kernel, len: usize) -> (Vec<f64>, Work) {
    let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
    let mut output = Buffer::unwritten(call.output_dtype(), len);
    let work = kernel.run(&call.attributes, &inputs, output.data_mut(), &Threads::new(2)).unwrap();
    (output.values(&kernel), work)
}

#[test]
fn kernels_are_found_only_where_amx_is_emulated() {
    let found = || crate::select(RoutedAttention::OPERATOR, Some("amx")).is_some();
    if Avx512::detect().is_none() {
        return;
    }
    let here = found();
    let emulated = emulate();
    assert!(found());
    let elsewhere = || std::thread::scope(|scope| scope.spawn(found).join().unwrap());
    assert_eq!(elsewhere(), here);
    drop(emulated);
    assert_eq!(found(), here);
}

#[test]
fn operators_equal_the_reference_on_their_examples() {
    let _emulated = emulate();
    for operator in OPERATORS {
        let Some(kernel) = crate::select(operator, Some("amx")) else { continue };
        for call in DType::ALL.into_iter().flat_map(|dtype| examples(operator, dtype)) {
            let expected = call.expected();
            let (found, _) = output(&call, kernel, expected.len());
            call.compare(&format!("{kernel:?}"), &found, &expected, |i| expected[i] == 0.0);
        }
    }
}

/// Dense layers whose weight was packed: few rows, many, and inner indices and columns that fill tiles and do not. Many rows are multiplied as without
/// packing; few on the unit as well.
#[test]
fn dense_layers_with_packed_weights() {
    let _emulated = emulate();
    let Some(kernel) = crate::select(Linear::OPERATOR, Some("amx")) else { return };
    for (rows, width, out_width) in
        [(1, 64, 32), (3, 300, 70), (8, 129, 45), (5, 513, 301), (9, 300, 70), (70, 129, 96)]
    {
        let then = if rows == 8 { Then::Gate } else { Then::Nothing };
        let call = linear::Case { rows, width, out_width, bias: rows != 9, then, dtype: DType::F32, seed: 3 }.call();
        let (expected, tensors) = (call.expected(), call.tensors());
        for (name, precision) in Precision::NAMES {
            let packing = Packing { precision, beside: true, all: false };
            let packed = kernel.pack(&call.attributes, 1, tensors[1].unwrap(), packing).unwrap().unwrap();
            let of_inputs = |packed: Option<&Packed>, poison: Option<f32>| {
                let mut call = call.clone();
                poison.into_iter().for_each(|poison| call.inputs[0].1.numbers_mut()[0] = poison);
                let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
                if let Some(packed) = packed {
                    inputs[1] = Some(Input::Both(call.tensors()[1].unwrap(), packed));
                }
                let mut output = Buffer::unwritten(call.output_dtype(), expected.len());
                let host = AtPrecision(Threads::new(2), precision);
                kernel.run(&call.attributes, &inputs, output.data_mut(), &host).unwrap();
                output.values(&kernel)
            };
            let (plain, found) = (of_inputs(None, None), of_inputs(Some(&packed), None));
            let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            let error =
                |found: &[f64]| found.iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) / largest;
            let (least, most) = match precision {
                Precision::Highest => (0.0, 2e-6),
                Precision::High => (1e-7, 2e-4),
                Precision::Medium => (1e-5, 1e-2),
            };
            assert!((least..most).contains(&error(&found)), "{rows} rows at {name}: {}", error(&found));
            if rows > 8 {
                assert!(plain == found, "{rows} rows at {name}");
            }
            for poison in [f32::NEG_INFINITY, f32::NAN, 3.0e38] {
                let classes = |found: Vec<f64>| found.into_iter().map(|x| (x as f32).is_finite()).collect::<Vec<_>>();
                let [plain, found] = [None, Some(&packed)].map(|packed| classes(of_inputs(packed, Some(poison))));
                assert_eq!(plain, found, "{rows} rows at {name}, {poison}");
            }
        }
    }
}

/// Projections whose weight was packed: heads that begin and end inside of tiles, numbers that no head reads and that are not finite, few tokens and
/// many. Workers that split all rows of x give the same results as those that split the rows of their heads.
#[test]
fn routed_projections_with_packed_weights() {
    let _emulated = emulate();
    let shapes =
        [(3, 72, 96, 70), (5, 24, 40, 100), (6, 64, 64, 80), (2, 32, 130, 3), (9, 8, 33, 130), (4, 100, 20, 1)];
    for (heads, block, width, q_len) in shapes {
        let gates = if q_len > 3 { head_linear::Gates::Shared(1, 0.6) } else { head_linear::Gates::On };
        for case in head_linear::each(head_linear::Case { q_len, heads, block, width, gates, bias: true, ..PROJECTION })
        {
            let Some(kernel) = crate::select(case.operator, Some("amx")) else { return };
            let vectors = crate::select(case.operator, Some("avx512")).unwrap();
            let call = case.call();
            let (expected, tensors) = (call.expected(), call.tensors());
            for (name, precision) in Precision::NAMES {
                let packing = Packing { precision, beside: true, all: false };
                let packed = kernel.pack(&call.attributes, 1, tensors[1].unwrap(), packing).unwrap();
                // A head that no token uses has a weight that is not finite.
                let apart = case.is_projection() && case.per_head && block % 32 != 0;
                assert_eq!(packed.is_none(), apart || !tensors_are_finite(&call), "{case:?}");
                let Some(packed) = packed else { continue };
                let run = |kernel: &Kernel, threads: usize| {
                    let mut inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
                    inputs[1] = Some(Input::Both(call.tensors()[1].unwrap(), &packed));
                    let mut output = Buffer::unwritten(call.output_dtype(), expected.len());
                    let host = AtPrecision(Threads::new(threads), precision);
                    let work = kernel.run(&call.attributes, &inputs, output.data_mut(), &host).unwrap();
                    (output.values(kernel), work.macs)
                };
                let (found, macs) = run(kernel, 1);
                assert!(found == run(kernel, 20).0, "{case:?} at {name}: workers change the result");
                let vectors = run(vectors, 1).1;
                assert_ne!(macs, vectors, "{case:?} at {name}: tiles have 16 rows");
                let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
                let errors = found.iter().zip(&expected).map(|(x, y)| (x - y).abs());
                let most = match precision {
                    Precision::Highest => 2e-6,
                    Precision::High => 2e-4,
                    Precision::Medium => 1e-2,
                };
                let error = errors.fold(0.0, f64::max) / largest;
                assert!(error < most, "{case:?} at {name}: {error}");
                assert!(found.iter().zip(&expected).all(|(x, y)| *y != 0.0 || *x == 0.0), "{case:?} at {name}");
            }
        }
    }
}

/// A head whose weights are smaller by orders of magnitude than those of the head beside it, which its tokens do not use, keeps its bits: such a weight is
/// not packed. A head that is pruned has none to lose.
#[test]
fn heads_of_other_magnitudes_are_not_packed() {
    let _emulated = emulate();
    let Some(kernel) = crate::select(RoutedCombine::OPERATOR, Some("amx")) else { return };
    for (times, precision, is_packed) in [
        (1.0, Precision::Highest, true),
        (0.0, Precision::Highest, true),
        (1e-1, Precision::Highest, true),
        (1e-4, Precision::Highest, false),
        (1e8, Precision::Highest, false),
        (1e-1, Precision::High, true),
        (1e-2, Precision::High, false),
        (1e8, Precision::Medium, true),
    ] {
        for per_head in [false, true] {
            let case = head_linear::Case { heads: 2, block: 64, width: 32, q_len: 70, per_head, ..COMBINE };
            let mut call = head_linear::Case { gates: head_linear::Gates::On, ..case }.call();
            // In either layout some numbers of the first head, of every column.
            let stride = if per_head { 1 } else { 128 };
            let (rows, len) = if per_head { (1, 64 * 32) } else { (32, 64) };
            let weight = call.inputs[1].1.numbers_mut();
            (0..rows).flat_map(|row| row * stride..row * stride + len).for_each(|i| weight[i] *= times);
            let packing = Packing { precision, beside: true, all: false };
            let packed = kernel.pack(&call.attributes, 1, call.tensors()[1].unwrap(), packing).unwrap();
            assert_eq!(packed.is_some(), is_packed, "{times} at {}, per head: {per_head}", precision.name());
        }
    }
}

/// Whether the weight is finite.
fn tensors_are_finite(call: &Call) -> bool {
    call.inputs[1].1.values(&"weight").iter().all(|x| x.is_finite())
}

/// Threads at a precision.
struct AtPrecision(Threads, Precision);

// SAFETY: memory comes from `Threads`.
unsafe impl Host for AtPrecision {
    fn parallelism(&self) -> usize {
        self.0.parallelism()
    }
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        self.0.parallel_for(tasks, task);
    }
    fn precision(&self) -> Precision {
        self.1
    }
    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        self.0.allocate(bytes)
    }
    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.0.release(ptr, bytes) }
    }
}

/// float32 in three terms, two, and rounded: the error is the precision's, and a number that cannot be rounded is not.
#[test]
fn attention_has_the_errors_of_the_precision() {
    let _emulated = emulate();
    let Some(kernel) = crate::select(RoutedAttention::OPERATOR, Some("amx")) else { return };
    for (head_dim, value_dim, is_causal) in [(64, 64, false), (72, 40, true)] {
        let sizes = Case { q_len: 100, kv_len: 130, head_dim, value_dim, is_causal, ..Case::default() };
        let mut call = Case { gates: Gates::Random(0.8), seed: 5, ..sizes }.draw().call();
        let of = |call: &Call, precision| {
            let inputs: Vec<_> = call.tensors().into_iter().map(|tensor| tensor.map(Input::from)).collect();
            let mut output = Buffer::unwritten(call.output_dtype(), call.expected().len());
            let host = AtPrecision(Threads::new(2), precision);
            kernel.run(&call.attributes, &inputs, output.data_mut(), &host).unwrap();
            output.values(&kernel)
        };
        let expected = call.expected();
        let rms = |numbers: &[f64]| (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt();
        for (precision, least, most) in
            [(Precision::Highest, 0.0, 1e-6), (Precision::High, 2e-6, 1e-4), (Precision::Medium, 5e-4, 5e-3)]
        {
            let differences: Vec<_> = of(&call, precision).iter().zip(&expected).map(|(x, y)| x - y).collect();
            let error = rms(&differences) / rms(&expected);
            assert!((least..most).contains(&error), "width {head_dim} at {}: {error}", precision.name());
        }
        call.inputs[2].1.numbers_mut()[0] = 3.4e38;
        for (name, precision) in Precision::NAMES {
            assert!(of(&call, precision).iter().all(|x| x.is_finite()), "width {head_dim} at {name}");
        }
    }
}

/// Rows and widths that fill tiles and do not, terms of every type, and enough rows for three of them.
#[test]
fn attention_equals_the_reference() {
    let _emulated = emulate();
    let Some(kernel) = crate::select(RoutedAttention::OPERATOR, Some("amx")) else { return };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (case, (q_len, kv_len)) in [(70, 90), (33, 130), (150, 20)].into_iter().enumerate() {
            let (head_dim, value_dim) = [(64, 64), (40, 72), (17, 33)][case];
            let bias = [None, Some(([true, true, false, true], Mask::Some)), None][case];
            let (is_causal, gates) = (case == 2, [Gates::On, Gates::Random(0.7), Gates::TopK(2)][case]);
            let sizes = Case { q_len, kv_len, kv_num_heads: 2, group_size: 2, head_dim, value_dim, ..Case::default() };
            let numbers = Case { is_causal, gates, dtype, bias, seed: 7 + case as u64, ..sizes }.draw();
            let expected = numbers.call().expected();
            let (found, _) = output(&numbers.call(), kernel, expected.len());
            let rounding = if dtype == DType::BF16 { tolerance::MATRIX_UNIT_BF16 } else { 0.0 };
            numbers.compare(kernel, &found, &expected, rounding);
        }
    }
}

/// Activations that may be rounded: the operators' results on AMX are near the reference, for half to twice the work of vectors with its
/// padding.
#[test]
fn quantised_operators_do_the_work_of_vectors() {
    let _emulated = emulate();
    for (bits, block, zero_points) in [(4, 32, false), (4, 64, true), (8, 32, true), (8, 128, false)] {
        let quantisation = Quantisation { bits, block, zero_points, int8: true };
        let gates = head_linear::Gates::Random(0.6);
        let linear = |case| head_linear::Case { q_len: 45, heads: 5, block: 128, width: 256, gates, ..case };
        let then = if zero_points { Then::SharedGate(45) } else { Then::Nothing };
        let linear = [PROJECTION, COMBINE].map(|case| nbits::Case { linear: linear(case), quantisation, then }.call());
        let gates = routed_mlp::Gates::TopK(2);
        let mlp = routed_mlp::Case { q_len: 60, experts: 4, width: 256, hidden: 128, gates, ..routed_mlp::CASE };
        for call in linear.into_iter().chain([MlpCase { mlp, quantisation }.call()]) {
            let Some(tiles) = crate::select(call.operator(), Some("amx")) else { return };
            let vectors = crate::select(call.operator(), Some("avx512")).unwrap();
            let expected = call.expected();
            let [(found, work), (_, least)] = [tiles, vectors].map(|kernel| output(&call, kernel, expected.len()));
            call.compare(&"amx", &found, &expected, |i| expected[i] == 0.0);
            assert!(
                (least.macs / 2..=2 * least.macs).contains(&work.macs),
                "{:?}: {work:?}, {least:?}",
                call.attributes
            );
        }
    }
}
