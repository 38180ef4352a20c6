//! Trains a small MoH-ViT to read handwritten digits, exports it, and reads the digits that it was not trained on.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example digits_vit -- target/digits-vit
//!
//! Sizes are those of `examples/checkpoints/digits-moh-vit`. The digits are scikit-learn's, which `fetch.sh` tells more of: 1,500 to train
//! on, moved a little each time, and 297 held out.

mod common;

use anyhow::{Context, Result};
use candle_core::Tensor;
use common::{Arguments, digits, export, inputs, load, report, scaled};
use moh_models::eager::Eager;
use moh_models::routing;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_train::{Loss, Options, Task, Trainer, loss};

const CONFIG: &str = include_str!("../checkpoints/digits-moh-vit/config.json");
const PREPROCESSOR: &str = include_str!("../checkpoints/digits-moh-vit/preprocessor_config.json");
const BATCH: usize = 32;
const SIDE: usize = 64;
const TRAINED: usize = 1500;
/// The factor of the load-balance loss, as published.
const BALANCE: f64 = 0.01;

struct Digits<'a> {
    model: &'a Model,
    digits: Vec<([f32; 64], usize)>,
}

impl Task for Digits<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for _ in 0..BATCH {
            let (digit, label) = &self.digits[rng.below(self.digits.len())];
            let moved = (10.0 * rng.uniform() - 5.0, 10.0 * rng.uniform() - 5.0);
            picture(digit, moved, &mut pixels);
            labels.push(*label as i64);
        }
        let device = ops.device().clone();
        let pixels = Tensor::from_vec(pixels, (BATCH, 3, SIDE, SIDE), &device)?;
        let labels = Tensor::from_vec(labels, BATCH, &device)?;
        let logits = self.model.forward(ops, &inputs([("pixel_values", pixels)]))?.swap_remove(0);
        let mut parts = vec![("classes", 1.0, loss::cross_entropy(&logits, &labels, 0.1)?)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}

/// A digit in three equal channels.
fn picture(digit: &[f32; 64], moved: (f32, f32), out: &mut Vec<f32>) {
    let begin = out.len();
    scaled(digit, SIDE, moved, out);
    for _ in 0..2 {
        out.extend_from_within(begin..begin + SIDE * SIDE);
    }
}

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let mut digits = digits(&arguments)?;
    anyhow::ensure!(digits.len() > TRAINED, "digits.csv: expected more than {TRAINED} digits, found {}", digits.len());
    let held_out = digits.split_off(TRAINED);
    let options = arguments.options(Options {
        steps: 150,
        learning_rate: 1e-3,
        warmup: 30,
        save_every: 50,
        report_every: 10,
        ..Options::default()
    });
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, None)?;
    let files = [("config.json", CONFIG), ("preprocessor_config.json", PREPROCESSOR)];
    let files = files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).into();
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let mut trainer = Trainer::open(&arguments.folder, start, files, options)?;
    eprintln!("{} parameters; {} steps done", trainer.parameters().count(), trainer.step());
    let checkpoint = trainer.train(&mut Digits { model: &model, digits }, report)?;

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    let mut model = load(&folder, "model.onnx")?;
    let mut right = 0;
    for digits in held_out.chunks(BATCH) {
        let mut pixels = Vec::new();
        digits.iter().for_each(|(digit, _)| picture(digit, (0.0, 0.0), &mut pixels));
        let pixels = moh_runtime::Tensor::new([digits.len(), 3, SIDE, SIDE], pixels)?;
        let outputs = model.run([("pixel_values", pixels.into())])?;
        let logits = outputs[0].as_slice::<f32>()?;
        for (logits, (_, label)) in logits.chunks(10).zip(digits) {
            let best = (0..10).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).context("ten classes")?;
            right += usize::from(best == *label);
        }
    }
    println!("held out: {right} of {} digits are read right, in tract", held_out.len());
    Ok(())
}
