//! Tests of the driver, the images, and device memory.

use crate::device::{Device, RTX_30, T4, rerun_on_other_gpu};
use moh_conformance::head_linear::COMBINE;
use moh_cuda::driver::DRIVER_VARIABLE;
use moh_cuda::kernel::Kernel;
use moh_cuda::params::AttentionParams;
use moh_cuda::stream::Properties;
use moh_cuda::{Driver, Stream, modules};
use moh_operators::Error;

#[test]
fn every_module_has_a_name_and_an_image() {
    for module in modules::ALL {
        assert!(!module.name().is_empty() && !module.is_empty());
    }
    let mut names: Vec<&str> = modules::ALL.iter().map(|module| module.name()).collect();
    names.dedup();
    assert_eq!(names.len(), modules::ALL.len());
}

#[test]
fn missing_driver_is_an_error_that_names_the_file() {
    let error = Driver::at("/nowhere/libcuda.so.1".as_ref()).unwrap_err();
    assert!(matches!(&error, Error::NoCuda { reason } if reason.contains("/nowhere/libcuda.so.1")), "{error}");
}

/// cudarc looks up the driver by name and uses the first one loaded; a second one must be refused.
#[test]
fn second_driver_in_a_process_is_refused() {
    let (Some(_), Some(emulator)) = (Device::get(), std::env::var_os(DRIVER_VARIABLE)) else {
        return println!("SKIPPED: {DRIVER_VARIABLE} names no driver");
    };
    assert!(Driver::at(emulator.as_ref()).is_ok());
    let other = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcuda.so");
    std::fs::copy(emulator, &other).unwrap();
    let error = Driver::at(&other).unwrap_err();
    assert!(error.to_string().ends_with("is not the driver: another libcuda.so is"), "{error}");
}

#[test]
fn device_memory_can_be_written_and_read() {
    let Some(device) = Device::get() else { return };
    let memory = device.memory(5);
    memory.write(&[1, 2, 3, 4, 5]);
    let stream = device.stream();
    // SAFETY: two of the five bytes of the memory.
    unsafe { stream.fill(memory.ptr() + 1, 9, 2) }.unwrap();
    stream.synchronize().unwrap();
    let mut found = [0; 5];
    memory.read(&mut found);
    assert_eq!(found, [1, 9, 9, 4, 5]);
}

/// The error of a launch that must fail.
fn refusal(stream: &Stream<'_>, kernel: Kernel<'_>, shared_bytes: u32) -> String {
    // SAFETY: the struct has only numbers. The launch fails, so nothing reads it.
    unsafe {
        let params: AttentionParams = std::mem::zeroed();
        stream.launch(kernel, [1, 1, 1], 128, shared_bytes, &params).unwrap_err().to_string()
    }
}

#[test]
fn launches_with_too_much_shared_memory_are_refused() {
    let Some(device) = Device::get() else { return };
    let kernel = Kernel { module: modules::DECODE, name: c"moh_decode_f16_d32_m16" };
    let stream = device.stream();
    let properties = stream.properties();
    let available = properties.shared_bytes;
    let error = refusal(&stream, kernel, available + 1);
    let expected = format!(
        "kernel moh_decode_f16_d32_m16: needs {} bytes of shared memory per block, the GPU has {available}",
        available + 1
    );
    assert!(error.contains(&expected), "{error}");
    // More than any GPU has: the driver refuses it too.
    let limitless = stream.with_properties(Properties { shared_bytes: u32::MAX, ..properties });
    let error = refusal(&limitless, kernel, 300 << 10);
    assert!(error.contains("cuFuncSetAttribute: CUDA_ERROR_INVALID_VALUE"), "{error}");
}

/// Before a model runs, and in each call.
#[test]
fn gpus_that_are_too_old_are_refused() {
    let Some(device) = Device::get() else { return };
    rerun_on_other_gpu(&T4, &["driver::gpus_that"]);
    let expected = "compute capability 7.5, the kernels need 8.0 or later";
    let call = COMBINE.call();
    // On a real GPU only calls are limited to it.
    if device.stream().properties().capability == (7, 5) {
        let error = device.run(&call).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let checked = device.driver.check_gpu();
    match device.emulated && device.stream().properties().capability == (7, 5) {
        true => assert!(checked.unwrap_err().to_string().contains(expected)),
        false => checked.unwrap(),
    }
}

#[test]
fn kernels_for_hopper_load_only_there() {
    let Some(device) = Device::get() else { return };
    rerun_on_other_gpu(&RTX_30, &["driver::kernels_for_hopper", "driver::launches_with_too_much"]);
    let stream = device.stream();
    if device.emulated && stream.properties().capability != (9, 0) {
        let kernel = Kernel { module: modules::ATTENTION_SM90, name: c"moh_attention_sm90_f16_d64" };
        let error = refusal(&stream, kernel, 0);
        assert!(error.contains("CUDA_ERROR_NO_BINARY_FOR_GPU"), "{error}");
    }
}
