//! The loop: batches, gradients, steps, checkpoints.

use crate::adamw::{AdamW, Rates};
use crate::average::Average;
use crate::checkpoint::{self, AVERAGE, MODEL, MOMENTS, Run, STATE};
use crate::error::{Error, Result};
use crate::history::{History, Load, Step};
use crate::options::{Options, Precision};
use crate::plot;
use crate::progress::Progress;
use crate::slices;
use candle_core::{Storage, Tensor};
use moh_models::Parameters;
use moh_models::eager::Eager;
use moh_models::initial::seed_of;
use moh_models::routing::Routing;
use moh_models::sample::Rng;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// What is learnt.
pub trait Task {
    /// The loss of one batch: draws it with `rng`, runs the models' `forward` with `ops`, and compares.
    ///
    /// Everything random comes from `rng`, which depends on the seed and the step alone: so a training that was interrupted goes on
    /// as if it had not been. [`Eager::routing`] has what the routers of the forward decided, for
    /// [`moh_models::routing::load_balance`] and the losses of experts.
    ///
    /// # Errors
    /// Whatever goes wrong; [`Error::Task`] holds errors of other kinds.
    fn loss(&mut self, ops: &mut Eager, rng: &mut Rng) -> Result<Loss>;
}

/// The loss of a batch.
#[derive(Debug, Clone)]
pub struct Loss {
    /// What gradients are taken of, a scalar.
    pub total: Tensor,
    /// What it consists of, to be shown.
    pub parts: Vec<(&'static str, Tensor)>,
}

impl Loss {
    /// The sum of named losses, each with its factor.
    ///
    /// # Errors
    /// What candle fails with.
    pub fn sum(parts: Vec<(&'static str, f64, Tensor)>) -> Result<Loss> {
        let mut total = None;
        for (_, factor, part) in &parts {
            let part = (part * *factor)?;
            total = Some(match total {
                None => part,
                Some(total) => (total + part)?,
            });
        }
        let total = total.ok_or(Error::Option { name: "loss", expected: "a part", found: "none".to_owned() })?;
        Ok(Loss { total, parts: parts.into_iter().map(|(name, _, part)| (name, part)).collect() })
    }
}

/// A training in a folder.
pub struct Trainer {
    options: Options,
    run: Run,
    parameters: Arc<Parameters>,
    optimizer: AdamW,
    average: Option<Average>,
    history: History,
    step: usize,
    /// Files that belong to a checkpoint of the model, beside the weights: `config.json`, a tokenizer.
    files: Vec<(String, Vec<u8>)>,
    last: Option<PathBuf>,
}

impl Trainer {
    /// Goes on with the training in `folder`, or begins one there with the weights `start`.
    ///
    /// `files` are put beside the weights in every checkpoint: `config.json`, which the exporter needs, and what else a checkpoint of
    /// this model has, such as `tokenizer.json`. They have plain names, which no other file of a checkpoint has.
    ///
    /// # Errors
    /// Options that cannot train; a training in the folder that was begun with other options ([`Error::Other`]); files that cannot be
    /// read or written.
    pub fn open(folder: &Path, start: Parameters, files: Vec<(String, Vec<u8>)>, options: Options) -> Result<Trainer> {
        options.check()?;
        if let Some((name, _)) = files.iter().find(|(name, _)| !checkpoint::may_add(name)) {
            let expected = "names of files in the checkpoint, other than its own";
            return Err(Error::Option { name: "files", expected, found: name.clone() });
        }
        let run = Run::open(folder, options.keep)?;
        let last = run.last()?;
        let parameters = Arc::new(start);
        let device = &options.device;
        let frozen = |name: &str| options.frozen.iter().any(|prefix| name.starts_with(prefix.as_str()));
        let trained = || parameters.iter().filter(|(name, _)| !frozen(name));
        let reaches = |prefix: &&String| parameters.iter().any(|(name, _)| name.starts_with(prefix.as_str()));
        if let Some(wrong) = options.frozen.iter().find(|prefix| !reaches(prefix)) {
            let expected = "what the names of tensors begin with";
            return Err(Error::Option { name: "frozen", expected, found: wrong.clone() });
        }
        if trained().next().is_none() {
            let (expected, found) =
                ("at least one tensor that is not frozen", format!("{:?}, which cover all", options.frozen));
            return Err(Error::Option { name: "frozen", expected, found });
        }
        if !parameters.device().same_device(device) {
            let found = format!("{:?}", device.location());
            return Err(Error::Option { name: "device", expected: "the device of the weights", found });
        }
        let mut trainer = Trainer {
            optimizer: AdamW::new(trained(), device)?,
            average: options.ema.map(|_| initial_average(&parameters)).transpose()?,
            parameters,
            run,
            history: History::default(),
            step: 0,
            files,
            last: None,
            options,
        };
        if let Some(folder) = last {
            trainer.resume(&folder)?;
            // A killed training may not have come to these. Before, the training may be another one than was meant.
            trainer.run.prune()?;
            trainer.plot()?;
        }
        Ok(trainer)
    }

    /// The steps that were taken.
    pub fn step(&self) -> usize {
        self.step
    }

    /// The weights.
    pub fn parameters(&self) -> &Arc<Parameters> {
        &self.parameters
    }

    /// The losses and loads so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The last checkpoint, which can be exported.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.last.as_deref()
    }

    /// The checkpoint of the averaged weights beside the last one, with [`Options::ema`].
    pub fn averaged(&self) -> Option<PathBuf> {
        self.average.as_ref().and(self.last.as_ref()).map(|last| last.join(AVERAGE))
    }

    /// Takes the steps that remain, tells `report` about some of them, and saves. Gives the last checkpoint.
    ///
    /// # Errors
    /// [`Error::NotFinite`], before a step would spoil the weights; [`Error::Io`] where a checkpoint cannot be written, and what the task
    /// fails with. The last checkpoint stays.
    pub fn train(&mut self, task: &mut impl Task, mut report: impl FnMut(&Progress)) -> Result<PathBuf> {
        let (mut since, mut losses) = (Instant::now(), Vec::new());
        while self.step < self.options.steps {
            let reports =
                (self.step + 1).is_multiple_of(self.options.report_every) || self.step + 1 == self.options.steps;
            let taken = self.take_step(task, reports)?;
            losses.push(taken.loss);
            if reports {
                report(&Progress {
                    step: self.step,
                    steps: self.options.steps,
                    loss: losses.iter().sum::<f64>() / losses.len() as f64,
                    parts: taken.parts,
                    rate: self.options.rate(self.step),
                    norm: taken.norm,
                    active: taken.active,
                    seconds: since.elapsed().as_secs_f64() / losses.len() as f64,
                });
                (since, losses) = (Instant::now(), Vec::new());
            }
            if self.step.is_multiple_of(self.options.save_every) || self.step == self.options.steps {
                self.save()?;
            }
        }
        match &self.last {
            Some(last) => Ok(last.clone()),
            None => self.save(),
        }
    }

    fn eager(&self) -> Eager {
        let eager = Eager::new().with_parameters(self.parameters.clone()).with_routing();
        match self.options.precision {
            Precision::F32 => eager,
            Precision::Bf16 => eager.in_bf16(),
        }
    }

    /// The generator of a batch.
    fn rng(&self, batch: usize) -> Rng {
        Rng::new(seed_of(self.options.seed, &format!("step {} batch {batch}", self.step + 1)))
    }

    fn take_step(&mut self, task: &mut impl Task, reports: bool) -> Result<Taken> {
        let batches = self.options.accumulate;
        let mut gradients: BTreeMap<String, Tensor> = BTreeMap::new();
        let mut taken = Taken { loss: 0.0, norm: 0.0, parts: Vec::new(), loads: Vec::new(), active: None };
        for batch in 0..batches {
            let mut eager = self.eager();
            let loss = task.loss(&mut eager, &mut self.rng(batch))?;
            let value = f64::from(loss.total.to_scalar::<f32>()?);
            if !value.is_finite() {
                return Err(self.not_finite(self.step + 1, "the loss", Some((task, batch..batch + 1))));
            }
            taken.loss += value / batches as f64;
            if reports {
                for (name, part) in &loss.parts {
                    let share = f64::from(part.to_scalar::<f32>()?) / batches as f64;
                    match taken.parts.iter_mut().find(|(other, _)| other == name) {
                        Some((_, sum)) => *sum += share,
                        None => taken.parts.push((name, share)),
                    }
                }
            }
            if reports && batch + 1 == batches {
                taken.loads = History::loads_of(self.step + 1, eager.routing())?;
                taken.active = active(eager.routing())?;
            }
            for (name, gradient) in eager.backward(&loss.total)? {
                let sum = match gradients.get(&name) {
                    Some(sum) => (sum + gradient)?,
                    None => gradient,
                };
                gradients.insert(name, sum);
            }
        }
        self.check_reached(&gradients)?;
        taken.norm = self.norm(task, &gradients)? / batches as f64;
        let clipped = self.options.clip.map_or(1.0, |limit| (limit / taken.norm.max(f64::MIN_POSITIVE)).min(1.0));
        self.step += 1;
        let rate = self.options.rate(self.step);
        let rates = Rates { learning_rate: rate, step: self.step, scale: clipped / batches as f64 };
        for (name, var) in self.parameters.iter() {
            if let Some(gradient) = gradients.get(name) {
                self.optimizer.update(name, var, gradient, rates, &self.options)?;
            }
            if let (Some(average), Some(share)) = (&mut self.average, self.options.ema) {
                average.update(name, var.as_tensor(), share)?;
            }
        }
        self.history.add_loads(std::mem::take(&mut taken.loads));
        self.history.steps.push(Step { step: self.step, loss: taken.loss, rate, norm: taken.norm });
        Ok(taken)
    }

    /// In the first step: every tensor that is trained has a gradient.
    fn check_reached(&self, gradients: &BTreeMap<String, Tensor>) -> Result<()> {
        if self.step > 0 {
            return Ok(());
        }
        let unreached = self.optimizer.moments().keys().filter(|name| !gradients.contains_key(*name));
        let tensors: Vec<String> = unreached.cloned().collect();
        if tensors.is_empty() { Ok(()) } else { Err(Error::NoGradient { tensors }) }
    }

    /// The norm of all gradients of trained tensors together.
    fn norm(&self, task: &mut impl Task, gradients: &BTreeMap<String, Tensor>) -> Result<f64> {
        let mut sum = 0.0;
        for name in self.optimizer.moments().keys() {
            let Some(gradient) = gradients.get(name) else { continue };
            let squares = squares(gradient)?;
            if !squares.is_finite() {
                return Err(self.not_finite(
                    self.step + 1,
                    &format!("the gradient of {name}"),
                    Some((task, 0..self.options.accumulate)),
                ));
            }
            sum += squares;
        }
        Ok(sum.sqrt())
    }

    /// The error that something in a step is not finite. Batches of the step after this one are computed again to see where it begins.
    fn not_finite(&self, step: usize, what: &str, batches: Option<(&mut impl Task, Range<usize>)>) -> Error {
        let layer = batches.and_then(|(task, mut batches)| {
            batches.find_map(|batch| {
                let mut eager = self.eager().watching();
                // That it fails in another way says no more than that it is not finite.
                let _ = task.loss(&mut eager, &mut self.rng(batch));
                eager.first_not_finite().map(str::to_owned)
            })
        });
        Error::NotFinite { step, what: what.to_owned(), layer, last: self.last.clone() }
    }

    /// Writes a checkpoint of now, unless there is one, and the plots.
    ///
    /// # Errors
    /// [`Error::Io`]: the last checkpoint stays.
    pub fn save(&mut self) -> Result<PathBuf> {
        if let Some(saved) = self.run.at(self.step)? {
            self.last = Some(saved.clone());
            return Ok(saved);
        }
        for (name, var) in self.parameters.iter() {
            if !squares(var.as_tensor())?.is_finite() {
                return Err(self.not_finite(
                    self.step,
                    &format!("the weight {name}"),
                    None::<(&mut Never, Range<usize>)>,
                ));
            }
        }
        let tensors = |vars: &Parameters| {
            vars.iter().map(|(name, var)| (name.to_owned(), var.as_tensor().clone())).collect::<BTreeMap<_, _>>()
        };
        let folder = self.run.save(self.step, |folder| {
            let model = |folder: &Path, tensors: &BTreeMap<String, Tensor>| {
                for (name, bytes) in &self.files {
                    checkpoint::write_file(&folder.join(name), bytes)?;
                }
                checkpoint::write_tensors(&folder.join(MODEL), tensors)
            };
            model(folder, &tensors(&self.parameters))?;
            checkpoint::write_tensors(&folder.join(MOMENTS), self.optimizer.moments())?;
            if let Some(average) = &self.average {
                let folder = folder.join(AVERAGE);
                std::fs::create_dir(&folder).map_err(Error::io(&folder))?;
                model(&folder, average.tensors())?;
                checkpoint::sync_folder(&folder)?;
            }
            for (name, bytes) in self.history.files() {
                checkpoint::write_file(&folder.join(name), &bytes)?;
            }
            let settings: BTreeMap<&str, String> = self.options.settings().into_iter().collect();
            let state = serde_json::json!({"step": self.step, "settings": settings});
            checkpoint::write_file(&folder.join(STATE), format!("{state:#}\n").as_bytes())
        })?;
        self.last = Some(folder.clone());
        self.plot().map_err(|error| error.keeping(self.last.clone()))?;
        Ok(folder)
    }

    fn plot(&self) -> Result<()> {
        self.run.put(checkpoint::PLOTS[0], &plot::loss(&self.history))?;
        if !self.history.loads().is_empty() {
            self.run.put(checkpoint::PLOTS[1], &plot::heads(&self.history))?;
        }
        Ok(())
    }

    /// Takes everything from a checkpoint.
    fn resume(&mut self, folder: &Path) -> Result<()> {
        let file = folder.join(STATE);
        let text = std::fs::read_to_string(&file).map_err(Error::io(&file))?;
        let wrong = |problem: String| Error::Checkpoint { file: file.clone(), problem };
        let state: serde_json::Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        for (name, wanted) in self.options.settings() {
            let found = state["settings"][name].as_str().unwrap_or("nothing");
            if found != wanted {
                return Err(Error::Other { file, name: name.to_owned(), wanted, found: found.to_owned() });
            }
        }
        for (name, bytes) in &self.files {
            let file = folder.join(name);
            if std::fs::read(&file).map_err(Error::io(&file))? != *bytes {
                let (wanted, found) = ("another".to_owned(), "the one in the folder".to_owned());
                return Err(Error::Other { file, name: name.clone(), wanted, found });
            }
        }
        let step = state["step"].as_u64().and_then(|step| usize::try_from(step).ok());
        self.step = step.ok_or_else(|| wrong("expected a number \"step\"".to_owned()))?;
        let device = &self.options.device;
        let weights = checkpoint::read_tensors(&folder.join(MODEL), device)?;
        let shapes = |tensors: &BTreeMap<String, Tensor>| {
            tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect::<Vec<_>>()
        };
        let expected: Vec<_> =
            self.parameters.iter().map(|(name, var)| (name.to_owned(), var.dims().to_vec())).collect();
        let same = |file: &str, tensors: &BTreeMap<String, Tensor>, expected: &[(String, Vec<usize>)]| {
            let problem = "expected the tensors of this model, found others".to_owned();
            let file = folder.join(file);
            if shapes(tensors) == expected { Ok(()) } else { Err(Error::Checkpoint { file, problem }) }
        };
        same(MODEL, &weights, &expected)?;
        for (name, var) in self.parameters.iter() {
            if let Some(weight) = weights.get(name) {
                var.set(weight)?;
            }
        }
        let moments = checkpoint::read_tensors(&folder.join(MOMENTS), device)?;
        same(MOMENTS, &moments, &shapes(self.optimizer.moments()))?;
        self.optimizer = AdamW::with(moments);
        if self.average.is_some() {
            let file = format!("{AVERAGE}/{MODEL}");
            let tensors = checkpoint::read_tensors(&folder.join(&file), device)?;
            same(&file, &tensors, &expected)?;
            self.average = Some(Average::with(tensors));
        }
        self.history = History::read(folder)?;
        self.last = Some(folder.to_owned());
        Ok(())
    }
}

/// A step that was taken.
struct Taken {
    loss: f64,
    norm: f64,
    parts: Vec<(&'static str, f64)>,
    loads: Vec<Load>,
    active: Option<(f64, f64)>,
}

/// A task where there is none.
enum Never {}

impl Task for Never {
    fn loss(&mut self, _: &mut Eager, _: &mut Rng) -> Result<Loss> {
        match *self {}
    }
}

/// Copies of the weights, to begin the average with.
fn initial_average(parameters: &Parameters) -> Result<Average> {
    let copy = |(name, var): (&str, &candle_core::Var)| Ok((name.to_owned(), var.as_detached_tensor().copy()?));
    Ok(Average::with(parameters.iter().map(copy).collect::<Result<_>>()?))
}

/// The sum of the squares.
fn squares(x: &Tensor) -> Result<f64> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(slices::squares(slices::of(storage, layout)?)),
        _ => {
            drop(storage);
            Ok(f64::from(x.sqr()?.sum_all()?.to_scalar::<f32>()?))
        }
    }
}

/// Heads that a token uses and all heads, means over the layers.
fn active(routing: &[Routing]) -> Result<Option<(f64, f64)>> {
    if routing.is_empty() {
        return Ok(None);
    }
    let (mut active, mut all) = (0.0, 0.0);
    for layer in routing {
        let load = layer.load()?;
        active += f64::from(load.iter().sum::<f32>());
        all += load.len() as f64;
    }
    let layers = routing.len() as f64;
    Ok(Some((active / layers, all / layers)))
}
