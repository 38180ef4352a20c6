//! Tests of the CUDA registrations with the fake host. `MOH_CUDA_DRIVER` must be the emulator, because the fake host's
//! tensors are in CPU memory.

#![allow(clippy::unwrap_used, clippy::panic)]

use crate::context::KernelInfo;
use crate::fake::{Call, Info, LOG, Node, Requests, Tensor, live, requests_of};
use crate::notice;
use crate::tests::{Example, Made, api, table_on};
use half::{bf16, f16};
use moh_operators::{DType, Data, Definition, OPERATORS, Operator, RoutedMlp, Value};
use ort_sys::OrtCustomOp;
use std::ffi::CStr;

/// Number of the attention's bias among the inputs.
const BIAS: usize = 4;
/// Number of the first bias among RoutedMLP's.
const FC1_BIAS: usize = 4;
const PROVIDER: Option<&CStr> = Some(c"CUDAExecutionProvider");

/// RoutedAttention on CUDA; `None` if no driver is configured.
fn table(dtype: DType) -> Option<&'static OrtCustomOp> {
    if std::env::var_os("MOH_CUDA_DRIVER").is_none() {
        println!("SKIPPED: MOH_CUDA_DRIVER does not name the emulator");
        return None;
    }
    let attention: &Operator = OPERATORS[0];
    Some(table_on(PROVIDER, attention, dtype).unwrap())
}

#[test]
fn nothing_is_registered_without_a_driver() {
    if let Err(error) = moh_cuda::Driver::get() {
        assert!(OPERATORS.iter().all(|operator| table_on(PROVIDER, operator, DType::F32).is_none()), "{error}");
    }
}

#[test]
fn call_computes_the_operator_on_the_stream() {
    let example = Example::new();
    let expected = example.expected();
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        let Some(op) = table(dtype) else { return };
        let kernel = Made::of(op, &example.sized(dtype)).unwrap();
        for default_stream in [false, true] {
            let mut call = example.call(dtype, 0);
            call.default_stream = default_stream;
            let found = kernel.run(&mut call).unwrap();
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * (1.0 + b.abs());
            assert!(
                found.len() == expected.len() && found.iter().zip(&expected).all(near),
                "{dtype} {found:?} {expected:?}"
            );
        }
    }
    assert_eq!(live(), 0);
}

/// 40 rows a KV head have a plan in the workspace; 6 rows, as in decoding, and few keys need none.
#[test]
fn a_call_has_one_block_of_workspace_or_none() {
    for (queries, blocks) in [(20, 1), (3, 0)] {
        let example = Example::of(queries);
        for dtype in DType::ALL {
            let Some(op) = table(dtype) else { return };
            let kernel = Made::of(op, &example.sized(dtype)).unwrap();
            for default_stream in [false, true] {
                let mut call = example.call(dtype, 0);
                call.default_stream = default_stream;
                let found = requests_of(usize::MAX, || _ = kernel.run(&mut call).unwrap());
                let scratch = if default_stream { 0 } else { blocks };
                assert_eq!(found, Requests { probes: blocks, scratch }, "{queries} queries, {dtype}");
            }
        }
    }
    assert_eq!(live(), 0);
}

#[test]
fn lack_of_device_memory_is_an_error() {
    let example = Example::of(20);
    let Some(op) = table(DType::F16) else { return };
    let kernel = Made::of(op, &example.sized(DType::F16)).unwrap();
    for default_stream in [false, true] {
        let mut call = example.call(DType::F16, 0);
        call.default_stream = default_stream;
        let found = requests_of(100, || {
            let (_, message) = kernel.run(&mut call).unwrap_err();
            assert!(message.contains("memory"), "{message}");
        });
        assert_eq!(found, Requests { probes: 1, scratch: 0 });
        // With memory, the same call succeeds.
        assert!(kernel.run(&mut call).is_ok());
    }
    drop(kernel);
    assert_eq!(live(), 0);
}

/// The zero that a model has for a bias because another node has one. What the call has in its place shows that it is not read.
#[test]
fn constants_that_change_nothing_are_not_read() {
    let (example, mut without) = (Example::new(), Example::new());
    without.fill(BIAS, 0.0);
    for dtype in DType::ALL {
        let Some(op) = table(dtype) else { return };
        let call = || example.call(dtype, 0);
        let expected = Made::of(op, &without.sized(dtype)).unwrap().run(&mut without.call(dtype, 0)).unwrap();
        for (constant, shape, is_read) in
            [(0.0, &[1, 1, 1, 1][..], false), (0.5, &[1; 4], true), (-0.0, &[1; 4], true), (0.0, &[2, 1, 1, 5], true)]
        {
            let numbers = vec![constant; shape.iter().product()];
            let tensor = match dtype {
                DType::F16 => {
                    Tensor::new(shape, Data::F16(&numbers.iter().map(|&x| f16::from_f32(x)).collect::<Vec<_>>()), 0)
                }
                DType::BF16 => {
                    Tensor::new(shape, Data::BF16(&numbers.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()), 0)
                }
                _ => Tensor::new(shape, Data::F32(&numbers), 0),
            };
            let mut node = example.sized(dtype);
            node.constants.push((BIAS, &raw const tensor));
            let found = Made::of(op, &node).unwrap().run(&mut call()).unwrap();
            assert_eq!(found != expected, is_read, "{dtype}, {constant}, {shape:?}");
        }
    }
    assert_eq!(live(), 0);
}

/// RoutedMLP takes both biases or none: one of zeros stays.
#[test]
fn half_of_a_pair_is_not_left_out() {
    let Some(_) = table(DType::F32) else { return };
    let op = table_on(PROVIDER, RoutedMlp::OPERATOR, DType::F32).unwrap();
    let shapes = [vec![1, 3, 8], vec![2, 8, 8], vec![2, 8, 8], vec![1, 3, 2], vec![2, 8], vec![2, 8]];
    let numbers =
        |index: usize, len: usize| -> Vec<f32> { (0..len).map(|i| ((index + i * 5) % 7) as f32 / 4.0).collect() };
    let tensor = |index: usize, shape: &Vec<usize>| {
        let zeros = index == FC1_BIAS;
        let numbers = numbers(index, shape.iter().product());
        Tensor::new(shape, Data::F32(&if zeros { vec![0.0; numbers.len()] } else { numbers }), 0)
    };
    let tensors = || shapes.iter().enumerate().map(|(index, shape)| Some(tensor(index, shape))).collect();
    let constant = tensor(FC1_BIAS, &shapes[FC1_BIAS]);
    let attributes = vec![("num_experts", Value::Int(2)), ("activation", Value::Int(0))];
    let inputs = shapes.iter().map(|shape| Some(Info::sized(DType::F32, shape))).collect();
    let mut node = Node { attributes, inputs, output: None, constants: vec![] };
    let expected = Made::of(op, &node).unwrap().run(&mut Call::new(DType::F32, tensors())).unwrap();
    node.constants.push((FC1_BIAS, &raw const constant));
    assert_eq!(Made::of(op, &node).unwrap().run(&mut Call::new(DType::F32, tensors())).unwrap(), expected);
    assert_eq!(live(), 0);
}

#[test]
fn concurrent_calls_of_a_kernel_release_all_memory() {
    let example = Example::new();
    let Some(op) = table(DType::F16) else { return };
    let kernel = Made::of(op, &example.sized(DType::F16)).unwrap();
    let expected = kernel.run(&mut example.call(DType::F16, 0)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..3 {
                    assert_eq!(kernel.run(&mut example.call(DType::F16, 0)).unwrap(), expected);
                }
                assert_eq!(live(), 0);
            });
        }
    });
    drop(kernel);
    assert_eq!(live(), 0);
}

#[test]
fn invalid_inputs_are_errors() {
    let example = Example::new();
    let Some(op) = table(DType::F32) else { return };
    let mut node = example.sized(DType::F32);
    node.attributes.remove(0);
    assert!(Made::of(op, &node).err().unwrap().1.contains("attribute num_heads"));
    let kernel = Made::of(op, &example.sized(DType::F32)).unwrap();
    // Offset 4 of a block is not aligned.
    let (_, message) = kernel.run(&mut example.call(DType::F32, 4)).unwrap_err();
    assert!(message.contains("query starts 4 bytes beyond"), "{message}");
    drop(kernel);
    assert_eq!(live(), 0);
}

#[test]
fn running_on_the_cpu_is_logged_once() {
    let Some(emulator) = std::env::var_os("MOH_CUDA_DRIVER") else { return };
    let node = Example::new().sized(DType::F32);
    // SAFETY: the node belongs to the fake host.
    let node = unsafe { KernelInfo::new(api(), std::ptr::from_ref(&node).cast()) };
    let said = || LOG.lock().unwrap().iter().filter(|message| message.contains("run on the CPU")).count();
    notice::runs_on_cpu(&node, "a reason");
    assert_eq!(said(), 0);
    // Any library with the provider's file name.
    let folder = std::env::temp_dir().join(format!("moh-notice-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let provider = folder.join("libonnxruntime_providers_cuda.so");
    std::fs::copy(emulator, &provider).unwrap();
    // The driver must be loaded first, because it is looked up by a name that this library has too.
    moh_cuda::Driver::get().unwrap();
    // SAFETY: loading the emulator's library runs no code.
    std::mem::forget(unsafe { libloading::Library::new(&provider) }.unwrap());
    for _ in 0..2 {
        notice::runs_on_cpu(&node, "a reason");
        assert_eq!(said(), 1);
    }
    std::fs::remove_dir_all(folder).unwrap();
}
