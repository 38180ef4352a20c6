//! How to run a model, and what to tell the user about how it runs.

use std::fmt;
use std::path::PathBuf;

/// Which runtime runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RuntimeChoice {
    /// onnxruntime where a usable library is found, else tract.
    #[default]
    Auto,
    /// onnxruntime, or an error.
    Ort,
    /// tract.
    Tract,
}

/// Where onnxruntime runs the model; tract always runs it on the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// The first CUDA GPU, or an error.
    Cuda,
    /// The first CUDA GPU where onnxruntime has the provider for it, else the CPU.
    Auto,
}

/// How to load and run a model.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The runtime.
    pub runtime: RuntimeChoice,
    /// The device.
    pub device: DeviceChoice,
    /// Threads of one run; `None`: the runtime decides (onnxruntime) or one a processor (tract).
    pub threads: Option<usize>,
    /// Leave the ai.moh kernels out: onnxruntime then runs the bodies that the model carries. tract has no such bodies.
    pub without_custom_ops: bool,
    /// Keep all of the ai.moh operators' constant weights packed for their CPU kernels, also those of which onnxruntime then has a second copy:
    /// experts', 16-bit ones, and what it has not mapped from a file. tract always packs all, and has no second copy.
    pub pack_weights: bool,
    /// Whether onnxruntime's threads sleep as soon as a run has ended, and do not wait for the next one actively for a while: what runs
    /// next on their processors, such as another model, would have to share them.
    pub sleep_between_runs: bool,
    /// The onnxruntime library; `None`: `ORT_DYLIB_PATH`, else one that is found beside the executable, in a Python
    /// installation or among the system's libraries. One process uses one library: the first.
    pub ort_library: Option<PathBuf>,
    /// The library of the ai.moh operators for onnxruntime; `None`: `MOH_OPS_LIBRARY`, else beside the executable.
    pub ops_library: Option<PathBuf>,
    /// Writes onnxruntime's profile to files that begin with this path; see [`crate::Model::end_profiling`].
    pub profile: Option<PathBuf>,
}

/// Something that the user may want to know: the model runs, but not in the best way.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// tract runs the model because no usable onnxruntime library was found.
    TractFallback {
        /// What was tried.
        reason: String,
    },
    /// onnxruntime has a CUDA provider that could not be used: the model runs on the CPU.
    NoCuda {
        /// What the provider said.
        reason: String,
    },
    /// The library of the ai.moh operators was not found or not usable: their bodies run, which compute every head.
    NoCustomOps {
        /// What was tried, and what to do.
        reason: String,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::TractFallback { reason } => {
                write!(f, "running in tract, because no usable onnxruntime library was found: {reason}")
            }
            Notice::NoCuda { reason } => write!(f, "running on the CPU, because the CUDA provider failed: {reason}"),
            Notice::NoCustomOps { reason } => {
                write!(f, "running without the ai.moh kernels, correct but slower: {reason}")
            }
        }
    }
}
