//! RoutedMLP's CUDA kernels, on a GPU or on the emulator of one, against the f64 reference.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

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
#[path = "support/mlp.rs"]
mod mlp;

use device::Device;
use mlp::{CASE, Case, Gates};
use moh_kernels::DType;
use moh_kernels::cuda::stream::CAPABILITY_VARIABLE;
use moh_kernels::shape::routed_mlp::Activation;

impl Case {
    fn check(&self, device: &Device) {
        println!("{self:?}");
        let gates = self.draw_gates();
        let unused =
            |i: usize| gates[i / self.out_width * self.experts..][..self.experts].iter().all(|&gate| gate == 0.0);
        let call = self.call();
        device.check(&call.attributes, &call.tensors(), unused);
    }
}

/// Runs `test` with the device, where there is one.
fn on_device(test: impl Fn(&Device)) {
    if let Some(device) = Device::get() {
        test(device);
    }
}

#[test]
fn numbers_of_rows_and_activations() {
    on_device(|device| {
        for (q_len, bias) in [(1, true), (17, false), (130, true)] {
            for activation in Activation::ALL {
                for dtype in DType::ALL {
                    let case = Case { q_len, activation, dtype, bias, experts: 3, gates: Gates::TopK(2), ..CASE };
                    case.check(device);
                    Case { width: 7, hidden: 9, out_width: 5, ..case }.check(device);
                }
            }
        }
    });
}

#[test]
fn widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (width, hidden, out_width) in [(64, 136, 64), (8, 16, 200), (130, 33, 70), (200, 64, 8)] {
                for activation in [Activation::Silu, Activation::SwiGlu] {
                    let case = Case { q_len: 19, width, hidden, out_width, activation, dtype, experts: 2, ..CASE };
                    case.check(device);
                }
            }
        }
    });
}

/// Tiles of Hopper's kernels, and those of GPUs before it in a process that is held to them.
#[test]
fn large_tiles() {
    on_device(|device| {
        for (i, activation) in Activation::ALL.into_iter().enumerate() {
            let dtype = [DType::F16, DType::BF16][i % 2];
            let case =
                Case { q_len: 150, width: 72, hidden: 136, out_width: 40, activation, dtype, experts: 3, ..CASE };
            Case { gates: Gates::TopK(2), bias: i % 2 == 0, seed: 4, ..case }.check(device);
            Case { q_len: 270, gates: Gates::First(1), bias: i % 2 == 1, seed: 5, ..case }.check(device);
        }
        if std::env::var_os(CAPABILITY_VARIABLE).is_some() {
            return;
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["large_tiles", "numbers_of_rows", "shares_of_experts"])
            .env(CAPABILITY_VARIABLE, "80")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    });
}

/// Few tokens and a long inner length, which several blocks share.
#[test]
fn few_tokens() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (q_len, hidden, out_width, bias) in [(1, 520, 136, true), (5, 1000, 24, false), (40, 513, 33, true)] {
                let case = Case { q_len, hidden, out_width, bias, dtype, experts: 4, seed: 6, ..CASE };
                Case { gates: Gates::TopK(2), ..case }.check(device);
                Case { gates: Gates::Off, ..case }.check(device);
            }
        }
    });
}

#[test]
fn shares_of_experts() {
    on_device(|device| {
        for dtype in DType::ALL {
            for gates in [Gates::Off, Gates::On, Gates::First(2), Gates::TopK(1), Gates::Random(0.5)] {
                Case { q_len: 70, experts: 5, hidden: 40, gates, dtype, seed: 2, ..CASE }.check(device);
            }
            Case { q_len: 33, experts: 40, gates: Gates::TopK(3), dtype, seed: 3, ..CASE }.check(device);
        }
    });
}

#[test]
fn batches() {
    on_device(|device| {
        for (batch, q_len) in [(0, 3), (3, 0), (3, 11)] {
            Case { batch, q_len, ..CASE }.check(device);
        }
    });
}

/// A large gate and a small one are factors of the whole, in float32.
#[test]
fn gates_of_any_size() {
    on_device(|device| {
        for factor in [1e30, 1e-30, -3.0] {
            let mut call = Case { q_len: 30, experts: 1, gates: Gates::On, ..CASE }.call();
            call.inputs[3].1 = data::Buffer::F32(vec![factor; 30]);
            let found = device.run(&call.attributes, &call.tensors()).unwrap();
            for (found, expected) in found.iter().zip(&call.expected()) {
                assert!((found - expected).abs() <= 4e-6 * f64::from(factor.abs()), "{expected}, found {found}");
            }
        }
    });
}

#[test]
fn a_nan_reaches_exactly_what_uses_it() {
    on_device(|device| {
        for q_len in [4, 40] {
            let case = Case { q_len, gates: Gates::TopK(2), activation: Activation::Silu, ..CASE };
            for input in [0, 1, 2, 4, 5] {
                let mut call = case.call();
                let data::Buffer::F32(numbers) = &mut call.inputs[input].1 else { panic!("not f32") };
                *numbers.iter_mut().rev().find(|x| x.is_finite()).expect("something is used") = f32::NAN;
                let finite = |x: &[f64]| x.iter().map(|x| x.is_finite()).collect::<Vec<_>>();
                let expected = call.expected();
                assert!(expected.iter().any(|x| !x.is_finite()), "the case must poison something");
                let found = device.run(&call.attributes, &call.tensors()).unwrap();
                assert_eq!(finite(&found), finite(&expected), "{case:?} input {input}");
            }
        }
    });
}

/// Results on a GPU at sizes that fill it.
#[test]
fn sizes_of_models() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for dtype in DType::ALL {
            for activation in [Activation::Gelu, Activation::SwiGlu] {
                let case = Case { q_len: 600, experts: 8, width: 512, hidden: 688, out_width: 512, ..CASE };
                Case { activation, dtype, gates: Gates::TopK(2), ..case }.check(device);
            }
        }
    });
}
