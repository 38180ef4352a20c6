//! A model that was written for candle alone, with tensors named as the family names them, exports as it is.
//! `cargo run --release --example own_model -- FOLDER`.
//!
//! Its `forward` knows no crate of ours. It is a small MoH-LLaMA, which learns to count upwards. `moh-train` trains it, but any optimizer of
//! candle's would do: all that the exporter reads are the weights and a configuration.

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::{Embedding, Init, Linear, Module, VarBuilder, VarMap, embedding, linear_no_bias};
use moh_models::eager::Eager;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Parameters};
use moh_runtime::RuntimeChoice;
use moh_train::{Loss, Options, Task, Trainer, loss};
use std::path::{Path, PathBuf};

const CONFIG: &str = r#"{
    "family": "moh-llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64
}
"#;
const WIDTH: usize = 32;
const HIDDEN: usize = 48;
const LAYERS: usize = 2;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const DIM: usize = 4;
/// The first half of the heads is always on; of the others the quarter of all with the longest queries.
const SHARED: usize = HEADS / 2;
const TOP_K: usize = HEADS / 4;
const VOCABULARY: usize = 16;
const WINDOW: usize = 12;

/// A model as candle's users write them: layers that a `VarBuilder` made.
struct Counter {
    embed_tokens: Embedding,
    blocks: Vec<Block>,
    norm: Tensor,
    lm_head: Linear,
}

struct Block {
    input_norm: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    post_attention_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Counter {
    /// The names are those of the family's checkpoints.
    fn new(vb: &VarBuilder<'_>) -> candle_core::Result<Counter> {
        let norm = |vb: VarBuilder<'_>| vb.get_with_hints(WIDTH, "weight", Init::Const(1.0));
        let block = |vb: VarBuilder<'_>| {
            let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
            Ok(Block {
                input_norm: norm(vb.pp("input_layernorm"))?,
                query: linear_no_bias(WIDTH, HEADS * DIM, attention.pp("q_proj"))?,
                key: linear_no_bias(WIDTH, KV_HEADS * DIM, attention.pp("k_proj"))?,
                value: linear_no_bias(WIDTH, KV_HEADS * DIM, attention.pp("v_proj"))?,
                output: linear_no_bias(HEADS * DIM, WIDTH, attention.pp("o_proj"))?,
                post_attention_norm: norm(vb.pp("post_attention_layernorm"))?,
                gate: linear_no_bias(WIDTH, HIDDEN, mlp.pp("gate_proj"))?,
                up: linear_no_bias(WIDTH, HIDDEN, mlp.pp("up_proj"))?,
                down: linear_no_bias(HIDDEN, WIDTH, mlp.pp("down_proj"))?,
            })
        };
        let blocks = (0..LAYERS).map(|i| block(vb.pp(format!("model.layers.{i}"))));
        Ok(Counter {
            embed_tokens: embedding(VOCABULARY, WIDTH, vb.pp("model.embed_tokens"))?,
            blocks: blocks.collect::<candle_core::Result<_>>()?,
            norm: norm(vb.pp("model.norm"))?,
            lm_head: linear_no_bias(WIDTH, VOCABULARY, vb.pp("lm_head"))?,
        })
    }

    /// Logits (batch, tokens, vocabulary) of the tokens `ids` (batch, tokens).
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.embed_tokens.forward(ids)?;
        for block in &self.blocks {
            x = (&x + block.attention(&normed(&x, &block.input_norm)?)?)?;
            let h = normed(&x, &block.post_attention_norm)?;
            let hidden = (block.gate.forward(&h)?.silu()? * block.up.forward(&h)?)?;
            x = (x + block.down.forward(&hidden)?)?;
        }
        self.lm_head.forward(&normed(&x, &self.norm)?)
    }
}

/// The norm of candle-nn has no backward pass.
fn normed(x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + 1e-6)?.sqrt()?)?.broadcast_mul(weight)
}

impl Block {
    fn attention(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let heads =
            |linear: &Linear, count: usize| linear.forward(x)?.reshape((batch, tokens, count, DIM))?.transpose(1, 2);
        let query = heads(&self.query, HEADS)?;
        let mask = routed(&query)?;
        let grouped = |x: Tensor| {
            let shape = (batch, KV_HEADS, HEADS / KV_HEADS, tokens, DIM);
            x.unsqueeze(2)?.broadcast_as(shape)?.reshape((batch, HEADS, tokens, DIM))?.contiguous()
        };
        let key = grouped(rotated(&heads(&self.key, KV_HEADS)?)?)?;
        let value = grouped(heads(&self.value, KV_HEADS)?)?;
        let scores = (rotated(&query)?.contiguous()?.matmul(&key.t()?)? / (DIM as f64).sqrt())?;
        let hidden = (0..tokens).flat_map(|i| (0..tokens).map(move |j| if j > i { f32::NEG_INFINITY } else { 0.0 }));
        let scores = scores.broadcast_add(&Tensor::from_iter(hidden, x.device())?.reshape((tokens, tokens))?)?;
        // candle-nn's fused softmax has no backward pass.
        let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
        let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
        let out = weights.matmul(&value)?.broadcast_mul(&mask)?;
        self.output.forward(&out.transpose(1, 2)?.reshape((batch, tokens, HEADS * DIM))?)
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
    let mut varmap = VarMap::new();
    let mut counter = Counter::new(&VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;

    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan(&config, None)?;
    // candle's initial numbers are others in every run; these follow a seed.
    let initial = Parameters::initial(&[&model], 0, &Device::Cpu)?;
    varmap.set(initial.iter().map(|(name, var)| (name, var.as_tensor())))?;
    let vars = varmap.data().lock().map_err(|_| anyhow!("a thread that held the variables panicked"))?.clone();
    let parameters = Parameters::new(vars, &[&model], &Device::Cpu)?;
    let options = Options { steps: 150, learning_rate: 1e-2, warmup: 10, report_every: 50, ..Options::default() };
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    Trainer::open(&folder.join("training"), parameters, files, options)?.train(&mut counter, |progress| {
        eprintln!("{progress}");
    })?;

    let checkpoint = folder.join("checkpoint");
    std::fs::create_dir_all(&checkpoint)?;
    varmap.save(checkpoint.join("model.safetensors"))?;
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
