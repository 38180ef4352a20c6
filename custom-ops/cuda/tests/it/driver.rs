//! Tests of the driver, the images, and device memory.

use crate::device::Device;
use moh_cuda::driver::DRIVER_VARIABLE;
use moh_cuda::{Driver, modules};
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
