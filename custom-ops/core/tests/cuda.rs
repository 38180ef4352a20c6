//! CUDA kernels on a GPU, or on the emulator of one, against the f64 reference.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code)]
#[path = "support/data.rs"]
mod data;
#[allow(dead_code)]
#[path = "support/device.rs"]
mod device;

use device::Device;
use moh_kernels::Error;
use moh_kernels::cuda::{Driver, modules};

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
fn a_missing_driver_is_an_error_that_names_it() {
    let error = Driver::at("/nowhere/libcuda.so.1".as_ref()).unwrap_err();
    assert!(matches!(&error, Error::NoCuda { reason } if reason.contains("/nowhere/libcuda.so.1")), "{error}");
}

#[test]
fn memory_is_written_and_read() {
    let Some(device) = Device::get() else { return };
    let memory = device.memory(5);
    memory.write(&[1, 2, 3, 4, 5]);
    let stream = device.stream();
    // SAFETY: two of the five bytes.
    unsafe { stream.fill(memory.ptr() + 1, 9, 2) }.unwrap();
    stream.synchronize().unwrap();
    let mut found = [0; 5];
    memory.read(&mut found);
    assert_eq!(found, [1, 9, 9, 4, 5]);
}
