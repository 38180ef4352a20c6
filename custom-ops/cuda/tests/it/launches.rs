//! Launches of a node: later kernels start early, wait for the earlier ones, and have one block of workspace.

use crate::device::Device;
use crate::memory::Memory;
use moh_cuda::kernel::Kernel;
use moh_cuda::params::Params;
use moh_cuda::stream::DEPENDENT_LAUNCH_VARIABLE;
use moh_cuda::{RawPtr, modules};
use std::ffi::CStr;
use std::process::{Command, Output};

/// Names the kernel that `planted_fault` launches.
const FAULT: &str = "MOH_TEST_FAULT";

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Word {
    word: RawPtr,
}
// SAFETY: has the layout of `Word` in `kernels/emulator/tests.cpp`.
unsafe impl Params for Word {}

/// Launches kernels of the emulator that add 1 to a word, as one node; returns the word, which starts at 0.
fn run(device: &Device, kernels: &[&CStr]) -> i32 {
    let memory: Memory = device.memory(4);
    memory.write(&[0; 4]);
    let stream = device.stream();
    for name in kernels {
        let kernel = Kernel { module: modules::PLAN, name };
        // SAFETY: the memory lives until the stream is synchronised.
        unsafe { stream.launch(kernel, [2, 1, 1], 128, 0, &Word { word: memory.ptr() }) }.unwrap();
    }
    stream.synchronize().unwrap();
    let mut word = [0; 4];
    memory.read(&mut word);
    i32::from_ne_bytes(word)
}

/// The emulator, if dependent launches are not switched off.
fn emulator() -> Option<&'static Device> {
    let device = Device::get().filter(|device| device.emulated)?;
    device.stream().properties().dependent_launch.then_some(device)
}

#[test]
fn kernels_that_wait_run_in_order() {
    let Some(device) = emulator() else { return };
    assert_eq!(run(device, &[c"moh_test_waits"; 3]), 6);
    // The first kernel of a node is launched normally.
    assert_eq!(run(device, &[c"moh_test_reads_early"]), 2);
}

/// Runs only in the processes that `kernels_that_do_not_wait_are_errors` starts, one of which the emulator ends.
#[test]
fn planted_fault() {
    let (Some(device), Ok(fault)) = (Device::get(), std::env::var(FAULT)) else { return };
    let name = std::ffi::CString::new(fault).unwrap();
    run(device, &[c"moh_test_waits", &name]);
}

#[test]
fn kernels_that_do_not_wait_are_errors() {
    if emulator().is_none() || std::env::var_os(FAULT).is_some() {
        return;
    }
    let run = |fault: &str, dependent: &str| -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "launches::planted_fault"]);
        command.env(FAULT, fault).env(DEPENDENT_LAUNCH_VARIABLE, dependent).output().unwrap()
    };
    for (fault, message) in [
        ("moh_test_reads_early", "before waiting for the previous kernel"),
        ("moh_test_never_waits", "ended without waiting for the previous kernel"),
    ] {
        let output = run(fault, "1");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(fault) && said.contains(message), "{said}");
        // Launched normally, the kernel is correct.
        assert!(run(fault, "0").status.success());
    }
    assert!(run("moh_test_waits", "1").status.success());
}
