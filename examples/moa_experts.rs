//! What more experts cost a MoA encoder whose tokens use eight of them: time and multiply-accumulates, with and without the
//! kernels. `cargo run --release --example moa_experts -- [TOKENS] [THREADS]`; the library of the operators is looked for as by
//! moh-run.

use anyhow::Result;
use moh_export::{ElementType, export, random};
use moh_models::Config;
use moh_models::sample::{Rng, SampleData};
use moh_runtime::{Model, Options, RuntimeChoice, Tensor, Value};
use std::path::Path;
use std::time::Instant;

const WIDTH: usize = 512;
/// Sizes as in the published base model, but for the number of experts.
const CONFIG: &str = r#"{
    "family": "moa", "part": "encoder", "layers": 2, "encoder_embed_dim": 512, "head_dim": 128, "attention_heads": 8,
    "ffn_embed_dim": 2048, "num_expert": "#;

fn main() -> Result<()> {
    let mut numbers = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let tokens = numbers.next().transpose()?.unwrap_or(256);
    let threads = numbers.next().transpose()?.unwrap_or(1);
    let without = Options { without_custom_ops: true, ..Options::default() };
    let ways = [
        ("onnxruntime + library", RuntimeChoice::Ort, Options::default()),
        ("onnxruntime", RuntimeChoice::Ort, without),
        ("tract", RuntimeChoice::Tract, Options::default()),
    ];
    println!("{tokens} tokens, threads: {threads}; a call's shortest time in ms");
    println!("{:>7}  {:>12}  {:>12}  {:<24}{:>8}", "experts", "MACs, dense", "routed", "way", "ms");
    for experts in [8, 32, 64] {
        let folder = tempfile::tempdir()?;
        let text = format!("{CONFIG}{experts}}}");
        let config = Config::new("config.json", serde_json::from_str(&text)?);
        let (model, tensors) = moh_models::Model::plan(&config, None)?;
        let macs = model.macs(&[("batch", 1), ("sequence", tokens)])?;
        let checkpoint = folder.path().join("checkpoint");
        random::write(&checkpoint, &text, &tensors, ElementType::F32, 0, false)?;
        let path = folder.path().join("model.onnx");
        export(&checkpoint, &path, &moh_export::Options { verify: Some(false), ..Default::default() })?;
        for (way, runtime, options) in &ways {
            let options = Options { runtime: *runtime, threads: Some(threads), ..options.clone() };
            match time(&path, &options, tokens) {
                Ok(ms) => println!("{experts:>7}  {:>12}  {:>12}  {way:<24}{ms:>8.2}", macs.dense, macs.routed),
                Err(reason) => println!("{experts:>7}  {:>12}  {:>12}  {way:<24}{reason:#}", macs.dense, macs.routed),
            }
        }
    }
    Ok(())
}

/// The shortest of some calls, in milliseconds.
fn time(path: &Path, options: &Options, tokens: usize) -> Result<f64> {
    let mut model = Model::load(path, options)?;
    for notice in model.notices() {
        eprintln!("{notice}");
    }
    let SampleData::F32(x) = Rng::new(1).normals("inputs_embeds", &[1, tokens, WIDTH]).data else {
        anyhow::bail!("normal numbers are floats");
    };
    let inputs: [(&str, Value); 2] = [
        ("inputs_embeds", Tensor::new([1, tokens, WIDTH], x)?.into()),
        ("attention_mask", Tensor::new([1, tokens], vec![1i64; tokens])?.into()),
    ];
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        let start = Instant::now();
        model.run(inputs.clone())?;
        best = best.min(1e3 * start.elapsed().as_secs_f64());
    }
    Ok(best)
}
