//! Trains a small MoH-DiT to draw handwritten digits, exports it, and draws some.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example digits_dit -- target/digits-dit
//!
//! Sizes are those of `examples/checkpoints/digits-moh-dit`, and so is the diffusion: 1000 steps of noise with variances from 1e-4 to 0.02;
//! the model predicts the noise, and where between its bounds the variance of a step back lies. The digits are scikit-learn's, which
//! `fetch.sh` tells more of. What is exported is the moving average of the weights.

mod common;

use anyhow::{Context, Result};
use common::noise::{Denoise, SIDE};
use common::{Arguments, digits, export, load, report};
use moh_models::{Config, Model, Parameters};
use moh_tasks::diffusion::{DiffusionModel, SampleOptions, Sampler, pictures};
use moh_train::{Options, Trainer};
use std::ops::ControlFlow;
use std::path::Path;

const CONFIG: &str = include_str!("../checkpoints/digits-moh-dit/config.json");

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let digits = digits::read(&arguments)?;
    let options = arguments.options(Options {
        steps: 2000,
        learning_rate: 2e-3,
        warmup: 50,
        weight_decay: 0.0,
        ema: Some(0.99),
        ..Options::default()
    });
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, None)?;
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!("{} parameters; {} steps done", trainer.parameters().count(), trainer.step());
    trainer.train(&mut Denoise::new(&model, &digits), report)?;
    let checkpoint = trainer.averaged().context("an average was asked for")?;

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    draw(&folder, &arguments.folder.join("digits.svg"))
}

/// One digit of every class by the exported model in tract, as a picture and as text.
fn draw(folder: &Path, file: &Path) -> Result<()> {
    let mut model = DiffusionModel::new(load(folder, "model.onnx")?)?;
    let options = SampleOptions {
        steps: 50,
        sampler: Sampler::Ddpm,
        guidance: 2.0,
        guidance_channels: None,
        clip: true,
        seed: 0,
    };
    let labels: Vec<i64> = (0..10).collect();
    let samples = model.sample(&labels, 0, &options, |_| ControlFlow::Continue(()))?;
    let pictures = pictures(&samples)?;
    let mut svg = format!(r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {SIDE}">"#, 10 * SIDE);
    for (i, picture) in pictures.iter().enumerate() {
        for (at, gray) in picture.samples().iter().enumerate() {
            let (x, y) = (i * SIDE + at % SIDE, at / SIDE);
            svg += &format!(r#"<path d="M{x} {y}h1v1h-1z" fill="rgb({gray},{gray},{gray})"/>"#);
        }
    }
    std::fs::write(file, svg + "</svg>\n")?;
    println!("drawn by tract: {}", file.display());
    for rows in 0..SIDE / 2 {
        let line = pictures.iter().take(5).flat_map(|picture| {
            let of = |x: usize| usize::from(picture.samples()[2 * rows * SIDE + x]);
            (0..SIDE).map(move |x| char::from(b" .:-=+*#%@"[of(x) * 10 / 256]))
        });
        println!("{}", line.collect::<String>());
    }
    Ok(())
}
