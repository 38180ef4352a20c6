//! Numbers in words, to be translated to digits.

use super::inputs;
use anyhow::{Result, ensure};
use candle_core::{D, DType, Tensor};
use moh_models::eager::Eager;
use moh_models::families::moa::{DECODER_CALLS, Part};
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_train::{Loss, Task, loss};
use serde_json::{Map, Value};
use std::sync::Arc;

/// fairseq's special tokens come first; then 10 digits, and the words.
pub(crate) const PADDING: i64 = 1;
pub(crate) const END: i64 = 2;
pub(crate) const FIRST_DIGIT: i64 = 4;
pub(crate) const FIRST_WORD: i64 = 14;
pub(crate) const WORDS: [&str; 29] = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
    "hundred",
    "thousand",
];
const BATCH: usize = 64;
/// Every so manieth number is not trained on.
const HELD_OUT: usize = 13;
/// MoA's factors, as in its paper's best model.
const SWITCH: f64 = 0.01;
const Z: f64 = 0.001;

/// A model that translates numbers in words to digits.
pub(crate) struct Numbers {
    encoder: Model,
    decoder: Model,
}

impl Numbers {
    /// The parts of a MoA model of that configuration.
    pub(crate) fn new(config: &Map<String, Value>) -> Result<Numbers> {
        let part = |part: Part| {
            let mut config = Config::new("config.json", config.clone());
            config.set("part", part.name().into());
            // No caches are given in a training.
            config.set(DECODER_CALLS, "first".into());
            Ok::<_, moh_models::Error>(Model::plan(&config, None)?.0)
        };
        Ok(Numbers { encoder: part(Part::Encoder)?, decoder: part(Part::Decoder)? })
    }

    /// Encoder and decoder.
    pub(crate) fn models(&self) -> [&Model; 2] {
        [&self.encoder, &self.decoder]
    }

    /// Logits (numbers, length, vocabulary) for each digit after those before it, and the digits; -1 after the end.
    fn logits(&self, ops: &mut Eager, numbers: &[usize]) -> moh_train::Result<(Tensor, Tensor)> {
        let device = ops.device().clone();
        let padded = |rows: Vec<Vec<i64>>, padding: i64| {
            let width = rows.iter().map(Vec::len).max().unwrap_or(0);
            let cells = rows.iter().flat_map(|row| (0..width).map(|i| row.get(i).copied().unwrap_or(padding)));
            Tensor::from_iter(cells, &device)?.reshape((rows.len(), width))
        };
        let source = padded(numbers.iter().map(|&n| words(n)).collect(), PADDING)?;
        let mask = source.ne(PADDING)?.to_dtype(DType::I64)?;
        let given = inputs([("input_ids", source), ("attention_mask", mask.clone())]);
        let states = self.encoder.forward(ops, &given)?.swap_remove(0);
        // The decoder begins with the token that ends texts, as fairseq's.
        let before = |n: usize| -> Vec<i64> {
            let digits = digits(n);
            [END].into_iter().chain(digits[..digits.len() - 1].iter().copied()).collect()
        };
        let given = inputs([
            ("input_ids", padded(numbers.iter().map(|&n| before(n)).collect(), PADDING)?),
            ("encoder_hidden_states", states),
            ("encoder_attention_mask", mask),
        ]);
        let logits = self.decoder.forward(ops, &given)?.swap_remove(0);
        // Padding does not count.
        Ok((logits, padded(numbers.iter().map(|&n| digits(n)).collect(), -1)?))
    }

    /// Of so many held-out numbers, how many are right in every digit, and nats per digit.
    ///
    /// A number whose every digit is the likeliest after the right ones before it is what greedy decoding gives.
    pub(crate) fn measure(&self, parameters: &Arc<Parameters>, count: usize) -> Result<(usize, f64)> {
        ensure!(count.is_multiple_of(BATCH), "whole batches of {BATCH}");
        let (mut rng, mut right, mut sum) = (Rng::new(1), 0, 0.0);
        for _ in 0..count / BATCH {
            let numbers: Vec<usize> = (0..BATCH).map(|_| number(&mut rng, true)).collect();
            let mut ops = Eager::new().with_parameters(parameters.clone());
            let (logits, targets) = self.logits(&mut ops, &numbers)?;
            let nats = loss::cross_entropy(&logits, &targets, 0.0)?.to_scalar::<f32>()?;
            sum += f64::from(nats) * BATCH as f64;
            let found: Vec<Vec<u32>> = logits.argmax(D::Minus1)?.to_vec2()?;
            for (found, target) in found.iter().zip(targets.to_vec2::<i64>()?) {
                right += usize::from(found.iter().zip(&target).all(|(&f, &t)| t < 0 || i64::from(f) == t));
            }
        }
        Ok((right, sum / count as f64))
    }
}

/// The words of a number from 1 to 999,999.
pub(crate) fn words(n: usize) -> Vec<i64> {
    let word = |i: usize| FIRST_WORD + i as i64;
    let below_thousand = |n: usize, out: &mut Vec<i64>| {
        if n >= 100 {
            out.extend([word(n / 100 - 1), word(27)]);
        }
        match n % 100 {
            0 => {}
            n @ 1..20 => out.push(word(n - 1)),
            n => {
                out.push(word(17 + n / 10));
                out.extend((n % 10 > 0).then(|| word(n % 10 - 1)));
            }
        }
    };
    let mut out = Vec::new();
    if n >= 1000 {
        below_thousand(n / 1000, &mut out);
        out.push(word(28));
    }
    below_thousand(n % 1000, &mut out);
    out.push(END);
    out
}

/// The digits of a number, and the end.
pub(crate) fn digits(n: usize) -> Vec<i64> {
    n.to_string().bytes().map(|digit| FIRST_DIGIT + i64::from(digit - b'0')).chain([END]).collect()
}

/// A number of any length, as often of each.
pub(crate) fn number(rng: &mut Rng, held_out: bool) -> usize {
    loop {
        let least = 10usize.pow(rng.below(6) as u32);
        let n = least + rng.below(9 * least);
        if n.is_multiple_of(HELD_OUT) == held_out {
            return n;
        }
    }
}

impl Task for Numbers {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let numbers: Vec<usize> = (0..BATCH).map(|_| number(rng, false)).collect();
        let (logits, targets) = self.logits(ops, &numbers)?;
        let mut parts = vec![("digits", 1.0, loss::cross_entropy(&logits, &targets, 0.05)?)];
        for layer in ops.routing() {
            let experts = layer.experts()?;
            parts.extend([("switch", SWITCH, experts.switch), ("z", Z, experts.z)]);
        }
        let sum = Loss::sum(parts)?;
        Ok(Loss { parts: sum.parts.into_iter().take(3).collect(), ..sum })
    }
}
