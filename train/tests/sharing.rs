//! Searches for shared heads as trainings: what they find, and that they go on to the same bits.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{D, DType, Device, Tensor, Var};
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_models::initial::seed_of;
use moh_models::sample::Rng;
use moh_models::sharing::{self, SCORES};
use moh_models::{Config, Model, Parameters, routing};
use moh_train::{Error, Loss, Options, Result, Task, Trainer, loss};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const VOCABULARY: usize = 16;
const BATCH: usize = 8;
const TOKENS: usize = 12;
/// The only head whose values are not 0.
const USEFUL: usize = 2;

/// One layer of four heads of eight channels.
fn config(more: Value) -> Config {
    let mut config = json!({
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Config::new("config.json", config.as_object().unwrap().clone())
}

fn model(more: Value) -> Model {
    Model::plan(&config(more), None).unwrap().0
}

/// The logits of `ids` (batch, tokens).
fn logits(model: &Model, ops: &mut Eager, ids: &Tensor) -> Result<Tensor> {
    let device = Device::Cpu;
    let (batch, tokens) = ids.dims2()?;
    let empty = || Tensor::zeros((batch, 4, 0, 8), DType::F32, &device);
    let positions = Tensor::arange(0, tokens as i64, &device)?.unsqueeze(0)?.repeat((batch, 1))?;
    let inputs = [
        ("input_ids", ids.clone()),
        ("attention_mask", Tensor::ones((batch, tokens), DType::I64, &device)?),
        ("position_ids", positions),
        ("past_key_values.0.key", empty()?),
        ("past_key_values.0.value", empty()?),
    ];
    let inputs = Inputs::new(inputs.map(|(name, value)| (name.to_owned(), value)));
    Ok(model.forward(ops, &inputs)?.swap_remove(0))
}

/// Weights of which only those of one head's values bring anything to a token.
fn one_useful_head(model: &Model) -> Parameters {
    let var = |(name, shape): &(String, Vec<usize>)| {
        let mut rng = Rng::new(seed_of(4, name));
        let width = *shape.last().unwrap();
        let number = |i: usize| match name.rsplit('.').nth(1).unwrap() {
            norm if norm.contains("norm") => 1.0,
            "down_proj" => 0.0,
            "v_proj" if i / width / 8 != USEFUL => 0.0,
            "o_proj" => 3.0 * rng.normal() / (width as f32).sqrt(),
            "embed_tokens" => rng.normal(),
            _ => 2.0 * rng.normal() / (width as f32).sqrt(),
        };
        let values = (0..shape.iter().product()).map(number).collect();
        (name.clone(), Var::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap())
    };
    Parameters::new(model.tensors().iter().map(var), &[model], &Device::Cpu).unwrap()
}

/// Learns what the useful head says.
struct Imitation {
    model: Model,
    teacher: (Model, Arc<Parameters>),
}

impl Task for Imitation {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss> {
        ops.search_shared_heads(Some(rng.bits()))?;
        let ids = Tensor::from_iter((0..BATCH * TOKENS).map(|_| rng.below(VOCABULARY) as i64), &Device::Cpu)?;
        let ids = ids.reshape((BATCH, TOKENS))?;
        let (teacher, weights) = &self.teacher;
        let answers = logits(teacher, &mut Eager::new().with_parameters(weights.clone()), &ids)?;
        let answers = answers.detach().argmax(D::Minus1)?.to_dtype(DType::I64)?;
        let found = logits(&self.model, ops, &ids)?;
        Loss::sum(vec![("text", 1.0, loss::cross_entropy(&found, &answers, 0.0)?)])
    }
}

/// Gives the scores that a search ends with.
fn search(searched: Value, shared: Value) -> Vec<f32> {
    let model = model(searched.clone());
    let weights = one_useful_head(&model);
    let start = sharing::parameters(&model, &weights).unwrap();
    // The teacher's weights: those of a search that knows the answer.
    let path = format!("{SCORES}model.layers.0.self_attn");
    let known = sharing::parameters(&model, &weights).unwrap();
    let mut answer = [-1f32; 4];
    answer[USEFUL] = 1.0;
    known.get(&path).unwrap().set(&Tensor::new(&answer, &Device::Cpu).unwrap()).unwrap();
    let teacher = sharing::chosen(&config(searched.clone()), &model, &known).unwrap();
    assert_eq!(teacher.config["shared_heads"], shared);
    // The gradient is taken where the head is on. With the same values there, more of the head would be no better than less; with ten times
    // these values, the answers are the head's alone.
    let values = teacher.parameters.get("model.layers.0.self_attn.v_proj.weight").unwrap();
    values.set(&(values.as_detached_tensor() * 10.0).unwrap()).unwrap();
    let mut task = Imitation { model, teacher: (teacher.model, Arc::new(teacher.parameters)) };
    let root = tempfile::tempdir().unwrap();
    let options = Options {
        steps: 60,
        learning_rate: 0.02,
        warmup: 0,
        seed: 3,
        frozen: vec!["model.".to_owned(), "lm_head".to_owned()],
        ..Options::default()
    };
    let mut trainer = Trainer::open(root.path(), start, Vec::new(), options).unwrap();
    trainer.train(&mut task, |_| ()).unwrap();
    let found = sharing::sets(&task.model, trainer.parameters()).unwrap();
    let scores = trainer.parameters().get(&path).unwrap().to_vec1::<f32>().unwrap();
    println!("{searched}: {scores:?}");
    assert_eq!(json!([found[0].shared()]), shared, "{scores:?}");
    assert_eq!(found[0].counts().active(), 2);
    scores
}

/// The head that carries all information is shared in the end, and no other is preferred.
#[test]
fn the_useful_head_is_shared() {
    for family in [
        json!({"family": "moh-llama", "moh_shared_fraction": 0.0, "moh_routed_fraction": 0.5}),
        json!({"family": "moh-llm", "shared_head": 0, "routed_head": 2}),
    ] {
        let scores = search(family, json!([[USEFUL]]));
        for (head, score) in scores.iter().enumerate() {
            assert!(if head == USEFUL { *score > 0.2 } else { *score < 0.0 }, "{scores:?}");
        }
    }
}

/// Says the token that it sees.
struct Echo {
    model: Model,
    /// The batch that fails.
    fails: Option<usize>,
    batches: usize,
}

impl Task for Echo {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss> {
        self.batches += 1;
        if self.fails == Some(self.batches) {
            return Err(Error::Task("stopped".into()));
        }
        ops.search_shared_heads(Some(rng.bits()))?;
        let ids = Tensor::from_iter((0..BATCH * TOKENS).map(|_| rng.below(VOCABULARY) as i64), &Device::Cpu)?;
        let ids = ids.reshape((BATCH, TOKENS))?;
        let found = logits(&self.model, ops, &ids)?;
        let balance = routing::load_balance(ops.routing())?.unwrap();
        Loss::sum(vec![("text", 1.0, loss::cross_entropy(&found, &ids, 0.0)?), ("balance", 0.01, balance)])
    }
}

fn echo(folder: &Path, seed: u64, fails: Option<usize>) -> Result<()> {
    let model = model(json!({"family": "moh-llm", "shared_head": 0, "routed_head": 3}));
    let start = Parameters::initial(&[&model], 7, &Device::Cpu).unwrap();
    let start = sharing::parameters(&model, &start).unwrap();
    let options =
        Options { steps: 12, warmup: 2, ema: Some(0.9), accumulate: 2, save_every: 4, seed, ..Options::default() };
    let mut trainer = Trainer::open(folder, start, Vec::new(), options)?;
    trainer.train(&mut Echo { model, fails, batches: 0 }, |_| ())?;
    assert_eq!(trainer.step(), 12);
    Ok(())
}

#[test]
fn a_stopped_search_goes_on_to_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| root.path().join(name);
    echo(&folder("whole"), 1, None).unwrap();
    echo(&folder("again"), 1, None).unwrap();
    let error = echo(&folder("stopped"), 1, Some(13)).unwrap_err();
    assert_eq!(error.to_string(), "stopped");
    assert!(!folder("stopped").join("step-00000008").exists());
    echo(&folder("stopped"), 1, None).unwrap();
    echo(&folder("other"), 2, None).unwrap();
    let last = |name: &str, file: &str| std::fs::read(folder(name).join("step-00000012").join(file)).unwrap();
    for file in ["model.safetensors", "optimizer.safetensors", "ema/model.safetensors", "history.csv", "loads.csv"] {
        assert!(last("whole", file) == last("again", file), "{file}");
        assert!(last("whole", file) == last("stopped", file), "{file}");
    }
    // Seeds of the noise: all weights begin alike.
    assert!(last("whole", "model.safetensors") != last("other", "model.safetensors"));
    let step = folder("whole").join("step-00000012");
    let saved = candle_core::safetensors::load(step.join("model.safetensors"), &Device::Cpu).unwrap();
    let scores = saved[&format!("{SCORES}model.layers.0.self_attn")].to_vec1::<f32>().unwrap();
    assert!(scores.iter().all(|score| *score != 0.0), "{scores:?}");
    // Without a configuration nobody takes it for a model.
    assert!(!step.join("config.json").exists());
    assert!(moh_models::Checkpoint::open(&step, None).and_then(|found| Model::load(&found, None).map(drop)).is_err());
}

/// A task that forgets the search would train a model without shared heads.
#[test]
fn a_forgotten_search_is_an_error() {
    struct Forgets(Model);
    impl Task for Forgets {
        fn loss(&mut self, ops: &mut Eager, _: &mut Rng) -> Result<Loss> {
            let ids = Tensor::zeros((1, 4), DType::I64, &Device::Cpu)?;
            let found = logits(&self.0, ops, &ids)?;
            Loss::sum(vec![("text", 1.0, loss::cross_entropy(&found, &ids, 0.0)?)])
        }
    }
    let root = tempfile::tempdir().unwrap();
    let model = model(json!({"family": "moh-llm", "shared_head": 0, "routed_head": 3}));
    let start = Parameters::initial(&[&model], 7, &Device::Cpu).unwrap();
    let start = sharing::parameters(&model, &start).unwrap();
    let options = Options { steps: 1, warmup: 0, ..Options::default() };
    let error = Trainer::open(root.path(), start, Vec::new(), options).unwrap().train(&mut Forgets(model), |_| ());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("no gradient reaches shared_scores.model.layers.0.self_attn"), "{error}");
}
