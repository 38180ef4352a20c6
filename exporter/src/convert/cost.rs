//! What a conversion costs before any training: how well both models predict a text.

use crate::error::Error;
use candle_core::{DType, Device, Tensor};
use moh_models::eager::Eager;
use moh_models::families::{Inputs, Port, PortDim};
use moh_models::{Checkpoint, Model};
use moh_runtime::names;
use serde::Serialize;
use std::fmt;

/// Mean cross-entropies of a text's tokens but the first, in nats, each predicted from those before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Of the dense model.
    pub dense: f64,
    /// Of the converted one.
    pub converted: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { tokens, dense, converted } = *self;
        let more = converted - dense;
        write!(
            f,
            "{converted:.4} nats per token before any training, {dense:.4} dense ({more:+.4}), over {tokens} tokens"
        )
    }
}

impl Cost {
    pub(super) fn measure(dense: &Model, converted: &Model, tokens: &[i64]) -> Result<Cost, Error> {
        let of = |model| nats_per_token(model, tokens);
        Ok(Cost { tokens: tokens.len() - 1, dense: of(dense)?, converted: of(converted)? })
    }
}

/// The part of a text that can be measured, if any can: as many tokens as the model has positions for.
///
/// # Errors
/// A token that the model does not know.
pub(super) fn text<'a>(checkpoint: &Checkpoint, tokens: &'a [i64]) -> Result<Option<&'a [i64]>, Error> {
    let config = checkpoint.config();
    let vocabulary = config.usize("vocab_size")?;
    let tokens = &tokens[..tokens.len().min(config.usize_or("max_position_embeddings", 2048)?)];
    let is_known = |id: &&i64| usize::try_from(**id).is_ok_and(|id| id < vocabulary);
    match tokens.iter().find(|id| !is_known(id)) {
        Some(id) => {
            let expected = format!("more than {id}, which is a token of the text");
            Err(config.rejects("vocab_size", expected, vocabulary.to_string()).into())
        }
        None => Ok(Some(tokens).filter(|tokens| tokens.len() > 1)),
    }
}

/// Mean cross-entropy, in nats, of `tokens` but the first, each predicted by `model`, a language model, from those before it.
///
/// candle computes it in float32 in one forward. Weights are read while it runs and none is kept. Memory grows with heads times the square of
/// the tokens.
///
/// # Errors
/// An input that a LLaMA does not have; tokens beyond the vocabulary; weights that cannot be read.
pub fn nats_per_token(model: &Model, tokens: &[i64]) -> Result<f64, Error> {
    let inputs = inputs(&model.inputs(), tokens)?;
    let logits = model.forward(&mut Eager::new().forgetting(), &inputs)?.swap_remove(0);
    let mut sum = 0.0;
    for (i, &next) in tokens.iter().enumerate().skip(1) {
        let row: Vec<f32> =
            logits.narrow(1, i - 1, 1).and_then(|row| row.flatten_all()?.to_vec1()).map_err(moh_models::Error::from)?;
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: f64 = row.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
        let of_next = usize::try_from(next).ok().and_then(|next| row.get(next));
        let of_next = of_next.ok_or(moh_models::Error::Internal("a token beyond the vocabulary"))?;
        sum += exponentials.ln() - f64::from(of_next - largest);
    }
    Ok(sum / tokens.len().saturating_sub(1).max(1) as f64)
}

/// One sequence, and nothing cached.
fn inputs(ports: &[Port], tokens: &[i64]) -> Result<Inputs<Tensor>, moh_models::Error> {
    let (count, device) = (tokens.len(), &Device::Cpu);
    let value = |port: &Port| {
        let tensor = match port.name.as_str() {
            names::INPUT_IDS => Tensor::from_slice(tokens, (1, count), device)?,
            names::ATTENTION_MASK => Tensor::ones((1, count), DType::I64, device)?,
            names::POSITION_IDS => Tensor::arange(0, count as i64, device)?.unsqueeze(0)?,
            _ => {
                let size = |dim: &PortDim| match dim {
                    PortDim::Fixed(size) => *size,
                    PortDim::Named("batch") => 1,
                    PortDim::Named(_) => 0,
                };
                Tensor::zeros(port.dims.iter().map(size).collect::<Vec<_>>(), DType::F32, device)?
            }
        };
        Ok((port.name.clone(), tensor))
    };
    Ok(Inputs::new(ports.iter().map(value).collect::<Result<Vec<_>, moh_models::Error>>()?))
}
