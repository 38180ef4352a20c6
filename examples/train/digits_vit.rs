//! Trains a small MoH-ViT to read handwritten digits, exports it, and reads the digits that it was not trained on.
//!
//!     examples/train/fetch.sh
//!     cargo run --release --example digits_vit -- target/digits-vit
//!
//! Sizes are those of `examples/checkpoints/digits-moh-vit`. The digits are scikit-learn's, which `fetch.sh` tells more of: 1,500 to train
//! on, moved a little each time, and 297 held out.

mod common;

use anyhow::Result;
use common::classes::{BATCH, Classes, SIDE, count_right, pictures};
use common::{Arguments, digits, export, load, report};
use moh_models::{Config, Model, Parameters};
use moh_train::{Options, Trainer};

const CONFIG: &str = include_str!("../checkpoints/digits-moh-vit/config.json");
const PREPROCESSOR: &str = include_str!("../checkpoints/digits-moh-vit/preprocessor_config.json");

fn main() -> Result<()> {
    moh_train::join_pool();
    let arguments = Arguments::read()?;
    let (digits, held_out) = digits::split(&arguments)?;
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
    let checkpoint = trainer.train(&mut Classes { model: &model, digits: &digits }, report)?;

    let folder = export(&arguments, &checkpoint, None, "model.onnx")?;
    let mut model = load(&folder, "model.onnx")?;
    let mut right = 0;
    for digits in held_out.chunks(BATCH) {
        let pixels = moh_runtime::Tensor::new([digits.len(), 3, SIDE, SIDE], pictures(digits))?;
        let outputs = model.run([("pixel_values", pixels.into())])?;
        right += count_right(outputs[0].as_slice::<f32>()?, digits)?;
    }
    println!("held out: {right} of {} digits are read right, in tract", held_out.len());
    Ok(())
}
