//! A model that was written for candle alone, with tensors named as the family names them, exports as it is.
//! `cargo run --release --example own_model -- FOLDER`.
//!
//! Its `forward` knows no crate of ours. It is a small MoH-LLaMA, which learns to count upwards. `moh-train` trains it, but any optimizer of
//! candle's would do: all that the exporter reads are the weights and a configuration.

use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor, Var};
use moh_models::eager::Eager;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_runtime::RuntimeChoice;
use moh_train::{Loss, Options, Task, Trainer, loss};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"{
    "family": "moh-llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64
}
"#;
const LAYERS: usize = 2;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const DIM: usize = 4;
/// The first half of the heads is always on; of the others the quarter of all with the longest queries.
const SHARED: usize = HEADS / 2;
const TOP_K: usize = HEADS / 4;
const VOCABULARY: usize = 16;
const WINDOW: usize = 12;

/// The weights by name, as candle-nn's `VarMap` has them.
struct Counter {
    vars: HashMap<String, Var>,
}

impl Counter {
    fn get(&self, name: &str) -> candle_core::Result<&Tensor> {
        self.vars.get(name).map(Var::as_tensor).ok_or_else(|| candle_core::Error::Msg(format!("no tensor {name}")))
    }

    fn linear(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        x.broadcast_matmul(&self.get(&format!("{name}.weight"))?.t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> candle_core::Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean + 1e-6)?.sqrt()?)?.broadcast_mul(self.get(&format!("{name}.weight"))?)
    }

    /// Logits (batch, tokens, vocabulary) of the tokens `ids` (batch, tokens).
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, tokens) = ids.dims2()?;
        let embedded = self.get("model.embed_tokens.weight")?.index_select(&ids.flatten_all()?, 0)?;
        let mut x = embedded.reshape((batch, tokens, ()))?;
        for i in 0..LAYERS {
            let path = |name: &str| format!("model.layers.{i}.{name}");
            x = (&x + self.attention(&self.norm(&x, &path("input_layernorm"))?, &path("self_attn"))?)?;
            let h = self.norm(&x, &path("post_attention_layernorm"))?;
            let gate = self.linear(&h, &path("mlp.gate_proj"))?.silu()?;
            let hidden = (gate * self.linear(&h, &path("mlp.up_proj"))?)?;
            x = (x + self.linear(&hidden, &path("mlp.down_proj"))?)?;
        }
        self.linear(&self.norm(&x, "model.norm")?, "lm_head")
    }

    fn attention(&self, x: &Tensor, path: &str) -> candle_core::Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let heads = |name: &str, count: usize| {
            self.linear(x, &format!("{path}.{name}"))?.reshape((batch, tokens, count, DIM))?.transpose(1, 2)
        };
        let query = heads("q_proj", HEADS)?;
        let mask = routed(&query)?;
        let grouped = |x: Tensor| {
            let shape = (batch, KV_HEADS, HEADS / KV_HEADS, tokens, DIM);
            x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, HEADS, tokens, DIM))?.contiguous()
        };
        let key = grouped(rotated(&heads("k_proj", KV_HEADS)?)?)?;
        let value = grouped(heads("v_proj", KV_HEADS)?)?;
        let scores = (rotated(&query)?.contiguous()?.matmul(&key.t()?)? / (DIM as f64).sqrt())?;
        let hidden = (0..tokens).flat_map(|i| (0..tokens).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
        let scores = scores.broadcast_add(&Tensor::from_iter(hidden, x.device())?.reshape((tokens, tokens))?)?;
        // Of the softmax of candle-nn that has a gradient.
        let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let out = weights.matmul(&value)?.broadcast_mul(&mask)?;
        self.linear(&out.transpose(1, 2)?.reshape((batch, tokens, HEADS * DIM))?, &format!("{path}.o_proj"))
    }
}

/// Gates (batch, heads, tokens, 1): 1 for shared heads and those with the longest queries, else 0.
fn routed(query: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, heads, tokens, _) = query.dims4()?;
    let norms = query.sqr()?.sum(D::Minus1)?.transpose(1, 2)?.flatten_all()?.to_vec1::<f32>()?;
    let mut gates = vec![1f32; norms.len()];
    for (norms, gates) in norms.chunks(heads).zip(gates.chunks_mut(heads)) {
        let mut order: Vec<usize> = (SHARED..heads).collect();
        order.sort_by(|&a, &b| norms[b].total_cmp(&norms[a]));
        order[TOP_K..].iter().for_each(|&head| gates[head] = 0.0);
    }
    Tensor::from_vec(gates, (batch, tokens, heads), query.device())?.transpose(1, 2)?.unsqueeze(D::Minus1)
}

/// Rotary position embedding of (batch, heads, tokens, dim).
fn rotated(x: &Tensor) -> candle_core::Result<Tensor> {
    let (tokens, half) = (x.dim(2)?, DIM / 2);
    let angle = |(token, i): (usize, usize)| token as f32 * 10_000f32.powf(-((i % half) as f32) / half as f32);
    let angles: Vec<f32> = (0..tokens).flat_map(|token| (0..DIM).map(move |i| angle((token, i)))).collect();
    let angles = Tensor::from_vec(angles, (tokens, DIM), x.device())?;
    let turned = Tensor::cat(&[x.narrow(3, half, half)?.neg()?, x.narrow(3, 0, half)?], 3)?;
    x.broadcast_mul(&angles.cos()?)? + turned.broadcast_mul(&angles.sin()?)?
}

impl Task for Counter {
    fn loss(&mut self, _: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        const BATCH: usize = 16;
        let begin: Vec<usize> = (0..BATCH).map(|_| rng.below(VOCABULARY)).collect();
        let ids = |shift: usize| {
            let ids =
                begin.iter().flat_map(|begin| (0..WINDOW).map(move |i| ((begin + i + shift) % VOCABULARY) as i64));
            Tensor::from_iter(ids, &Device::Cpu)?.reshape((BATCH, WINDOW))
        };
        Loss::sum(vec![("count", 1.0, loss::cross_entropy(&self.forward(&ids(0)?)?, &ids(1)?, 0.0)?)])
    }
}

fn main() -> Result<()> {
    let folder: PathBuf = std::env::args_os().nth(1).context("usage: own_model FOLDER")?.into();
    // Initial numbers for the names and shapes of a configuration. A model's own `VarMap` does as well.
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let parameters = Parameters::initial(&[&Model::plan(&config, None)?.0], 0, &Device::Cpu)?;
    let mut counter = Counter { vars: parameters.iter().map(|(name, var)| (name.to_owned(), var.clone())).collect() };

    let options = Options { steps: 150, learning_rate: 1e-2, warmup: 10, report_every: 50, ..Options::default() };
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let shared = Parameters::new(counter.vars.clone(), &Device::Cpu)?;
    Trainer::open(&folder.join("training"), shared, files, options)?.train(&mut counter, |progress| {
        eprintln!("{progress}");
    })?;

    // What `VarMap::save` does.
    let checkpoint = folder.join("checkpoint");
    std::fs::create_dir_all(&checkpoint)?;
    let tensors: HashMap<&str, Tensor> =
        counter.vars.iter().map(|(name, var)| (name.as_str(), var.as_detached_tensor())).collect();
    candle_core::safetensors::save(&tensors, checkpoint.join("model.safetensors"))?;
    std::fs::write(checkpoint.join("config.json"), CONFIG)?;

    let path = folder.join("model.onnx");
    let options = moh_export::Options { force: true, ..Default::default() };
    println!("{}", moh_export::export(&checkpoint, &path, &options)?);
    compare(&counter, &path)
}

/// The exported file in tract gives what the model's own forward gives.
fn compare(counter: &Counter, path: &Path) -> Result<()> {
    let options = moh_runtime::Options { runtime: RuntimeChoice::Tract, ..moh_runtime::Options::default() };
    let mut model = moh_runtime::Model::load(path, &options)?;
    let ids: Vec<i64> = (0..WINDOW).map(|i| ((5 + i) % VOCABULARY) as i64).collect();
    let mut inputs = vec![
        ("input_ids".to_owned(), moh_runtime::Tensor::new([1, WINDOW], ids.clone())?.into()),
        ("attention_mask".to_owned(), moh_runtime::Tensor::new([1, WINDOW], vec![1i64; WINDOW])?.into()),
        (
            "position_ids".to_owned(),
            moh_runtime::Tensor::new([1, WINDOW], (0..WINDOW as i64).collect::<Vec<_>>())?.into(),
        ),
    ];
    for i in 0..LAYERS {
        for kind in ["key", "value"] {
            let empty = moh_runtime::Tensor::new([1, KV_HEADS, 0, DIM], Vec::<f32>::new())?;
            inputs.push((format!("past_key_values.{i}.{kind}"), empty.into()));
        }
    }
    let outputs = model.run(inputs)?;
    let found = outputs[0].as_slice::<f32>()?;
    let ids = Tensor::from_vec(ids, (1, WINDOW), &Device::Cpu)?;
    let own = counter.forward(&ids)?.flatten_all()?.to_vec1::<f32>()?;
    let worst = found.iter().zip(&own).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    ensure!(found.len() == own.len() && worst < 1e-3, "logits of the file differ by {worst}");
    let last = &found[found.len() - VOCABULARY..];
    let next = (0..VOCABULARY).max_by(|&a, &b| last[a].total_cmp(&last[b])).context("a token")?;
    println!(
        "the file's logits differ from the model's by {worst:.1e}; after {} comes {next}",
        (4 + WINDOW) % VOCABULARY
    );
    Ok(())
}
