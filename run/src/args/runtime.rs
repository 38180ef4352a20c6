//! Which runtime, where, and its libraries.

use super::number::whole;
use anyhow::{Result, ensure};
use clap::ValueEnum;
use moh_runtime::{DeviceChoice, Options, RuntimeChoice};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct RuntimeArgs {
    /// Which runtime runs the model.
    #[arg(long, value_enum, default_value_t = RuntimeArg::Auto)]
    runtime: RuntimeArg,
    /// Threads to use [default: the runtime's choice].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole(1, MOST_THREADS))]
    threads: Option<usize>,
    /// Do not load the ai.moh kernels: onnxruntime runs the function bodies in the model, which compute every head.
    #[arg(long, conflicts_with = "ops_library")]
    no_custom_ops: bool,
    /// Pack all weights of ai.moh operators once, at load, as tract always does: in onnxruntime also those that are not packed by default because that
    /// takes more memory: experts', 16-bit ones, and what it has not mapped from a file.
    #[arg(long, conflicts_with = "no_custom_ops")]
    pack_weights: bool,
    #[command(flatten)]
    library: LibraryArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct LibraryArgs {
    /// The onnxruntime library [default: $ORT_DYLIB_PATH, or one that is found].
    #[arg(long, value_name = "FILE")]
    ort_library: Option<PathBuf>,
    /// The library of the ai.moh kernels [default: $MOH_OPS_LIBRARY, or the one beside this program].
    #[arg(long, value_name = "FILE")]
    ops_library: Option<PathBuf>,
    /// Where onnxruntime runs the model.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    device: DeviceArg,
    /// Print errors only.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum RuntimeArg {
    /// onnxruntime if its library is found, else tract.
    Auto,
    /// onnxruntime.
    Ort,
    /// tract, which is built in.
    Tract,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DeviceArg {
    /// A CUDA GPU if onnxruntime has the provider for it, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

/// More threads than any machine has processors are a mistake, and some runtimes take long to start them.
pub(super) const MOST_THREADS: usize = 1024;

impl RuntimeArgs {
    /// The library's options.
    ///
    /// # Errors
    /// As [`LibraryArgs::check`].
    pub(crate) fn options(&self) -> Result<Options> {
        self.library.check(!matches!(self.runtime, RuntimeArg::Tract))?;
        Ok(Options {
            runtime: match self.runtime {
                RuntimeArg::Auto => RuntimeChoice::Auto,
                RuntimeArg::Ort => RuntimeChoice::Ort,
                RuntimeArg::Tract => RuntimeChoice::Tract,
            },
            threads: self.threads,
            without_custom_ops: self.no_custom_ops,
            pack_weights: self.pack_weights,
            ..self.library.options()
        })
    }

    /// Whether errors only are to be printed.
    pub(crate) fn quiet(&self) -> bool {
        self.library.quiet
    }
}

impl LibraryArgs {
    /// Refuses a library that would not be used.
    ///
    /// # Errors
    /// Where one is named and onnxruntime runs no model.
    pub(crate) fn check(&self, uses_onnxruntime: bool) -> Result<()> {
        for (option, library) in [("--ort-library", &self.ort_library), ("--ops-library", &self.ops_library)] {
            ensure!(
                uses_onnxruntime || library.is_none(),
                "{option} is for onnxruntime, and only tract is to run: leave out {option} or --runtime tract"
            );
        }
        Ok(())
    }

    /// The library's options as far as they are about libraries and devices.
    pub(crate) fn options(&self) -> Options {
        let (ort_library, ops_library) = (self.ort_library.clone(), self.ops_library.clone());
        let device = match self.device {
            DeviceArg::Auto => DeviceChoice::Auto,
            DeviceArg::Cpu => DeviceChoice::Cpu,
            DeviceArg::Cuda => DeviceChoice::Cuda,
        };
        Options { device, ort_library, ops_library, ..Options::default() }
    }
}
