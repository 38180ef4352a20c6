//! A training that is killed, or that cannot write or go on, loses nothing that was saved.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use candle_core::{DType, Tensor};
use moh_models::eager::Eager;
use moh_models::families::Inputs;
use moh_models::sample::Rng;
use moh_models::{Checkpoint, Config, Model, Parameters, routing};
use moh_train::{Error, Loss, Options, Precision, Result, Task, Trainer, loss};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const CONFIG: &str = r#"{
    "family": "moh-llama", "vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2
}
"#;
const STEPS: usize = 40;

fn model() -> Model {
    Model::plan(&Config::new("config.json", serde_json::from_str(CONFIG).unwrap()), None).unwrap().0
}

/// Counts upwards from a random number.
struct Counting {
    model: Model,
    /// The step whose loss is not a number.
    spoilt: Option<usize>,
    batches: usize,
    pause: Duration,
}

impl Counting {
    fn new() -> Counting {
        Counting { model: model(), spoilt: None, batches: 0, pause: Duration::ZERO }
    }
}

impl Task for Counting {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss> {
        std::thread::sleep(self.pause);
        self.batches += 1;
        let (batch, window) = (4, 12);
        let begin: Vec<usize> = (0..batch).map(|_| rng.below(16)).collect();
        let ids = |shift: usize| {
            let ids = begin.iter().flat_map(|begin| (0..window).map(move |i| ((begin + i + shift) % 16) as i64));
            Tensor::from_iter(ids, ops.device()).unwrap().reshape((batch, window)).unwrap()
        };
        let (given, targets) = (ids(0), ids(1));
        let device = ops.device().clone();
        let mut inputs = vec![
            ("input_ids".to_owned(), given),
            ("attention_mask".to_owned(), Tensor::ones((batch, window), DType::I64, &device)?),
            ("position_ids".to_owned(), Tensor::arange(0, 12i64, &device)?.unsqueeze(0)?.repeat((batch, 1))?),
        ];
        for i in 0..2 {
            for kind in ["key", "value"] {
                let empty = Tensor::zeros((batch, 2, 0, 8), DType::F32, &device)?;
                inputs.push((format!("past_key_values.{i}.{kind}"), empty));
            }
        }
        let mut logits = self.model.forward(ops, &Inputs::new(inputs))?.swap_remove(0);
        if self.spoilt.is_some_and(|step| self.batches >= step) {
            logits = (logits * f64::NAN)?;
        }
        let balance = routing::load_balance(ops.routing())?.unwrap();
        Loss::sum(vec![("text", 1.0, loss::cross_entropy(&logits, &targets, 0.0)?), ("balance", 0.01, balance)])
    }
}

fn options() -> Options {
    Options {
        steps: STEPS,
        learning_rate: 1e-2,
        warmup: 5,
        ema: Some(0.9),
        accumulate: 2,
        save_every: 5,
        report_every: 5,
        seed: 7,
        ..Options::default()
    }
}

fn trainer(folder: &Path, options: Options) -> Result<Trainer> {
    let start = Parameters::initial(&[&model()], options.seed, &options.device).unwrap();
    Trainer::open(folder, start, vec![("config.json".to_owned(), CONFIG.into())], options)
}

/// Remembers what each batch begins with.
struct Drawing(Counting, Vec<usize>);

impl Task for Drawing {
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss> {
        self.1.push(rng.below(1 << 30));
        self.0.loss(ops, rng)
    }
}

#[test]
fn every_batch_has_random_numbers_of_its_own() {
    let root = tempfile::tempdir().unwrap();
    let mut task = Drawing(Counting::new(), Vec::new());
    trainer(root.path(), Options { steps: 5, accumulate: 3, ..options() }).unwrap().train(&mut task, |_| ()).unwrap();
    let different: std::collections::BTreeSet<usize> = task.1.iter().copied().collect();
    assert_eq!((task.1.len(), different.len()), (15, 15));
}

/// Names and bytes of everything in a folder, and in those below it.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => found.push((path.clone(), std::fs::read(&path).unwrap())),
        }
    }
    found.sort();
    found
}

fn same(a: &Path, b: &Path) {
    let relative = |folder: &Path| {
        let contents = contents(folder).into_iter();
        contents.map(|(path, bytes)| (path.strip_prefix(folder).unwrap().to_owned(), bytes)).collect::<Vec<_>>()
    };
    let (a, b) = (relative(a), relative(b));
    let names = |of: &[(PathBuf, Vec<u8>)]| of.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&a), names(&b));
    for ((name, a), (_, b)) in a.iter().zip(&b) {
        assert!(a == b, "{} differs", name.display());
    }
}

const CHILD: &str = "MOH_TRAIN_TEST_FOLDER";

/// Not a test of its own: what [`a_killed_training_goes_on_to_the_same_bits`] starts and kills.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let mut task = Counting { pause: Duration::from_millis(3), ..Counting::new() };
    trainer(Path::new(&folder), options()).unwrap().train(&mut task, |_| ()).unwrap();
}

#[test]
fn a_killed_training_goes_on_to_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let (whole, killed) = (root.path().join("whole"), root.path().join("killed"));
    let child = |folder: &Path| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "child"]).env(CHILD, folder).stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    assert!(child(&whole).wait().unwrap().success());
    let is_done = || killed.join(format!("step-{STEPS:08}")).exists();
    let mut kills = 0;
    while !is_done() {
        let mut child = child(&killed);
        // A little later each time, so that it comes on: in the middle of a step or of a checkpoint.
        let end = Instant::now() + Duration::from_millis(60 + 31 * kills);
        while Instant::now() < end && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(3));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
    }
    assert!(kills > 2, "{kills}");
    // What a kill left unfinished goes when the training is opened again.
    trainer(&killed, options()).unwrap();
    same(&whole, &killed);

    let last = whole.join(format!("step-{STEPS:08}"));
    let folder = |path: &Path| Model::load(&Checkpoint::open(path, None).unwrap(), None).unwrap();
    assert_eq!(folder(&last).parameters(), folder(&last.join("ema")).parameters());
    let names = contents(&whole).into_iter().map(|(path, _)| path.strip_prefix(&whole).unwrap().to_owned());
    let plots: Vec<PathBuf> = names.filter(|name| name.extension().is_some_and(|e| e == "svg")).collect();
    assert_eq!(plots, [PathBuf::from("heads.svg"), PathBuf::from("loss.svg")]);
}

#[test]
fn it_learns() {
    let root = tempfile::tempdir().unwrap();
    let mut trainer = trainer(root.path(), Options { steps: 80, ..options() }).unwrap();
    let mut lines = Vec::new();
    trainer.train(&mut Counting::new(), |progress| lines.push(progress.clone())).unwrap();
    let losses: Vec<f64> = trainer.history().losses().map(|(_, loss)| loss).collect();
    assert!(losses[0] > 2.5 && *losses.last().unwrap() < 0.5, "{losses:?}");
    let last = lines.last().unwrap();
    assert_eq!((last.step, lines.len(), last.active), (80, 16, Some((3.0, 4.0))));
    assert!(last.to_string().starts_with("step 80/80: loss 0."), "{last}");
}

/// Weights that are smaller than a unit of bfloat16's apart are kept: what is rounded is what the model computes with.
#[test]
fn it_learns_in_bfloat16() {
    let root = tempfile::tempdir().unwrap();
    let wanted = Options { steps: 80, precision: Precision::Bf16, ..options() };
    let mut trained = trainer(root.path(), wanted.clone()).unwrap();
    trained.train(&mut Counting::new(), |_| ()).unwrap();
    let losses: Vec<f64> = trained.history().losses().map(|(_, loss)| loss).collect();
    assert!(losses[0] > 2.5 && *losses.last().unwrap() < 0.5, "{losses:?}");
    let weight = trained.parameters().get("lm_head.weight").unwrap();
    let rounded = weight.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let differs = (weight.as_tensor() - rounded).unwrap().abs().unwrap().max_all().unwrap();
    assert!(differs.to_scalar::<f32>().unwrap() > 0.0);
    drop(trained);
    let error = trainer(root.path(), Options { precision: Precision::F32, ..wanted }).err().unwrap().to_string();
    assert!(error.contains("this training was begun with precision = Bf16, not F32"), "{error}");
}

#[test]
fn options_that_train_nothing_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let frozen = Options { frozen: vec!["model".to_owned(), "lm_head".to_owned()], ..options() };
    let error = trainer(root.path(), frozen).err().unwrap().to_string();
    assert_eq!(
        error,
        r#"option frozen: expected at least one tensor that is not frozen, found ["model", "lm_head"], which cover all"#
    );
}

#[test]
fn a_checkpoint_that_is_there_is_not_written_again() {
    let root = tempfile::tempdir().unwrap();
    let mut trained = trainer(root.path(), Options { steps: 5, ..options() }).unwrap();
    let saved = trained.train(&mut Counting::new(), |_| ()).unwrap();
    assert_eq!(trained.save().unwrap(), saved);
    assert_eq!(trained.checkpoint().unwrap(), saved);
}

#[test]
fn a_loss_that_is_not_a_number_stops_it() {
    let root = tempfile::tempdir().unwrap();
    let mut trained = trainer(root.path(), options()).unwrap();
    // Of two batches a step, the second of step 8.
    let mut task = Counting { spoilt: Some(16), ..Counting::new() };
    let error = trained.train(&mut task, |_| ()).unwrap_err();
    assert!(matches!(&error, Error::NotFinite { step: 8, what, .. } if what == "the loss"), "{error}");
    let last = root.path().join("step-00000005");
    assert!(error.to_string().ends_with(&format!("the last complete checkpoint is {}", last.display())), "{error}");

    // Weights that are too large: the layer is named.
    let start = Parameters::initial(&[&model()], 7, &options().device).unwrap();
    let weight = start.get("model.layers.1.mlp.up_proj.weight").unwrap();
    weight.set(&(weight.as_tensor() * f64::INFINITY).unwrap()).unwrap();
    let files = vec![("config.json".to_owned(), CONFIG.into())];
    let mut trained = Trainer::open(&root.path().join("other"), start, files, options()).unwrap();
    let error = trained.train(&mut Counting::new(), |_| ()).unwrap_err();
    assert_eq!(error.to_string(), "step 1: the loss is not finite, from model.layers.1.mlp on");
}

#[test]
fn what_cannot_be_written_is_an_error_and_the_last_checkpoint_stays() {
    let root = tempfile::tempdir().unwrap();
    let mut trained = trainer(root.path(), Options { steps: 10, ..options() }).unwrap();
    trained.train(&mut Counting::new(), |_| ()).unwrap();
    drop(trained);
    let before = contents(root.path());
    // A file of 40 kB is the largest that this process may write: as if the disk were full.
    let program = std::env::current_exe().unwrap();
    let limited = Command::new("bash")
        .args(["-c", "trap '' XFSZ; ulimit -f 40; exec \"$0\" --exact full_disk"])
        .arg(program)
        .env(CHILD, root.path())
        .output()
        .unwrap();
    assert!(limited.status.success(), "{}", String::from_utf8_lossy(&limited.stdout));
    assert_eq!(before, contents(root.path()));
}

/// Not a test of its own: see above.
#[test]
fn full_disk() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let folder = Path::new(&folder);
    let mut trained = trainer(folder, Options { steps: 10, ..options() }).unwrap();
    assert_eq!(trained.step(), 10);
    std::fs::rename(folder.join("step-00000010"), folder.join("step-00000009")).unwrap();
    let error = trained.save().unwrap_err().to_string();
    std::fs::rename(folder.join("step-00000009"), folder.join("step-00000010")).unwrap();
    assert!(error.contains("model.safetensors") && error.contains("step-00000009"), "{error}");
}

#[test]
fn a_training_goes_on_with_its_own_settings_only() {
    let root = tempfile::tempdir().unwrap();
    let mut trained = trainer(root.path(), Options { steps: 5, ..options() }).unwrap();
    trained.train(&mut Counting::new(), |_| ()).unwrap();
    drop(trained);
    let checkpoints = |root: &Path| {
        let names = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("step-")).count()
    };
    let before = checkpoints(root.path());
    // One that is refused removes no checkpoint, however few it would keep.
    std::fs::create_dir(root.path().join("step-00000001")).unwrap();
    let error = trainer(root.path(), Options { steps: 5, clip: None, keep: 1, ..options() }).err().unwrap().to_string();
    assert_eq!(checkpoints(root.path()), before + 1);
    std::fs::remove_dir(root.path().join("step-00000001")).unwrap();
    assert!(error.contains("this training was begun with clip = Some(1.0), not None"), "{error}");
    std::fs::write(root.path().join("step-00000005/history.csv"), "step\nnothing\n").unwrap();
    let error = trainer(root.path(), Options { steps: 5, ..options() }).err().unwrap().to_string();
    assert!(error.contains("line 2: expected a row of the table, found \"nothing\""), "{error}");
}

/// A tensor that the loss does not depend on is a mistake that would not show otherwise.
#[test]
fn every_tensor_must_be_reached() {
    struct Nothing;
    impl Task for Nothing {
        fn loss(&mut self, ops: &mut Eager, _: &mut Rng) -> Result<Loss> {
            Loss::sum(vec![("nothing", 1.0, Tensor::zeros((), DType::F32, ops.device())?)])
        }
    }
    let root = tempfile::tempdir().unwrap();
    let error = trainer(root.path(), options()).unwrap().train(&mut Nothing, |_| ()).unwrap_err().to_string();
    assert!(error.starts_with("no gradient reaches lm_head.weight, model.embed_tokens.weight"), "{error}");
    assert!(error.ends_with("the loss does not depend on them"), "{error}");
}
