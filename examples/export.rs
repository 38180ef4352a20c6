//! Exports a checkpoint: `cargo run --release --example export -- CHECKPOINT MODEL.onnx`.

use anyhow::{Context, Result};
use std::path::PathBuf;

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let checkpoint = arguments.next().context("usage: export CHECKPOINT MODEL.onnx")?;
    let output = arguments.next().context("usage: export CHECKPOINT MODEL.onnx")?;
    let report = moh_export::export(&checkpoint, &output, &moh_export::Options::default())?;
    println!("{report}");
    Ok(())
}
