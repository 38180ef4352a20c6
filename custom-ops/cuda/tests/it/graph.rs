//! Calls captured in CUDA graphs: nothing waits, allocates or loads, and replays use the gates of the launch, not
//! those of the capture.

use crate::device::{A100, Device, compare, rerun_on_other_gpu};
use moh_conformance::{
    Call, aggregated_attention as aggregated, head_linear as linear, routed_attention, routed_mlp as mlp,
};
use moh_operators::DType;

/// Captures the first call and launches the graph with the inputs of the second.
fn check(first: &Call, second: &Call) {
    let Some(device) = Device::get() else { return };
    let found = device.run_captured(first, second).unwrap_or_else(|error| panic!("{error}"));
    compare(second.output_dtype(), &found, &second.expected(), |_| false);
}

#[test]
fn attention() {
    for dtype in DType::ALL {
        // Decoding, and tiled attention.
        for (q_len, kv_len, bias) in [(1, 200, false), (70, 90, false), (70, 90, true)] {
            let bias = bias.then_some(([false, true, true, true], routed_attention::Mask::Some));
            let case = routed_attention::Case {
                q_len,
                kv_len,
                head_dim: 64,
                value_dim: 64,
                is_causal: true,
                dtype,
                bias,
                ..Default::default()
            };
            let first = routed_attention::Case { gates: routed_attention::Gates::Random(0.2), seed: 1, ..case };
            let second = routed_attention::Case { gates: routed_attention::Gates::Random(0.9), seed: 2, ..case };
            check(&first.draw().call(), &second.draw().call());
        }
    }
}

#[test]
fn projections_and_combinations() {
    for dtype in DType::ALL {
        for q_len in [5, 150] {
            let case = linear::Case { q_len, block: 64, width: 72, bias: true, dtype, ..linear::PROJECTION };
            for case in linear::each(case) {
                let few = linear::Case { gates: linear::Gates::Random(0.1), seed: 1, ..case };
                let most = linear::Case { gates: linear::Gates::Shared(2, 0.9), seed: 2, ..case };
                check(&few.call(), &most.call());
                check(&most.call(), &few.call());
            }
        }
    }
}

#[test]
fn mixtures_of_experts() {
    for dtype in DType::ALL {
        for (q_len, hidden, out_width) in [(3, 136, 24), (80, 136, 24), (80, 264, 24), (64, 256, 520)] {
            let case = mlp::Case { q_len, hidden, out_width, dtype, ..mlp::CASE };
            let first = mlp::Case { gates: mlp::Gates::TopK(1), seed: 1, ..case };
            for second in [mlp::Gates::TopK(2), mlp::Gates::On] {
                let second = mlp::Case { gates: second, seed: 2, ..case };
                check(&first.call(), &second.call());
                check(&second.call(), &first.call());
            }
        }
    }
}

#[test]
fn aggregated_attention() {
    for dtype in DType::ALL {
        let case = aggregated::Case { grid: [5, 4], dtype, ..aggregated::PLAIN };
        let second = aggregated::Case { seed: 9, ..case };
        check(&case.call_with(&case.numbers()), &second.call_with(&second.numbers()));
    }
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    rerun_on_other_gpu(
        &A100,
        &["graph::attention", "graph::projections_and_combinations", "graph::mixtures_of_experts"],
    );
}
