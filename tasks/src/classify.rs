//! Image classifiers: pictures in, classes out.

mod preprocessing;

pub use preprocessing::{Origin, Origins, Preprocessing, Resize};

use crate::error::{Error, Result};
use crate::files::read_json;
use crate::image::Picture;
use crate::task;
use moh_runtime::names::LOGITS;
use moh_runtime::{Dim, ElementType, Model, Tensor, TensorInfo, Value};
use serde::Deserialize;
use std::collections::BTreeMap;

const PIXEL_VALUES: &str = "pixel_values";

/// A class and how probable it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The class's number.
    pub class: usize,
    /// Its name, if the model's configuration has one.
    pub label: Option<String>,
    /// Softmax of the logits.
    pub probability: f32,
}

/// A model that takes `pixel_values` (batch, channels, size, size) and gives `logits` (batch, classes).
#[derive(Debug)]
pub struct Classifier {
    model: Model,
    channels: usize,
    size: usize,
    element_type: ElementType,
    logits: usize,
    preprocessing: Preprocessing,
    labels: BTreeMap<usize, String>,
}

#[derive(Debug, Default, Deserialize)]
struct Labels {
    #[serde(default)]
    id2label: BTreeMap<String, String>,
}

impl Classifier {
    /// Checks that `model` classifies images, and reads the preprocessing ([`Preprocessing::from_folder`]) and the class
    /// names (key `id2label` of `config.json`) from the files beside it.
    ///
    /// # Errors
    /// [`Error::Task`] for another kind of model, [`Error::Read`] or [`Error::Malformed`] for the files.
    pub fn new(model: Model) -> Result<Classifier> {
        let other = |reason| task::other_task(&model, "an image classifier", reason);
        let (channels, size, element_type) = pixel_values(model.inputs()).map_err(other)?;
        let logits = model.outputs().iter().position(|output| output.name == LOGITS && output.dims.len() == 2);
        let logits = logits.ok_or_else(|| {
            other(format!("expected an output {LOGITS} (batch, classes), found {}", list(model.outputs())))
        })?;
        let folder = model.files_folder().to_owned();
        let preprocessing = Preprocessing::from_folder(&folder, channels, size)?;
        let config: Labels = read_json(&folder.join("config.json"))?;
        let labels = config.id2label.into_iter().filter_map(|(id, label)| Some((id.parse().ok()?, label))).collect();
        Ok(Classifier { model, channels, size, element_type, logits, preprocessing, labels })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// How pictures are prepared.
    pub fn preprocessing(&self) -> &Preprocessing {
        &self.preprocessing
    }

    /// The `top` most probable classes of every picture, the most probable first; among equals the lower number.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails, [`Error::Output`] where the logits are not numbers.
    pub fn classify(&mut self, pictures: &[Picture], top: usize) -> Result<Vec<Vec<Prediction>>> {
        if pictures.is_empty() {
            return Ok(Vec::new());
        }
        let outputs = self.outputs(pictures)?;
        let logits = &outputs[self.logits];
        let bad = |reason: String| Error::Output {
            path: self.model.path().to_owned(),
            runtime: self.model.runtime_name(),
            reason: format!("{LOGITS}: {reason}"),
        };
        let &[batch, classes] = logits.shape() else {
            return Err(bad(format!("expected 2 dimensions, found {:?}", logits.shape())));
        };
        let numbers = logits.data()?.to_f32().filter(|_| batch == pictures.len() && classes > 0);
        let numbers = numbers.ok_or_else(|| {
            let (found, count) = (logits.element_type(), pictures.len());
            bad(format!("expected floating-point numbers for {count} images, found {found} {:?}", logits.shape()))
        })?;
        if let Some(i) = numbers.iter().position(|x| !x.is_finite()) {
            return Err(bad(format!("expected finite numbers, found {} for image {}", numbers[i], i / classes)));
        }
        Ok(numbers.chunks(classes).map(|row| self.best(row, top)).collect())
    }

    /// All outputs of the model for these pictures.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails.
    pub fn outputs(&mut self, pictures: &[Picture]) -> Result<Vec<Value>> {
        let mut pixels = Vec::with_capacity(pictures.len() * self.channels * self.size * self.size);
        for picture in pictures {
            self.preprocessing.append(picture, &mut pixels);
        }
        let shape = [pictures.len(), self.channels, self.size, self.size];
        let pixels = Tensor::rounded(PIXEL_VALUES, shape, pixels, self.element_type)?;
        Ok(self.model.run([(PIXEL_VALUES, pixels.into())])?)
    }

    fn best(&self, logits: &[f32], top: usize) -> Vec<Prediction> {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f64> = logits.iter().map(|&x| f64::from(x - most).exp()).collect();
        let sum: f64 = powers.iter().sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let prediction = |class: usize| Prediction {
            class,
            label: self.labels.get(&class).cloned(),
            probability: (powers[class] / sum) as f32,
        };
        order.into_iter().take(top).map(prediction).collect()
    }
}

/// Channels, side and element type of the only input.
fn pixel_values(inputs: &[TensorInfo]) -> std::result::Result<(usize, usize, ElementType), String> {
    match inputs {
        [input] if input.name == PIXEL_VALUES => match input.dims[..] {
            [_, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)]
                if height == width && channels > 0 && width > 0 =>
            {
                Ok((channels, width, input.element_type))
            }
            _ => Err(format!("expected {PIXEL_VALUES} (batch, channels, size, size), found {input}")),
        },
        _ => Err(format!("expected the input {PIXEL_VALUES} alone, found {}", list(inputs))),
    }
}

fn list(infos: &[TensorInfo]) -> String {
    infos.iter().map(|info| info.name.as_str()).collect::<Vec<_>>().join(", ")
}
