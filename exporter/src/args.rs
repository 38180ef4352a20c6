//! Command line of moh-export.

use clap::{ArgAction, Parser, ValueEnum};
use moh_export::{AttentionStyle, DEFAULT_OPSET, ElementType, Options};
use std::path::PathBuf;

/// Export a Mixture-of-Head checkpoint to ONNX.
///
/// The model runs in any ONNX runtime; onnxruntime with libmoh_ops, and tract with moh-run, never compute a head that is off.
#[derive(Debug, Parser)]
#[command(name = "moh-export", version)]
pub(crate) struct Args {
    /// A .safetensors file with config.json beside it, a .safetensors.index.json, or a folder with one of them.
    checkpoint: PathBuf,

    /// The model to write; its folder is made, weights go to <OUTPUT>_data beside it.
    #[arg(short, long, value_name = "MODEL.onnx")]
    output: PathBuf,

    /// Model family: moh-dit, dit, moh-llama or llama [default: the config's key `family`].
    #[arg(long)]
    family: Option<String>,

    /// Another configuration than the config.json beside the weights.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Element type of weights and activations [default: the checkpoint's; f16 for bf16].
    #[arg(long, value_enum)]
    dtype: Option<Dtype>,

    /// How routed attention is written: as an operator with its body, or as standard operators only.
    #[arg(long, value_enum, default_value = "routed")]
    attention: AttentionStyle,

    /// ONNX operator-set version, 20 to 24 (20 with --ir-version 9 loads in onnxruntime 1.17).
    #[arg(long, default_value_t = DEFAULT_OPSET, value_name = "N")]
    opset: i64,

    /// ONNX IR version [default: the one that came with the operator set].
    #[arg(long, value_name = "N")]
    ir_version: Option<i64>,

    /// Add every layer's head gates as outputs, `gates.<module>`.
    #[arg(long)]
    output_gates: bool,

    /// Run the written model and compare it with the checkpoint, whatever its size.
    #[arg(long, overrides_with = "no_verify", action = ArgAction::SetTrue)]
    verify: bool,

    /// Do not run the written model [default above 500 million parameters].
    #[arg(long, action = ArgAction::SetTrue)]
    no_verify: bool,

    /// Replace files that are there.
    #[arg(short, long)]
    force: bool,

    /// Print errors only.
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Args {
    /// Checkpoint, output and how to export.
    pub(crate) fn options(self) -> (PathBuf, PathBuf, Options) {
        let options = Options {
            family: self.family,
            config: self.config,
            dtype: self.dtype.map(|dtype| match dtype {
                Dtype::F32 => ElementType::F32,
                Dtype::F16 => ElementType::F16,
                Dtype::Bf16 => ElementType::BF16,
            }),
            attention: self.attention,
            opset: self.opset,
            ir_version: self.ir_version,
            output_gates: self.output_gates,
            verify: if self.verify { Some(true) } else { self.no_verify.then_some(false) },
            force: self.force,
        };
        (self.checkpoint, self.output, options)
    }
}
