//! A language model's text: Shakespeare's plays.

use super::Arguments;
use anyhow::Result;
use candle_core::{DType, Tensor};
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_models::sample::Rng;
use moh_models::{Model, Parameters, routing};
use moh_tasks::text::load_tokenizer;
use moh_train::{Loss, Task};
use std::sync::Arc;

pub(crate) const TOKENIZER: &str = include_str!("../../checkpoints/shakespeare-moh-llama/tokenizer.json");
/// Sequences in a batch.
const BATCH: usize = 16;
/// The factor of the load-balance loss.
const BALANCE: f64 = 0.01;

/// A model that predicts the next tokens of a text.
pub(crate) struct Text<'a> {
    pub(crate) model: &'a Model,
    pub(crate) ids: &'a [i64],
    /// Tokens that are predicted in each sequence.
    pub(crate) window: usize,
}

impl Text<'_> {
    /// Nats per token of the windows that begin at `starts`.
    fn predict(&self, ops: &mut Eager, starts: &[usize]) -> moh_train::Result<Tensor> {
        let (batch, window, device) = (starts.len(), self.window, ops.device().clone());
        let windows = |shift: usize| {
            let ids = starts.iter().flat_map(|start| &self.ids[start + shift..start + shift + window]).copied();
            Tensor::from_iter(ids, &device)?.reshape((batch, window))
        };
        let positions = Tensor::arange(0, window as i64, &device)?.unsqueeze(0)?.repeat((batch, 1))?;
        let mut values = vec![
            ("input_ids".to_owned(), windows(0)?),
            ("attention_mask".to_owned(), Tensor::ones((batch, window), DType::I64, &device)?),
            ("position_ids".to_owned(), positions),
        ];
        // Nothing is cached in a training.
        for (i, layer) in self.model.layers().iter().enumerate() {
            for kind in ["key", "value"] {
                let empty = Tensor::zeros((batch, layer.kv_num_heads, 0, layer.head_dim), DType::F32, &device)?;
                values.push((format!("past_key_values.{i}.{kind}"), empty));
            }
        }
        let logits = self.model.forward(ops, &Inputs::new(values))?.swap_remove(0);
        moh_train::loss::cross_entropy(&logits, &windows(1)?, 0.0)
    }

    /// Nats per token of the text's first `batches`.
    pub(crate) fn measure(&self, parameters: &Arc<Parameters>, batches: usize) -> Result<f64> {
        let last = self.ids.len() - self.window;
        let starts: Vec<usize> = (0..last).step_by(self.window).take(batches * BATCH).collect();
        let mut sum = 0.0;
        for starts in starts.chunks(BATCH) {
            let mut ops = Eager::new().with_parameters(parameters.clone());
            sum += f64::from(self.predict(&mut ops, starts)?.to_scalar::<f32>()?) * starts.len() as f64;
        }
        Ok(sum / starts.len() as f64)
    }
}

impl Task for Text<'_> {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        let starts: Vec<usize> = (0..BATCH).map(|_| rng.below(self.ids.len() - self.window)).collect();
        let text = self.predict(ops, &starts)?;
        let mut parts = vec![("text", 1.0, text)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", BALANCE, balance)));
        Loss::sum(parts)
    }
}

/// The text's tokens: those to train on, and the last twentieth.
pub(crate) fn tokens(arguments: &Arguments) -> Result<(Vec<i64>, Vec<i64>)> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("tokenizer.json"), TOKENIZER)?;
    let tokenizer = load_tokenizer(folder.path(), None)?;
    let mut ids = Vec::new();
    for paragraph in arguments.text("shakespeare.txt")?.split_inclusive("\n\n") {
        let encoding = tokenizer.encode(paragraph, false).map_err(|error| anyhow::anyhow!("{error}"))?;
        ids.extend(encoding.into_iter().map(i64::from));
    }
    let held_out = ids.split_off(ids.len() - ids.len() / 20);
    anyhow::ensure!(held_out.len() > 1024, "shakespeare.txt: expected more than {} tokens", 20 * 1024);
    Ok((ids, held_out))
}
