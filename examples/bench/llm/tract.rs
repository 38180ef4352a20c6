//! A language model in tract.

use super::step::{Decoder, IN_PLACE, Step, integers, noise};
use anyhow::{Context, Result, ensure};
use moh_runtime::{Dim, Model, Options, RuntimeChoice, Tensor, TensorInfo, Value};
use std::path::Path;
use std::time::{Duration, Instant};

/// A loaded model.
pub(super) struct Tract {
    model: Model,
    /// The length of caches that are updated in place; `None`: every run gives new ones.
    capacity: Option<usize>,
    step: Step,
    inputs: Vec<(String, Value)>,
}

impl Tract {
    /// Loads a model. Caches in place have room for `capacity` tokens.
    pub(super) fn load(path: &Path, threads: usize, capacity: usize) -> Result<Tract> {
        let options = Options { runtime: RuntimeChoice::Tract, threads: Some(threads), ..Options::default() };
        let model = Model::load(path, &options)?;
        let is_buffer = |output: &TensorInfo| output.dims.get(2) == Some(&Dim::Symbol(IN_PLACE.to_owned()));
        let in_place = model.outputs().iter().any(is_buffer);
        let step = Step { past: 0, tokens: 1 };
        Ok(Tract { model, capacity: in_place.then_some(capacity), step, inputs: Vec::new() })
    }

    fn inputs(&self, step: Step) -> Result<Vec<(String, Value)>> {
        let input = |info: &TensorInfo| {
            let tensor = match integers(&info.name, step) {
                Some((shape, numbers)) => Tensor::new(shape, numbers)?,
                None => {
                    let size = |dim: &Dim| if let Dim::Fixed(size) = dim { *size } else { 1 };
                    let mut dims: Vec<usize> = info.dims.iter().map(size).collect();
                    let length = dims.get_mut(2).with_context(|| format!("{}: expected 4 dimensions", info.name))?;
                    *length = self.capacity.unwrap_or(step.past);
                    let mut numbers = vec![0f32; dims.iter().product()];
                    noise(&mut numbers);
                    Tensor::new(dims, numbers)?
                }
            };
            Ok((info.name.clone(), tensor.into()))
        };
        self.model.inputs().iter().map(input).collect()
    }

    /// The caches that a run gave become those of the next.
    fn take(&mut self, outputs: Vec<Value>) -> Result<()> {
        let step = self.step;
        self.inputs.clear();
        for (output, value) in self.model.outputs().iter().zip(outputs) {
            if output.name.starts_with("present") {
                self.inputs.push((output.name.replace("present", "past_key_values"), value));
            }
        }
        for info in self.model.inputs() {
            if let Some((shape, numbers)) = integers(&info.name, step) {
                self.inputs.push((info.name.clone(), Tensor::new(shape, numbers)?.into()));
            }
        }
        Ok(())
    }
}

impl Decoder for Tract {
    /// Caches are outputs of a run before, as they are while generating: those go in without a copy.
    fn prepare(&mut self, step: Step) -> Result<()> {
        self.step = step;
        self.inputs.clear();
        if self.capacity.is_none() && step.past == 0 {
            self.inputs = self.inputs(step)?;
            return Ok(());
        }
        let before = Step { past: step.past.saturating_sub(1), tokens: 1 };
        let outputs = self.model.run(self.inputs(before)?)?;
        self.take(outputs)
    }

    fn run(&mut self) -> Result<Duration> {
        // A cache is written where it lies only if nobody else holds it.
        let inputs = if self.capacity.is_some() { std::mem::take(&mut self.inputs) } else { self.inputs.clone() };
        let start = Instant::now();
        let outputs = self.model.run(inputs)?;
        let time = start.elapsed();
        let logits = outputs[0].data()?;
        let last = logits.range(logits.len() - 1..logits.len()).and_then(|last| last.to_f32());
        ensure!(last.is_some_and(|last| last[0].is_finite()), "a logit is not finite");
        if self.capacity.is_some() {
            self.take(outputs)?;
        }
        Ok(time)
    }
}
