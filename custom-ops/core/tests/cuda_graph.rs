//! Calls captured in CUDA graphs: nothing waits, allocates or loads, and the gates of the launch count, not those of the capture.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
#[path = "support/aggregated.rs"]
mod aggregated;
#[allow(dead_code)]
#[path = "support/call.rs"]
mod call;
#[allow(dead_code)]
#[path = "support/data.rs"]
mod data;
#[allow(dead_code)]
#[path = "support/device.rs"]
mod device;
#[allow(dead_code)]
#[path = "support/linear.rs"]
mod linear;
#[allow(dead_code)]
#[path = "support/mlp.rs"]
mod mlp;
#[allow(dead_code)]
mod support;

use call::Call;
use device::{Device, compare};
use moh_kernels::cuda::stream::CAPABILITY_VARIABLE;
use moh_kernels::{Attributes, DType, Tensor};

/// Captures the first call, and launches it on the inputs of the second.
fn check(attributes: &Attributes, inputs: &[Option<Tensor<'_>>], later: &[Option<Tensor<'_>>]) {
    let Some(device) = Device::get() else { return };
    let found = device.run_captured(attributes, inputs, later).unwrap_or_else(|error| panic!("{error}"));
    let dtype = later.iter().flatten().next().map_or(DType::F32, |input| input.data.dtype());
    compare(dtype, &found, &(attributes.operator().reference)(attributes, later), |_| false);
}

fn check_calls(first: &Call, second: &Call) {
    check(&first.attributes, &first.tensors(), &second.tensors());
}

#[test]
fn attention() {
    for dtype in DType::ALL {
        // Decoding, and tiles.
        for (q_len, kv_len, bias) in [(1, 200, false), (70, 90, false), (70, 90, true)] {
            let bias = bias.then_some(([false, true, true, true], support::Mask::Some));
            let case = support::Case {
                q_len,
                kv_len,
                head_dim: 64,
                value_dim: 64,
                is_causal: true,
                dtype,
                bias,
                ..Default::default()
            };
            let first = support::Case { gates: support::Gates::Random(0.2), seed: 1, ..case };
            let second = support::Case { gates: support::Gates::Random(0.9), seed: 2, ..case };
            let (first_call, second_call) = (first.call(), second.call());
            first_call.with_inputs(|inputs| second_call.with_inputs(|later| check(&case.attributes(), inputs, later)));
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
                check_calls(&few.call(), &most.call());
                check_calls(&most.call(), &few.call());
            }
        }
    }
}

#[test]
fn mixtures_of_experts() {
    for dtype in DType::ALL {
        for q_len in [3, 80] {
            let case = mlp::Case { q_len, hidden: 136, out_width: 24, dtype, ..mlp::CASE };
            let first = mlp::Case { gates: mlp::Gates::TopK(1), seed: 1, ..case };
            check_calls(&first.call(), &mlp::Case { gates: mlp::Gates::TopK(2), seed: 2, ..case }.call());
        }
    }
}

#[test]
fn aggregated_attention() {
    for dtype in DType::ALL {
        let case = aggregated::Case { grid: [5, 4], dtype, ..aggregated::PLAIN };
        let second = aggregated::Case { seed: 9, ..case };
        check_calls(&case.call_with(&case.numbers()), &second.call_with(&second.numbers()));
    }
}

/// The kernels for GPUs before Hopper, in a process that is held to them.
#[test]
fn older_gpus() {
    if Device::get().is_none() || std::env::var_os(CAPABILITY_VARIABLE).is_some() {
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["attention", "projections_and_combinations", "mixtures_of_experts"])
        .env(CAPABILITY_VARIABLE, "80")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
