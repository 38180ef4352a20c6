//! The program under test, and the checkpoints that it is tried on.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A folder of golden data.
pub(crate) fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(case)
}

/// What a program said.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// moh-export with a runtime to verify with.
pub(crate) struct Run {
    /// What the report calls the runtime.
    pub(crate) name: &'static str,
    onnxruntime: bool,
}

impl Run {
    /// With tract, which takes over where no onnxruntime is found.
    pub(crate) fn tract() -> Run {
        Run { name: "tract", onnxruntime: false }
    }

    /// Every runtime that is here; onnxruntime where the environment names it.
    pub(crate) fn all() -> Vec<Run> {
        let onnxruntime = Run { name: "onnxruntime", onnxruntime: true };
        match std::env::var_os("ORT_DYLIB_PATH") {
            Some(_) => vec![Run::tract(), onnxruntime],
            None => {
                assert!(std::env::var_os("MOH_REQUIRE_ORT").is_none(), "MOH_REQUIRE_ORT is set without ORT_DYLIB_PATH");
                eprintln!("SKIPPED onnxruntime: ORT_DYLIB_PATH is not set");
                vec![Run::tract()]
            }
        }
    }

    /// The program.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moh-export"));
        if self.onnxruntime {
            // cargo test builds this one; the one beside the program may be older.
            let library = std::env::current_exe().unwrap().with_file_name("libmoh_ops.so");
            if library.is_file() {
                command.env("MOH_OPS_LIBRARY", library);
            }
        } else {
            // Nor is there a Python to ask for one.
            command.env_remove("ORT_DYLIB_PATH").env_remove("LD_LIBRARY_PATH").env("PATH", "");
        }
        command
    }
}
