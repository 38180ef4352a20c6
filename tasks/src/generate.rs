//! Language models with a key-value cache: prompts in, tokens out.

mod batch;
mod cache;
mod config;
mod interface;
mod logits;
mod prompts;
mod sampling;
mod score;
mod stop;
mod text;

pub use batch::{Batch, CacheSize, Reading, SequenceId};
pub use config::GenerationConfig;
pub use logits::Logits;
pub use prompts::Prompts;
pub use sampling::{Chooser, Sampling};
pub use score::Score;
pub use stop::StopTexts;
pub use text::TextStream;

use crate::error::{Error, Result};
use crate::task;
use cache::Cache;
use interface::Interface;
use moh_runtime::names::{ATTENTION_MASK, CACHE, IN_PLACE, INPUT_IDS, POSITION_IDS};
use moh_runtime::{Dim, Model, Tensor, Value};
use prompts::Sequences;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Tokens of prompts that are computed at a time, if nothing else is asked for: enough to keep the processor busy. What a run needs memory
/// for, logits above all, grows with them.
const PART: usize = 512;

/// When to stop, and what to keep.
#[derive(Debug, Clone, Default)]
pub struct GenerateOptions<'a> {
    /// The most tokens to generate for a prompt.
    pub max_tokens: usize,
    /// Tokens that end a sequence; they are part of it.
    pub stop: &'a [i64],
    /// How tokens are drawn; `None`: the most probable one each time, the lowest id among equals.
    pub sampling: Option<Sampling>,
    /// Whether to keep the logits that each token was taken from.
    pub keep_logits: bool,
    /// Tokens of the prompts, over all of them, that are computed at a time; `None`: 512.
    pub part: Option<usize>,
}

/// The continuation of a batch of prompts.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The new tokens of every prompt, up to and including its stop token.
    pub tokens: Vec<Vec<i64>>,
    /// (batch, steps, vocabulary) float32, if `keep_logits` was set; undefined after a sequence's stop token.
    pub logits: Option<Tensor>,
    /// Time of the runs on the prompts, until the first token.
    pub prefill: Duration,
    /// Time of the runs after it, one new token per sequence each.
    pub decode: Duration,
    /// Number of those runs.
    pub decode_steps: usize,
}

/// A model that takes `input_ids`, `attention_mask`, perhaps `position_ids`, and `past_key_values.*`, and gives `logits` and
/// `present.*`: the names of Hugging Face's exporters.
#[derive(Debug)]
pub struct LanguageModel {
    model: Model,
    interface: Interface,
}

impl LanguageModel {
    /// Checks that `model` is a language model.
    ///
    /// # Errors
    /// As [`LanguageModel::check`].
    pub fn new(model: Model) -> Result<LanguageModel> {
        let interface = LanguageModel::interface(&model)?;
        Ok(LanguageModel { model, interface })
    }

    /// Whether `model` is a language model.
    ///
    /// # Errors
    /// [`Error::Task`] naming the first input or output that is missing or unexpected.
    pub fn check(model: &Model) -> Result<()> {
        LanguageModel::interface(model).map(drop)
    }

    fn interface(model: &Model) -> Result<Interface> {
        let in_place = model.metadata().get(CACHE).is_some_and(|cache| cache == IN_PLACE);
        let interface = Interface::of(model.inputs(), model.outputs(), in_place);
        interface.map_err(|reason| task::other_task(model, "a language model", reason))
    }

    /// Whether the cache is updated in place, with a length for each sequence.
    pub fn is_in_place(&self) -> bool {
        self.interface.in_place
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Vocabulary size, if the shape of the logits is fixed.
    pub fn vocabulary(&self) -> Option<usize> {
        match self.model.outputs()[self.interface.logits].dims.last() {
            Some(Dim::Fixed(vocabulary)) => Some(*vocabulary),
            _ => None,
        }
    }

    /// What its cache takes in a [`Batch`].
    pub fn cache_size(&self) -> CacheSize {
        let cache = &self.interface.cache;
        let token = cache.iter().map(|entry| entry.heads * entry.width * entry.element_type.size()).sum();
        CacheSize { token, tensors: cache.len(), in_place: self.interface.in_place }
    }

    /// The model, to run it otherwise or to end its profile.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Continues every prompt. Random tokens of a sequence depend on the seed, its place in the batch and its logits alone.
    ///
    /// `on_step` sees every step's tokens, one a prompt, as soon as they are known (`None` for a prompt that has ended), and
    /// may break off.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails, [`Error::Output`] where the logits are not numbers, [`Error::Setting`] for
    /// sampling options out of range.
    pub fn generate(
        &mut self,
        prompts: &Prompts,
        options: &GenerateOptions<'_>,
        mut on_step: impl FnMut(&[Option<i64>]) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let choosers = (0..).take(prompts.batch()).map(|row| Chooser::new(options.sampling.clone(), row));
        let mut choosers = choosers.collect::<Result<Vec<Chooser>>>()?;
        let mut choose = |(row, logits): (usize, &Logits)| choosers[row].choose(&logits.get());
        let mut tokens: Vec<Vec<i64>> = vec![Vec::new(); prompts.batch()];
        let ended = |sequence: &Vec<i64>| sequence.last().is_some_and(|token| options.stop.contains(token));
        let mut kept = Vec::new();
        let mut times = Vec::new();
        let part = options.part.unwrap_or(PART);
        let mut sequences = Sequences::start(prompts, part);
        let mut cache = Cache::new(self, prompts, options.max_tokens)?;
        while times.len() < options.max_tokens {
            let began = Instant::now();
            let mut outputs = self.step(&sequences, &mut cache)?;
            while sequences.read_on(part) {
                cache.take(&self.interface, outputs);
                outputs = self.step(&sequences, &mut cache)?;
            }
            let logits = self.last_logits(&outputs[self.interface.logits], sequences.batch(), sequences.length())?;
            let next = logits.iter().enumerate().map(&mut choose).collect::<Option<Vec<i64>>>();
            let next = next.ok_or_else(|| self.bad_logits("none is a number".to_owned()))?;
            times.push(began.elapsed());
            if options.keep_logits {
                kept.push(logits.iter().map(|logits| logits.get().into_owned()).collect::<Vec<Vec<f32>>>());
            }
            let step: Vec<Option<i64>> =
                tokens.iter().zip(&next).map(|(sequence, &token)| (!ended(sequence)).then_some(token)).collect();
            for (sequence, token) in tokens.iter_mut().zip(&step) {
                sequence.extend(token);
            }
            if on_step(&step).is_break() || tokens.iter().all(ended) {
                break;
            }
            cache.take(&self.interface, outputs);
            sequences.advance(next);
        }
        let logits = options.keep_logits.then(|| by_sequence(&kept, prompts.batch())).transpose()?;
        let prefill = times.first().copied().unwrap_or_default();
        let decode = times.iter().skip(1).sum();
        Ok(Generated { tokens, logits, prefill, decode, decode_steps: times.len().saturating_sub(1) })
    }

    /// All outputs of the model for prompts, with an empty cache.
    ///
    /// # Errors
    /// [`Error::Runtime`] where the runtime fails.
    pub fn outputs(&mut self, prompts: &Prompts) -> Result<Vec<Value>> {
        let mut cache = Cache::new(self, prompts, 0)?;
        self.step(&Sequences::start(prompts, usize::MAX), &mut cache)
    }

    fn step(&mut self, sequences: &Sequences<'_>, cache: &mut Cache) -> Result<Vec<Value>> {
        let grows = cache.grow(sequences.total());
        let mask = sequences.attention_mask(cache.capacity().filter(|_| grows))?;
        let mut inputs = vec![(INPUT_IDS.to_owned(), sequences.input_ids()?.into())];
        inputs.push((ATTENTION_MASK.to_owned(), mask.into()));
        if self.interface.takes_positions {
            inputs.push((POSITION_IDS.to_owned(), sequences.position_ids()?.into()));
        }
        let names = self.interface.cache.iter().map(|entry| entry.input.clone());
        inputs.extend(names.zip(cache.give()));
        if cache.capacity().is_none() || grows {
            return Ok(self.model.run(inputs)?);
        }
        let shared = self.interface.cache.iter().map(|entry| (entry.input.as_str(), entry.output));
        Ok(self.model.run_in_place(inputs, &shared.collect::<Vec<_>>())?)
    }

    /// The logits of every sequence's last token, where so many sequences have so many new tokens each.
    fn last_logits(&self, logits: &Value, sequences: usize, tokens: usize) -> Result<Vec<Logits>> {
        self.rows(logits, [sequences, tokens], (0..sequences).map(|sequence| sequence * tokens + tokens - 1))
    }

    /// The logits of such tokens, counted over `expected` sequences of as many tokens each.
    fn rows(&self, logits: &Value, expected: [usize; 2], tokens: impl Iterator<Item = usize>) -> Result<Vec<Logits>> {
        let &[batch, length, vocabulary] = logits.shape() else {
            return Err(self.bad_logits(format!("expected 3 dimensions, found {:?}", logits.shape())));
        };
        if [batch, length] != expected {
            return Err(self.bad_logits(format!("expected {expected:?} tokens, found shape {:?}", logits.shape())));
        }
        let row = |token: usize| Ok(Logits::new(logits, token * vocabulary..(token + 1) * vocabulary)?);
        let rows = tokens.map(row).collect::<Result<Option<Vec<Logits>>>>()?;
        rows.ok_or_else(|| self.bad_logits(format!("expected a floating-point type, found {}", logits.element_type())))
    }

    fn bad_logits(&self, reason: String) -> Error {
        let runtime = self.model.runtime_name();
        Error::Output { path: self.model.path().to_owned(), runtime, reason: format!("logits: {reason}") }
    }
}

/// Steps of (batch, vocabulary) as one tensor of (batch, steps, vocabulary).
fn by_sequence(steps: &[Vec<Vec<f32>>], batch: usize) -> Result<Tensor> {
    let vocabulary = steps.first().and_then(|step| step.first()).map_or(0, Vec::len);
    let rows = (0..batch).flat_map(|sequence| steps.iter().map(move |step| &step[sequence]));
    let data: Vec<f32> = rows.flatten().copied().collect();
    Ok(Tensor::new([batch, steps.len(), vocabulary], data)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn logits_are_gathered_by_sequence() {
        let steps = [vec![vec![1.0, 2.0], vec![3.0, 4.0]], vec![vec![5.0, 6.0], vec![7.0, 8.0]]];
        let expected = Tensor::new([2, 2, 2], vec![1f32, 2.0, 5.0, 6.0, 3.0, 4.0, 7.0, 8.0]).unwrap();
        assert_eq!(by_sequence(&steps, 2).unwrap(), expected);
    }
}
