//! Kernels on AMX, which is emulated where the processor lacks it.

#![allow(clippy::unwrap_used)]

use super::emulator::emulate;
use crate::isa::Isa;
use crate::isa::avx512::Avx512;
use crate::{Input, Kernel, Threads, Work};
use moh_conformance::head_linear::{self, COMBINE, PROJECTION};
use moh_conformance::nbits::{self, MlpCase, Quantisation};
use moh_conformance::routed_attention::{Case, Gates, Mask};
use moh_conformance::routed_mlp;
use moh_conformance::{Buffer, Call, examples};
use moh_operators::{DType, Definition, OPERATORS, RoutedAttention, tolerance};

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
        let linear = [PROJECTION, COMBINE].map(|case| nbits::Case { linear: linear(case), quantisation }.call());
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
