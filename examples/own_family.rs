//! A model family outside of the project: trained, exported and run without a change to any crate of ours.
//! `cargo run --release --example own_family -- FOLDER`.
//!
//! It is a classifier of texts: one layer of MoH attention without an order of the tokens, and the mean. It learns which of four letters
//! is the most frequent.

use anyhow::{Context, Result};
use candle_core::Tensor;
use moh_models::checkpoint::{Checkpoint, Config, Loader, Weight};
use moh_models::eager::Eager;
use moh_models::families::{Family, Inputs, Layer, Port, PortDim, Sizes, Workload};
use moh_models::heads::{HeadCounts, HeadSet};
use moh_models::layers::HeadLinear;
use moh_models::ops::{Argument, Linear, Ops, Reduce, Type};
use moh_models::router::{TwoStage, load_linear};
use moh_models::sample::{Rng, Sample};
use moh_models::{Model, Parameters, routing};
use moh_operators::{RoutedAttention, routed_attention};
use moh_runtime::RuntimeChoice;
use moh_train::{Loss, Options, Task, Trainer, loss};
use std::path::{Path, PathBuf};

const NAME: &str = "most-frequent";
const CONFIG: &str = r#"{
    "family": "most-frequent", "letters": 4, "width": 32, "num_heads": 4, "shared_head": 1, "routed_head": 2
}
"#;

/// The weights, and what the configuration says.
struct MostFrequent {
    letters: usize,
    head_dim: usize,
    embedding: Weight,
    router: TwoStage,
    query: HeadLinear,
    key: Linear,
    value: Linear,
    out: HeadLinear,
    classes: Linear,
}

const DIMS: [PortDim; 2] = [PortDim::Named("batch"), PortDim::Named("sequence")];

impl Family for MostFrequent {
    fn load(_name: &str, checkpoint: &Checkpoint) -> moh_models::error::Result<MostFrequent> {
        let config = checkpoint.config();
        let (letters, width) = (config.size("letters", 1 << 16)?, config.size("width", 1 << 16)?);
        let num_heads = config.size("num_heads", 1 << 10)?;
        let counts = HeadCounts {
            num_heads,
            num_shared_heads: config.usize("shared_head")?,
            top_k: config.usize("routed_head")?,
        };
        counts.check().map_err(|found| config.rejects("routed_head", "counts that make a router", found))?;
        let mut loader = Loader::new(checkpoint);
        let l = &mut loader;
        let family = MostFrequent {
            letters,
            head_dim: width / num_heads,
            embedding: l.weight("embedding.weight", &[letters, width]),
            router: TwoStage::load(l, "attn", width, HeadSet::first(counts)),
            query: load_linear(l, "attn.q", width, width, true).over_heads(num_heads),
            key: load_linear(l, "attn.k", width, width, true),
            value: load_linear(l, "attn.v", width, width, true),
            out: load_linear(l, "attn.out", width, width, true).over_heads(num_heads),
            classes: load_linear(l, "classes", letters, width, true),
        };
        loader.finish(|_| false)?;
        Ok(family)
    }

    fn layers(&self) -> Vec<Layer> {
        let heads = self.router.heads().counts();
        vec![Layer { path: "attn".to_owned(), heads, kv_num_heads: heads.num_heads, head_dim: self.head_dim }]
    }

    fn inputs(&self) -> Vec<Port> {
        vec![Port { name: "input_ids".to_owned(), ty: Type::I64, dims: DIMS.to_vec() }]
    }

    fn outputs(&self) -> Vec<Port> {
        let dims = vec![DIMS[0], PortDim::Fixed(self.letters)];
        vec![Port { name: "logits".to_owned(), ty: Type::Model, dims }]
    }

    fn workload(&self) -> Workload {
        Workload { sizes: vec![("batch", 1), ("sequence", 16)], tokens: 16 }
    }

    fn samples(&self, _sizes: &Sizes) -> Vec<Vec<Sample>> {
        vec![vec![Rng::new(0).ids("input_ids", &[2, 9], self.letters)]]
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> moh_models::error::Result<Vec<O::Value>> {
        let x = ops.embedding(&self.embedding, &inputs.get("input_ids")?)?;
        let attended = ops.scoped("attn", |ops| {
            let gates = self.router.forward(ops, &x)?;
            let query = self.query.project(ops, &x, &gates)?;
            let (key, value) = (ops.linear(&x, &self.key)?, ops.linear(&x, &self.value)?);
            let num_heads = self.query.num_heads;
            let scale = (self.head_dim as f32).powf(-0.5);
            let attributes =
                routed_attention::Attributes { num_heads, kv_num_heads: num_heads, scale, is_causal: false };
            let inputs = routed_attention::Inputs {
                query: Argument::Value(&query),
                key: Argument::Value(&key),
                value: Argument::Value(&value),
                head_gates: Argument::Value(&gates),
                attn_bias: None,
            };
            let heads = ops.operator::<RoutedAttention>(attributes, &inputs)?;
            self.out.combine(ops, &heads, &gates)
        })?;
        let x = ops.add(&x, &attended)?;
        let mean = ops.reduce(Reduce::Mean, &x, &[1])?;
        let logits = ops.linear(&mean, &self.classes)?;
        Ok(vec![ops.reshape(&logits, &[0, self.letters as i64])?])
    }
}

const LENGTH: usize = 9;

/// A text, and its most frequent letter: two letters with as many are not drawn.
fn text(rng: &mut Rng) -> (Vec<i64>, usize) {
    loop {
        let text: Vec<i64> = (0..LENGTH).map(|_| rng.below(4) as i64).collect();
        let mut counts: Vec<(usize, usize)> =
            (0..4).map(|letter| (text.iter().filter(|&&other| other == letter as i64).count(), letter)).collect();
        counts.sort_unstable();
        if counts[3].0 > counts[2].0 {
            return (text, counts[3].1);
        }
    }
}

struct Letters {
    model: Model,
}

impl Task for Letters {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> moh_train::Result<Loss> {
        const BATCH: usize = 32;
        let texts: Vec<(Vec<i64>, usize)> = (0..BATCH).map(|_| text(rng)).collect();
        let device = ops.device().clone();
        let ids = Tensor::from_iter(texts.iter().flat_map(|(text, _)| text.iter().copied()), &device)?;
        let labels = Tensor::from_iter(texts.iter().map(|(_, letter)| *letter as i64), &device)?;
        let inputs = Inputs::new([("input_ids".to_owned(), ids.reshape((BATCH, LENGTH))?)]);
        let logits = self.model.forward(ops, &inputs)?.swap_remove(0);
        let mut parts = vec![("letters", 1.0, loss::cross_entropy(&logits, &labels, 0.0)?)];
        parts.extend(routing::load_balance(ops.routing())?.map(|balance| ("balance", 0.01, balance)));
        Loss::sum(parts)
    }
}

fn main() -> Result<()> {
    let folder: PathBuf = std::env::args_os().nth(1).context("usage: own_family FOLDER")?.into();
    let config = Config::new("config.json", serde_json::from_str(CONFIG)?);
    let (model, _) = Model::plan_of::<MostFrequent>(NAME, &config)?;
    let options = Options { steps: 150, learning_rate: 5e-3, warmup: 10, report_every: 50, ..Options::default() };
    let start = Parameters::initial(&[&model], options.seed, &options.device)?;
    let files = vec![("config.json".to_owned(), CONFIG.as_bytes().to_vec())];
    let checkpoint =
        Trainer::open(&folder.join("training"), start, files, options)?.train(&mut Letters { model }, |progress| {
            eprintln!("{progress}");
        })?;
    let path = folder.join("model.onnx");
    println!("{}", export(&checkpoint, &path)?);
    run(&path)
}

/// What `moh_export::export` does for the project's own families.
fn export(folder: &Path, path: &Path) -> Result<moh_export::Report> {
    let checkpoint = Checkpoint::open(folder, None)?;
    let model = Model::of::<MostFrequent>(NAME, &checkpoint)?;
    let options = moh_export::Options { force: true, ..Default::default() };
    Ok(moh_export::export_model(&checkpoint, &model, path, &options)?)
}

fn run(path: &Path) -> Result<()> {
    let options = moh_runtime::Options { runtime: RuntimeChoice::Tract, ..moh_runtime::Options::default() };
    let mut model = moh_runtime::Model::load(path, &options)?;
    let (mut rng, mut right, tried) = (Rng::new(1), 0, 100);
    for _ in 0..tried {
        let (text, letter) = text(&mut rng);
        let outputs = model.run([("input_ids", moh_runtime::Tensor::new([1, LENGTH], text)?.into())])?;
        let logits = outputs[0].as_slice::<f32>()?;
        let best = (0..4).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).context("four letters")?;
        right += usize::from(best == letter);
    }
    println!("{right} of {tried} texts are right, in tract");
    Ok(())
}
