//! Runs an exported DiT in tract: `cargo run --release --example run_tract -- MODEL.onnx`.

use anyhow::{Context, Result};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor};

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).context("usage: run_tract MODEL.onnx")?;
    let options = Options { runtime: RuntimeChoice::Tract, ..Options::default() };
    let mut model = Model::load(path, &options)?;
    for notice in model.notices() {
        eprintln!("{notice}");
    }
    // One 16x16 image of one channel, at timestep 500, as class 3.
    let outputs = model.run([
        ("hidden_states", Tensor::new([1, 1, 16, 16], vec![0.5f32; 256])?.into()),
        ("timestep", Tensor::new([1], vec![500f32])?.into()),
        ("class_labels", Tensor::new([1], vec![3i64])?.into()),
    ])?;
    println!("{}: {:?}, first value {:.4}", model.outputs()[0], outputs[0].shape(), outputs[0].as_slice::<f32>()?[0]);
    Ok(())
}
