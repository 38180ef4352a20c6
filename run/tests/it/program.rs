//! The program, as a shell calls it.

use crate::support::have_onnxruntime;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The program with these arguments, and nothing on its standard input.
pub(crate) fn moh_run(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moh-run"));
    command.args(args).stdin(Stdio::null());
    command
}

/// The same, started with the signals as they are by default: whoever runs the tests may ignore some, as nohup does.
pub(crate) fn moh_run_with_signals(args: &[&str]) -> Command {
    if !cfg!(target_os = "linux") {
        return moh_run(args);
    }
    let mut command = Command::new("/usr/bin/env");
    command.arg("--default-signal=HUP,INT,TERM").arg(env!("CARGO_BIN_EXE_moh-run")).args(args).stdin(Stdio::null());
    command
}

/// Success, standard output and standard error.
pub(crate) fn outcome(output: &Output) -> (bool, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// Runs the program.
pub(crate) fn run(args: &[&str]) -> (bool, String, String) {
    outcome(&moh_run(args).output().unwrap())
}

/// What the program says where it has to fail.
pub(crate) fn refusal(args: &[&str]) -> String {
    let (success, _, errors) = run(args);
    assert!(!success, "{args:?} succeeded");
    assert!(errors.starts_with("error: "), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
    errors
}

/// Runtimes by their argument.
pub(crate) fn names() -> Vec<&'static str> {
    if have_onnxruntime() { vec!["tract", "ort"] } else { vec!["tract"] }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
