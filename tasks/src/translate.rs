//! Encoder-decoder models: a source text's tokens in, target tokens out, by beam search over a decoder with a key-value cache.

mod beam;
mod config;
mod gather;

pub use beam::{BeamOptions, Hypothesis};
pub use config::TranslationConfig;

use crate::error::{Error, Result};
use crate::task;
use gather::gather;
use moh_runtime::names::{ATTENTION_MASK, INPUT_IDS, LOGITS, PAST, PRESENT};
use moh_runtime::{Dim, ElementType, Model, Tensor, TensorInfo, Value};

const STATES: &str = "encoder_hidden_states";
const STATES_MASK: &str = "encoder_attention_mask";
const LAST_HIDDEN_STATE: &str = "last_hidden_state";
/// In the names of caches that hold the source.
const OF_SOURCE: &str = ".encoder.";

/// An encoder that takes `input_ids` and `attention_mask` and gives `last_hidden_state`, and a decoder that takes `input_ids`,
/// `encoder_hidden_states`, `encoder_attention_mask` and `past_key_values.*`, and gives `logits` and `present.*`.
#[derive(Debug)]
pub struct TranslationModel {
    encoder: Model,
    decoder: Model,
    states: usize,
    width: usize,
    states_type: ElementType,
    logits: usize,
    caches: Vec<Cache>,
}

/// A tensor of the decoder's cache: (batch, heads, length, width).
#[derive(Debug)]
struct Cache {
    input: String,
    /// Position of its successor among the outputs.
    output: usize,
    of_source: bool,
    element_type: ElementType,
    heads: usize,
    width: usize,
}

impl TranslationModel {
    /// Checks that the models are an encoder and a decoder that belong together.
    ///
    /// # Errors
    /// [`Error::Task`] naming what is missing or does not fit.
    pub fn new(encoder: Model, decoder: Model) -> Result<TranslationModel> {
        let bad_encoder = |reason| task::other_task(&encoder, "an encoder of tokens", reason);
        let input = |model: &Model, name: &str| model.inputs().iter().find(|input| input.name == name).cloned();
        let output = |model: &Model, name: &str| model.outputs().iter().position(|output| output.name == name);
        for name in [INPUT_IDS, ATTENTION_MASK] {
            if input(&encoder, name).is_none() {
                return Err(bad_encoder(format!("expected an input {name}, found {}", names(encoder.inputs()))));
            }
        }
        let Some(states) = output(&encoder, LAST_HIDDEN_STATE) else {
            let found = names(encoder.outputs());
            return Err(bad_encoder(format!("expected an output {LAST_HIDDEN_STATE}, found {found}")));
        };
        let bad = |reason| task::other_task(&decoder, "a decoder of tokens", reason);
        for name in [INPUT_IDS, STATES, STATES_MASK] {
            if input(&decoder, name).is_none() {
                return Err(bad(format!("expected an input {name}, found {}", names(decoder.inputs()))));
            }
        }
        let Some(logits) = output(&decoder, LOGITS) else {
            return Err(bad(format!("expected an output {LOGITS}, found {}", names(decoder.outputs()))));
        };
        let taken = input(&decoder, STATES).into_iter().find_map(|input| match input.dims[..] {
            [_, _, Dim::Fixed(width)] => Some((width, input.element_type)),
            _ => None,
        });
        let Some((width, states_type)) = taken else {
            return Err(bad(format!("expected {STATES} of shape (batch, length, width)")));
        };
        let given = &encoder.outputs()[states];
        if given.dims.last() != Some(&Dim::Fixed(width)) || given.element_type != states_type {
            let path = encoder.path().display();
            return Err(bad(format!("it takes {STATES} of width {width} in {states_type}, and {path} gives {given}")));
        }
        let cache = |info: &TensorInfo| {
            let rest = info.name.strip_prefix(PAST)?;
            Some(match (output(&decoder, &format!("{PRESENT}{rest}")), &info.dims[..]) {
                (Some(output), &[_, Dim::Fixed(heads), _, Dim::Fixed(width)]) => Ok(Cache {
                    input: info.name.clone(),
                    output,
                    of_source: info.name.contains(OF_SOURCE),
                    element_type: info.element_type,
                    heads,
                    width,
                }),
                _ => Err(bad(format!("expected an output {PRESENT}{rest} for the cache {info}"))),
            })
        };
        let caches = decoder.inputs().iter().filter_map(cache).collect::<Result<Vec<Cache>>>()?;
        if !caches.iter().any(|cache| cache.of_source) {
            return Err(bad(format!("expected inputs {PAST}*{OF_SOURCE}key, found {}", names(decoder.inputs()))));
        }
        Ok(TranslationModel { encoder, decoder, states, width, states_type, logits, caches })
    }

    /// The decoder.
    pub fn decoder(&self) -> &Model {
        &self.decoder
    }

    /// Vocabulary size of the decoder, if the shape of the logits is fixed.
    pub fn vocabulary(&self) -> Option<usize> {
        match self.decoder.outputs()[self.logits].dims.last() {
            Some(Dim::Fixed(vocabulary)) => Some(*vocabulary),
            _ => None,
        }
    }

    /// Translations of the tokens `source`, the best first. The source goes through the encoder once, and through the decoder's
    /// key and value projections once.
    ///
    /// # Errors
    /// [`Error::Prompt`] for an empty source, [`Error::Setting`] for options out of range, [`Error::NoLogits`],
    /// [`Error::Runtime`] where a runtime fails, [`Error::Output`]
    /// where the decoder gives no logits.
    pub fn translate(&mut self, source: &[i64], options: &BeamOptions) -> Result<Vec<Hypothesis>> {
        if source.is_empty() {
            return Err(Error::Prompt("it has no tokens".to_owned()));
        }
        let length = source.len();
        let inputs = [
            (INPUT_IDS, Tensor::new([1, length], source.to_vec())?.into()),
            (ATTENTION_MASK, Tensor::new([1, length], vec![1i64; length])?.into()),
        ];
        let states = self.encoder.run(inputs)?.swap_remove(self.states);
        let mut past: Option<Vec<Value>> = None;
        beam::search(options, |parents, tokens| {
            let rows = tokens.len();
            let (states, caches) = match &past {
                None => (states.clone(), self.empty_caches()?),
                Some(past) => {
                    let none = Tensor::zeros(self.states_type, [rows, 0, self.width])?.into();
                    let kept = self.caches.iter().zip(past);
                    (none, kept.map(|(cache, value)| cache.select(value, parents)).collect::<Result<_>>()?)
                }
            };
            let mut inputs: Vec<(&str, Value)> = vec![
                (INPUT_IDS, Tensor::new([rows, 1], tokens.to_vec())?.into()),
                (STATES, states),
                (STATES_MASK, Tensor::new([rows, length], vec![1i64; rows * length])?.into()),
            ];
            inputs.extend(self.caches.iter().map(|cache| cache.input.as_str()).zip(caches));
            let outputs = self.decoder.run(inputs)?;
            past = Some(self.caches.iter().map(|cache| outputs[cache.output].clone()).collect());
            self.rows(&outputs[self.logits], rows)
        })
    }

    fn empty_caches(&self) -> Result<Vec<Value>> {
        let empty = |cache: &Cache| Tensor::zeros(cache.element_type, [1, cache.heads, 0, cache.width]);
        Ok(self.caches.iter().map(|cache| empty(cache).map(Value::from)).collect::<moh_runtime::Result<_>>()?)
    }

    /// Logits (rows, 1, vocabulary), row by row.
    fn rows(&self, logits: &Value, rows: usize) -> Result<Vec<Vec<f32>>> {
        let bad = || Error::Output {
            path: self.decoder.path().to_owned(),
            runtime: self.decoder.runtime_name(),
            reason: format!("{LOGITS}: expected {rows} tokens' numbers, found shape {:?}", logits.shape()),
        };
        let &[found, 1, vocabulary] = logits.shape() else { return Err(bad()) };
        let numbers = logits.data()?.to_f32().filter(|_| found == rows && vocabulary > 0).ok_or_else(bad)?;
        Ok(numbers.chunks(vocabulary).map(<[f32]>::to_vec).collect())
    }
}

impl Cache {
    /// The cache of the rows that continue `parents`. That of the source is the same in every row.
    fn select(&self, value: &Value, parents: &[usize]) -> Result<Value> {
        let unchanged = parents.len() == value.shape()[0]
            && (self.of_source || parents.iter().enumerate().all(|(row, &parent)| row == parent));
        if unchanged { Ok(value.clone()) } else { gather(value, parents) }
    }
}

fn names(infos: &[TensorInfo]) -> String {
    infos.iter().map(|info| info.name.as_str()).collect::<Vec<_>>().join(", ")
}
