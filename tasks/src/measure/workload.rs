//! Synthetic inputs to measure a model with, made from the names, types and shapes of its inputs.

use crate::error::{Error, Result};
use crate::files::read_json;
use crate::generate::GenerationConfig;
use crate::random::Random;
use moh_runtime::names::{ATTENTION_MASK, CACHE, IN_PLACE, INPUT_IDS, LOGITS, PAST, POSITION_IDS, PRESENT};
use moh_runtime::{Dim, ElementType, Model, OnNode, Tensor, TensorInfo, Value};
use serde::Deserialize;
use std::time::{Duration, Instant};

/// Tokens of a sequence, where nobody says otherwise.
pub const SEQUENCE: usize = 128;
/// Elements of an input: more than could be measured in reasonable time.
const MOST_ELEMENTS: usize = 1 << 30;
/// Timesteps of diffusion models.
const TIMESTEPS: f64 = 1000.0;
/// Tokens below are special ones, padding among them.
const SPECIAL: usize = 4;

/// Sizes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Batch size.
    pub batch: usize,
    /// Sequence length in tokens; unused by models of images.
    pub sequence: usize,
}

/// A kind of run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Of a model without a cache, or whose sizes are fixed.
    Forward,
    /// All tokens of a sequence, with an empty cache.
    Prefill,
    /// One token more, with the others in the cache.
    Decode,
}

impl Phase {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        }
    }
}

/// Synthetic inputs for one model.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Inputs that are caches, and the positions of the outputs that continue them.
    caches: Vec<(String, usize)>,
    /// Whether they are updated in place.
    in_place: bool,
    takes_sequence: bool,
    /// Sizes that every run has, of a model that was exported so.
    fixed: (Option<usize>, Option<usize>),
    vocabulary: usize,
    longest: Option<usize>,
}

/// Lengths that named dimensions stand for.
#[derive(Debug, Clone, Copy)]
struct Lengths {
    batch: usize,
    sequence: usize,
    past: usize,
    source: usize,
    source_past: usize,
}

#[derive(Debug, Default, Deserialize)]
struct Config {
    vocab_size: Option<usize>,
}

impl Workload {
    /// Reads the inputs of `model`; the vocabulary's size comes from its logits, else from `config.json` beside it.
    ///
    /// # Errors
    /// [`Error::Request`] for an input with an unknown dimension, [`Error::Read`] or [`Error::Malformed`] for the
    /// file.
    pub fn new(model: &Model) -> Result<Workload> {
        let folder = model.files_folder();
        let output = |name: &str| model.outputs().iter().position(|output| output.name == name);
        // Where the length of a cache is fixed, its successor does not go back in.
        let caches = model.inputs().iter().filter_map(|input| {
            let present = format!("{PRESENT}{}", input.name.strip_prefix(PAST)?);
            matches!(input.dims.get(2), Some(Dim::Symbol(_))).then_some((input.name.clone(), output(&present)?))
        });
        let size = |input: Option<&TensorInfo>, axis: usize| match input.and_then(|input| input.dims.get(axis)) {
            Some(Dim::Fixed(size)) => Some(*size),
            _ => None,
        };
        let tokens = |input: &&TensorInfo| matches!(input.name.as_str(), INPUT_IDS | "inputs_embeds");
        let fixed = (size(model.inputs().first(), 0), size(model.inputs().iter().find(tokens), 1));
        let is_sequence = |dim: &Dim| matches!(dim, Dim::Symbol(name) if name.contains("sequence"));
        let logits = model.outputs().iter().find(|output| output.name == LOGITS);
        let vocabulary = match logits.map(|logits| &logits.dims[..]) {
            Some([_, _, Dim::Fixed(vocabulary)]) => Some(*vocabulary),
            _ => read_json::<Config>(&folder.join("config.json"))?.vocab_size,
        };
        let workload = Workload {
            caches: caches.collect(),
            in_place: model.metadata().get(CACHE).is_some_and(|value| value == IN_PLACE),
            takes_sequence: fixed.1.is_some() || model.inputs().iter().flat_map(|input| &input.dims).any(is_sequence),
            fixed,
            vocabulary: vocabulary.unwrap_or(1).max(1),
            longest: GenerationConfig::from_folder(folder)?.max_length,
        };
        // Unknown dimensions are errors here, not in a run.
        let probe = Lengths { batch: 1, sequence: 1, past: 0, source: 1, source_past: 0 };
        model.inputs().iter().try_for_each(|input| dims(model, input, probe).map(drop))?;
        Ok(workload)
    }

    /// The phases to measure: prefill and decode for a model with a cache, else forward.
    pub fn phases(&self) -> &'static [Phase] {
        match self.caches.is_empty() || self.fixed.1.is_some() {
            true => &[Phase::Forward],
            false => &[Phase::Prefill, Phase::Decode],
        }
    }

    /// Whether the model takes sequences.
    pub fn takes_sequence(&self) -> bool {
        self.takes_sequence
    }

    /// Sizes of a run; without `sequence` its length is [`SEQUENCE`], or the longest that the model was made for.
    ///
    /// # Errors
    /// [`Error::Request`] for a sequence that is longer, or for one that is given to a model without sequences.
    pub fn sizes(&self, model: &Model, batch: usize, sequence: Option<usize>) -> Result<Sizes> {
        let refused = |reason: String| Err(Error::Request { path: model.path().to_owned(), reason });
        if let Some(fixed) = self.fixed.0.filter(|&fixed| batch != fixed) {
            return refused(format!("a batch of {batch}, but the model was exported for {fixed}"));
        }
        if let Some(fixed) = self.fixed.1 {
            return match sequence.filter(|&sequence| sequence != fixed) {
                Some(found) => refused(format!("a sequence of {found} tokens, but the model was exported for {fixed}")),
                None => Ok(Sizes { batch, sequence: fixed }),
            };
        }
        match (sequence, self.longest) {
            (Some(_), _) if !self.takes_sequence => {
                refused("the model has no sequences: leave their length out".to_owned())
            }
            (Some(sequence), Some(longest)) if sequence > longest => {
                refused(format!("a sequence of {sequence} tokens, but the model's longest is {longest}"))
            }
            (Some(sequence), _) => Ok(Sizes { batch, sequence }),
            (None, longest) => {
                Ok(Sizes { batch, sequence: longest.map_or(SEQUENCE, |longest| longest.clamp(1, SEQUENCE)) })
            }
        }
    }

    /// How many tokens or images a run processes, and which of the two.
    pub fn items(&self, phase: Phase, sizes: Sizes) -> (usize, &'static str) {
        match (self.takes_sequence, phase) {
            (false, _) => (sizes.batch, "images"),
            (true, Phase::Decode) => (sizes.batch, "tokens"),
            (true, _) => (sizes.batch.saturating_mul(sizes.sequence), "tokens"),
        }
    }

    /// Inputs for runs of one phase; random, but the same for the same sizes. Before [`Phase::Decode`] the model runs once, to have a cache:
    /// one that is updated in place then has room for the token to come.
    ///
    /// # Errors
    /// [`Error::Runtime`] where that fails, [`Error::Request`] for inputs that no memory holds.
    pub fn runs(&self, model: &mut Model, phase: Phase, sizes: Sizes) -> Result<Runs> {
        let Sizes { batch, sequence } = sizes;
        let first = Lengths { batch, sequence, past: 0, source: sequence, source_past: 0 };
        let mut inputs = self.made_up(model, first)?;
        if phase != Phase::Decode {
            return Ok(Runs { inputs, caches: Vec::new() });
        }
        if let Some((_, mask)) = inputs.iter_mut().find(|(name, _)| self.in_place && name == ATTENTION_MASK) {
            *mask = mask_with_room(batch, sequence)?.into();
        }
        let mut outputs: Vec<Option<Value>> = model.run(inputs)?.into_iter().map(Some).collect();
        let next = Lengths { batch, sequence: 1, past: sequence, source: 0, source_past: sequence };
        let mut runs = Runs { inputs: self.made_up(model, next)?, caches: Vec::new() };
        for (input, output) in self.caches.iter().cloned() {
            if let Some(value) = outputs.get_mut(output).and_then(Option::take) {
                runs.inputs.retain(|(name, _)| *name != input);
                match self.in_place {
                    true => runs.caches.push(Handed { input, output, value }),
                    false => runs.inputs.push((input, value)),
                }
            }
        }
        Ok(runs)
    }

    fn made_up(&self, model: &Model, lengths: Lengths) -> Result<Vec<(String, Value)>> {
        let make = |(stream, info): (u64, &TensorInfo)| {
            let shape = dims(model, info, lengths)?;
            let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
            if elements.is_none_or(|n| n > MOST_ELEMENTS) {
                let reason = format!("the input {info} would be too large: {shape:?}");
                return Err(Error::Request { path: model.path().to_owned(), reason });
            }
            let value = self.value(info, shape, lengths, &mut Random::new(0, stream))?;
            Ok((info.name.clone(), value.into()))
        };
        (0..).zip(model.inputs()).map(make).collect()
    }

    fn value(&self, info: &TensorInfo, shape: Vec<usize>, lengths: Lengths, random: &mut Random) -> Result<Tensor> {
        let count = shape.iter().product();
        let integers = |f: &mut dyn FnMut(usize) -> i64| -> Result<Tensor> {
            let numbers: Vec<i64> = (0..count).map(f).collect();
            Ok(Tensor::new(shape.clone(), numbers)?.convert(&info.name, info.element_type)?)
        };
        let name = info.name.as_str();
        match info.element_type {
            ElementType::F32 | ElementType::F16 | ElementType::BF16 | ElementType::F64 => {
                // Noise of variance 1.
                let spread = 3f64.sqrt();
                let numbers = (0..count).map(|_| match name {
                    "timestep" => random.uniform() * TIMESTEPS,
                    _ => spread * (2.0 * random.uniform() - 1.0),
                });
                Ok(Tensor::rounded(name, shape, numbers.map(|x| x as f32).collect(), info.element_type)?)
            }
            _ if name.ends_with("mask") => integers(&mut |_| 1),
            _ if name == POSITION_IDS => {
                let length = shape.last().copied().unwrap_or(1).max(1);
                integers(&mut |i| (lengths.past + i % length) as i64)
            }
            _ if name.ends_with(INPUT_IDS) => {
                let low = SPECIAL.min(self.vocabulary - 1);
                let range = (self.vocabulary - low) as f64;
                integers(&mut |_| (low + (random.uniform() * range) as usize) as i64)
            }
            _ => integers(&mut |_| 0),
        }
    }
}

/// A mask for caches that have room for one token more: behind the `sequence` tokens of each row is a 0.
fn mask_with_room(batch: usize, sequence: usize) -> moh_runtime::Result<Tensor> {
    let row = || std::iter::repeat_n(1, sequence).chain([0]);
    Tensor::new([batch, sequence + 1], (0..batch).flat_map(|_| row()).collect::<Vec<i64>>())
}

/// Runs of a model in one phase, each as the others.
#[derive(Debug)]
pub struct Runs {
    inputs: Vec<(String, Value)>,
    caches: Vec<Handed>,
}

/// A cache that is updated in place: it goes from run to run, as when text is generated, and nobody else may hold it.
#[derive(Debug)]
struct Handed {
    input: String,
    output: usize,
    value: Value,
}

impl Runs {
    /// What the next run is given, by name.
    pub fn inputs(&self) -> impl Iterator<Item = (&str, &Value)> {
        let caches = self.caches.iter().map(|cache| (cache.input.as_str(), &cache.value));
        self.inputs.iter().map(|(name, value)| (name.as_str(), value)).chain(caches)
    }

    /// Runs the model once and gives the time that it took; `on_node` gets every node's name, operator and time, of runtimes that
    /// tell them. A run that fails takes the caches with it.
    ///
    /// # Errors
    /// As [`Model::run`].
    pub fn once(&mut self, model: &mut Model, on_node: Option<&mut OnNode<'_>>) -> Result<Duration> {
        let places: Vec<(String, usize)> =
            self.caches.iter().map(|cache| (cache.input.clone(), cache.output)).collect();
        let shared: Vec<(&str, usize)> = places.iter().map(|(input, output)| (input.as_str(), *output)).collect();
        let mut given = self.inputs.clone();
        given.extend(self.caches.drain(..).map(|cache| (cache.input, cache.value)));
        let began = Instant::now();
        let outputs = match on_node {
            Some(on_node) => model.run_timed(given, &shared, on_node),
            None => model.run_in_place(given, &shared),
        };
        let time = began.elapsed();
        let mut outputs: Vec<Option<Value>> = outputs?.into_iter().map(Some).collect();
        let handed = |(input, output): (String, usize)| {
            outputs.get_mut(output)?.take().map(|value| Handed { input, output, value })
        };
        self.caches = places.into_iter().filter_map(handed).collect();
        Ok(time)
    }
}

/// The shape of an input at these lengths.
fn dims(model: &Model, info: &TensorInfo, lengths: Lengths) -> Result<Vec<usize>> {
    let unknown = |dim: &Dim| Error::Request {
        path: model.path().to_owned(),
        reason: format!("cannot make inputs: the size of dimension {dim} of input {info} is unknown"),
    };
    let of = |(axis, dim): (usize, &Dim)| match dim {
        Dim::Fixed(size) => Ok(*size),
        Dim::Symbol(name) if name.is_empty() && axis == 0 => Ok(lengths.batch),
        Dim::Symbol(name) => {
            let terms: Option<Vec<usize>> = name.split('+').map(|term| length(term.trim(), lengths)).collect();
            terms.map(|terms| terms.into_iter().fold(0, usize::saturating_add)).ok_or_else(|| unknown(dim))
        }
    };
    info.dims.iter().enumerate().map(of).collect()
}

/// What one name, ours or that of Hugging Face's exporters, stands for.
fn length(name: &str, lengths: Lengths) -> Option<usize> {
    Some(match name {
        "batch" | "batch_size" => lengths.batch,
        "sequence" | "sequence_length" => lengths.sequence,
        "past" | "past_sequence_length" => lengths.past,
        "total" | "total_sequence_length" => lengths.past + lengths.sequence,
        "encoder_sequence" => lengths.source,
        "encoder_past" => lengths.source_past,
        number => number.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_dimensions_are_lengths() {
        let lengths = Lengths { batch: 2, sequence: 3, past: 5, source: 7, source_past: 11 };
        let of = |name: &str| length(name, lengths);
        assert_eq!(
            [of("batch"), of("sequence"), of("past"), of("encoder_past")],
            [Some(2), Some(3), Some(5), Some(11)]
        );
        assert_eq!((of("past_sequence_length"), of("1"), of("height")), (Some(5), Some(1), None));
    }
}
