//! The CUDA kernels of Linear and LinearActivation against the f64 reference, on a GPU or on the emulator.

use crate::device::{A100, Device, compare, emulator, on_device, rerun_on_other_gpu, rerun_with};
use moh_conformance::Buffer;
use moh_conformance::linear::{Case, Then};
use moh_cuda::cublaslt::CUBLASLT_VARIABLE;
use moh_operators::DType;
use moh_operators::routed_mlp::Activation;

const CASE: Case =
    Case { rows: 5, width: 96, out_width: 40, bias: true, then: Then::Nothing, dtype: DType::F16, seed: 5 };

/// Every number of rows that has kernels of its own, in all types; outputs of no multiple of a tile, nor of 16 bytes.
#[test]
fn all_numbers_of_rows_and_widths() {
    on_device(|device| {
        for rows in [0, 1, 33, 70] {
            for (j, dtype) in DType::ALL.into_iter().enumerate() {
                for (k, (width, out_width)) in [(96, 40), (271, 13), (160, 136)].into_iter().enumerate() {
                    let case = Case { rows, width, out_width, bias: (j + k) % 2 == 0, dtype, ..CASE };
                    println!("{case:?}");
                    device.check(&case.call(), |_| false);
                }
            }
        }
    });
}

/// Whatever is done with the sums, in all types; outputs of no multiple of 16 bytes.
#[test]
fn what_becomes_of_the_sums() {
    on_device(|device| {
        for (i, then) in Then::all(7).into_iter().enumerate() {
            for (j, dtype) in DType::ALL.into_iter().enumerate() {
                for (k, (rows, out_width)) in [(42, 40), (7, 301)].into_iter().enumerate() {
                    let case = Case { rows, out_width, then, dtype, bias: (i + j + k) % 2 == 0, ..CASE };
                    println!("{case:?}");
                    device.check(&case.call(), |_| false);
                }
            }
        }
    });
}

/// Sums that float16 has no room for, where what follows them makes a finite number.
#[test]
fn sums_beyond_the_range_of_float16() {
    const WIDTH: usize = 64;
    on_device(|device| {
        let activations = Activation::ALL.iter().filter(|activation| activation.columns() == 1);
        let activations = activations.map(|&activation| Then::Activation(activation));
        for then in activations.chain([Then::Gate]) {
            for (dtype, rows, out_width) in
                DType::ALL.into_iter().flat_map(|dtype| [(dtype, 3, 40), (dtype, 70, 40), (dtype, 70, 13)])
            {
                let case = Case { rows, width: WIDTH, out_width, bias: false, then, dtype, ..CASE };
                println!("{case:?}");
                let mut call = case.call();
                // -80000 in every second column, beside 250.
                let weight = |i: usize| if (i % out_width).is_multiple_of(2) { -5.0 } else { 1.0 / 64.0 };
                call.inputs[0].1 = Buffer::new(dtype, &vec![250.0; rows * WIDTH]);
                call.inputs[1].1 = Buffer::new(dtype, &(0..WIDTH * out_width).map(weight).collect::<Vec<_>>());
                if then == Then::Gate {
                    call.inputs[3].1 = Buffer::new(dtype, &vec![0.0; rows * out_width]);
                }
                device.check(&call, |_| false);
            }
        }
    });
}

/// Several tiles, of which Hopper multiplies two in a cluster: one below the other, and side by side.
#[test]
fn many_rows() {
    on_device(|device| {
        for (rows, out_width, dtype) in [(300, 136, DType::F16), (530, 256, DType::BF16), (200, 384, DType::F32)] {
            let case = Case { rows, out_width, dtype, bias: rows == 300, ..CASE };
            println!("{case:?}");
            device.check(&case.call(), |_| false);
        }
    });
}

/// The kernels for GPUs before Hopper.
#[test]
fn rerun_with_kernels_for_older_gpus() {
    rerun_on_other_gpu(&A100, &["linear::all_numbers", "linear::sums_beyond", "linear::many_rows"]);
}

/// Products by cuBLASLt, or what stands for it on the emulator, which has no way for some of them. On a GPU, where the library is, only who
/// starts the tests knows: `ci/gpu.sh` names it.
#[test]
fn rerun_with_cublaslt() {
    let Some(driver) = Device::get().filter(|device| device.emulated).map(|_| emulator().unwrap()) else { return };
    if std::env::var_os(CUBLASLT_VARIABLE).is_some() {
        return;
    }
    let log = std::env::temp_dir().join(format!("moh-products-{}", std::process::id()));
    let tests = [
        "linear::all_numbers",
        "linear::what_becomes",
        "linear::sums_beyond",
        "linear::many_rows",
        "linear::in_a_graph",
        "linear::a_residual",
    ];
    let variables = [(CUBLASLT_VARIABLE, driver.as_os_str()), ("MOH_EMULATOR_LOG", log.as_os_str())];
    rerun_with(&variables, &tests);
    let logged = std::fs::read_to_string(&log).unwrap();
    std::fs::remove_file(&log).unwrap();
    for epilogue in ["1", "1_added", "2", "4", "4_added", "6", "32", "36"] {
        assert!(
            logged.contains(&format!("cublasLtMatmul_{epilogue}\t")),
            "no product with epilogue {epilogue}: {logged}"
        );
    }
    for kernel in ["moh_linear_epilogue", "moh_projection"] {
        assert!(logged.contains(kernel), "{kernel} did not run: {logged}");
    }
}

/// The gate is left out where it stands in for none, the bias as well.
#[test]
fn a_residual_without_gate() {
    on_device(|device| {
        for dtype in DType::ALL {
            for (bias, left_out) in [(true, [false, true]), (false, [true, true])] {
                let call = Case { rows: 42, bias, then: Then::Residual, dtype, ..CASE }.call();
                let found = device.run_without(&call, |input| matches!(input, 2 | 3) && left_out[input - 2]);
                compare(dtype, &found.unwrap(), &call.expected(), |_| false);
            }
        }
    });
}

/// A graph multiplies what is in its memory when it is launched.
#[test]
fn in_a_graph() {
    on_device(|device| {
        for then in [Then::Nothing, Then::SharedGate(7), Then::Residual, Then::Activation(Activation::GeluTanh)] {
            let case = Case { rows: 42, then, ..CASE };
            let (call, later) = (case.call(), Case { seed: 6, ..case }.call());
            let found = device.run_captured(&call, &later).unwrap();
            compare(call.output_dtype(), &found, &later.expected(), |_| false);
        }
    });
}

/// Layers of published models, which would take long on the emulator.
#[test]
fn model_sizes_on_a_gpu() {
    on_device(|device| {
        if device.emulated {
            return println!("SKIPPED: too large for the emulator");
        }
        for (rows, width, out_width, dtype) in
            [(512, 1152, 4608, DType::F16), (512, 4608, 1152, DType::BF16), (512, 1152, 1152, DType::F32)]
        {
            for then in [Then::Nothing, Then::SharedGate(256), Then::Activation(Activation::GeluTanh)] {
                device.check(&Case { rows, width, out_width, then, dtype, ..CASE }.call(), |_| false);
            }
        }
    });
}
