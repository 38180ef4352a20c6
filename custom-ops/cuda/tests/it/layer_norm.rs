//! The CUDA kernels of LayerNorm against the f64 reference, on a GPU or on the emulator.

use crate::device::{compare, on_device};
use moh_conformance::layer_norm::{CASE, Case, Modulation};
use moh_operators::DType;

/// Rows that fill no warp's chunks, that fill what a warp keeps, and longer ones; with and without chunks of 16 bytes.
#[test]
fn all_widths() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (i, width) in [1, 31, 40, 162, 640, 648, 1152, 1280, 1288, 1301, 2600].into_iter().enumerate() {
                let (modulation, bias) = (Modulation::ALL[i % 4], i % 3 == 0);
                let case = Case { rows: [2, 3], width, modulation, bias, dtype, ..CASE };
                println!("{case:?}");
                device.check(&case.call(), |_| false);
            }
        }
    });
}

/// Blocks have rows of several sequences, and the last one has fewer.
#[test]
fn rows_have_the_modulation_of_their_sequence() {
    on_device(|device| {
        for modulation in Modulation::ALL {
            for rows in [[3, 7], [0, 5], [9, 1]] {
                device.check(&Case { rows, modulation, dtype: DType::F16, ..CASE }.call(), |_| false);
            }
        }
    });
}

/// Operands that are absent, as where a model's constants stand in for them.
#[test]
fn a_modulation_without_bias() {
    on_device(|device| {
        for dtype in DType::ALL {
            let call = Case { bias: false, dtype, ..CASE }.call();
            let found = device.run_without(&call, |input| input == 2).unwrap();
            compare(dtype, &found, &call.expected(), |_| false);
        }
    });
}
