//! Times exported models in onnxruntime, in turns.

use super::cases::{Kind, Task};
use super::common::classes::{SIDE, pictures};
use super::common::numbers::{END, PADDING, number, words};
use super::common::text::tokens;
use super::common::{Arguments, digits, noise};
use anyhow::{Context, Result, bail};
use moh_export::Part;
use moh_models::sample::Rng;
use moh_runtime::{Dim, Model, RuntimeChoice, Tensor, Value};
use moh_tasks::translate::{BeamOptions, TranslationModel};
use std::path::Path;
use std::time::Instant;

/// Pictures in a batch, tokens of a prompt.
const BATCH: usize = 16;
pub(crate) const PROMPT: usize = 512;
/// Turns, of which the fastest counts.
const TURNS: usize = 40;

enum Timed {
    One { model: Box<Model>, inputs: Vec<(String, Value)> },
    Translation(Box<TranslationModel>, Vec<Vec<i64>>),
}

/// The fastest run of each of the checkpoints' exported models in milliseconds, with one thread.
pub(crate) fn fastest(arguments: &Arguments, task: &Task, checkpoints: &[&Path]) -> Result<Vec<f64>> {
    let mut models =
        checkpoints.iter().map(|checkpoint| load(arguments, task, checkpoint)).collect::<Result<Vec<_>>>()?;
    let mut fastest = vec![f64::INFINITY; models.len()];
    for turn in 0..=TURNS {
        for (model, fastest) in models.iter_mut().zip(&mut fastest) {
            let began = Instant::now();
            let runs = match model {
                Timed::One { model, inputs } => {
                    let inputs = inputs.clone();
                    model.run(inputs)?;
                    1
                }
                Timed::Translation(model, numbers) => {
                    let options = BeamOptions {
                        beams: 1,
                        length_penalty: 1.0,
                        max_tokens: 10,
                        start: END,
                        end: END,
                        padding: Some(PADDING),
                    };
                    for number in numbers.iter() {
                        model.translate(number, &options)?;
                    }
                    numbers.len()
                }
            };
            // The first turn warms up.
            if turn > 0 {
                *fastest = fastest.min(began.elapsed().as_secs_f64() * 1e3 / runs as f64);
            }
        }
    }
    Ok(fastest)
}

fn load(arguments: &Arguments, task: &Task, checkpoint: &Path) -> Result<Timed> {
    let one = |inputs: Vec<(String, Value)>| -> Result<Timed> {
        Ok(Timed::One { model: Box::new(exported(checkpoint, None, "model.onnx")?), inputs })
    };
    match task.kind {
        Kind::Text => {
            let (_, held_out) = tokens(arguments)?;
            let ids = held_out.get(..PROMPT).context("a long held-out text")?.to_vec();
            let mut model = exported(checkpoint, None, "model.onnx")?;
            let mut inputs = vec![
                ("input_ids".to_owned(), Tensor::new([1, PROMPT], ids)?.into()),
                ("attention_mask".to_owned(), Tensor::new([1, PROMPT], vec![1i64; PROMPT])?.into()),
                ("position_ids".to_owned(), Tensor::new([1, PROMPT], (0..PROMPT as i64).collect::<Vec<_>>())?.into()),
            ];
            let caches: Vec<_> =
                model.inputs().iter().filter(|input| input.name.starts_with("past_")).cloned().collect();
            for cache in caches {
                let [_, Dim::Fixed(heads), _, Dim::Fixed(width)] = cache.dims[..] else {
                    bail!("{}: expected (batch, heads, past, width), found {}", cache.name, cache.shape());
                };
                inputs.push((cache.name, Tensor::new([1, heads, 0, width], Vec::<f32>::new())?.into()));
            }
            model.run(inputs.clone())?;
            Ok(Timed::One { model: Box::new(model), inputs })
        }
        Kind::Classes => {
            let (_, held_out) = digits::split(arguments)?;
            let pixels = Tensor::new([BATCH, 3, SIDE, SIDE], pictures(&held_out[..BATCH]))?;
            one(vec![("pixel_values".to_owned(), pixels.into())])
        }
        Kind::Noise => {
            let mut rng = Rng::new(1);
            let side = noise::SIDE;
            let noise: Vec<f32> = (0..BATCH * side * side).map(|_| rng.normal()).collect();
            let labels = (0..BATCH as i64).map(|i| i % 10).collect::<Vec<_>>();
            one(vec![
                ("hidden_states".to_owned(), Tensor::new([BATCH, 1, side, side], noise)?.into()),
                ("timestep".to_owned(), Tensor::new([BATCH], vec![500f32; BATCH])?.into()),
                ("class_labels".to_owned(), Tensor::new([BATCH], labels)?.into()),
            ])
        }
        Kind::Numbers => {
            let encoder = exported(checkpoint, Some(Part::Encoder), "encoder.onnx")?;
            let decoder = exported(checkpoint, Some(Part::Decoder), "decoder.onnx")?;
            let mut rng = Rng::new(1);
            let numbers = (0..8).map(|_| words(number(&mut rng, true))).collect();
            Ok(Timed::Translation(Box::new(TranslationModel::new(encoder, decoder)?), numbers))
        }
    }
}

/// The checkpoint's exported model, which is compared with candle when it is made.
fn exported(checkpoint: &Path, part: Option<Part>, name: &str) -> Result<Model> {
    let file = checkpoint.join("onnx").join(name);
    if !file.exists() {
        let options = moh_export::Options { force: true, part, ..Default::default() };
        moh_export::export(checkpoint, &file, &options)?;
    }
    let options = moh_runtime::Options { runtime: RuntimeChoice::Ort, threads: Some(1), ..Default::default() };
    let model = Model::load(&file, &options)?;
    let notices: Vec<String> = model.notices().iter().map(ToString::to_string).collect();
    anyhow::ensure!(notices.is_empty(), "{}: {}", file.display(), notices.join("; "));
    Ok(model)
}
