//! Class-conditional diffusion models: noise in, pictures or a VAE's latents out.

mod decode;
mod schedule;

pub use decode::{Decoder, SCALING_FACTOR, pictures};
pub use schedule::{Sampler, TRAINED_STEPS};

use crate::error::{Error, Result};
use crate::files::read_json;
use crate::random::Random;
use crate::task;
use moh_runtime::{Dim, ElementType, Model, Tensor, TensorInfo, Value};
use serde::Deserialize;
use std::ops::ControlFlow;

const HIDDEN_STATES: &str = "hidden_states";
const TIMESTEP: &str = "timestep";
const CLASS_LABELS: &str = "class_labels";
const OUTPUT: &str = "out_hidden_states";
/// The published models guide the first three channels, also where there are four.
const GUIDED_CHANNELS: usize = 3;

/// Sampling steps of [`DiffusionModel::outputs_at`].
pub const LOOK_STEPS: usize = 50;

/// How to sample.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOptions {
    /// Steps, 1 to [`TRAINED_STEPS`].
    pub steps: usize,
    /// How each step is taken.
    pub sampler: Sampler,
    /// Scale of classifier-free guidance; 1 turns it off and halves the time.
    pub guidance: f64,
    /// Guide only so many of the first channels; `None`: three, or all if there are fewer.
    pub guidance_channels: Option<usize>,
    /// Clip each step's estimate of the picture to -1..1.
    pub clip: bool,
    /// Seed of the noise; the same seed gives the same pictures.
    pub seed: u64,
}

/// A model that takes `hidden_states` (batch, channels, size, size), `timestep` (batch) and `class_labels` (batch), and gives
/// `out_hidden_states` with the same channels, which are noise, or twice as many, of which the second half interpolates the
/// variance.
#[derive(Debug)]
pub struct DiffusionModel {
    model: Model,
    channels: usize,
    size: usize,
    element_type: ElementType,
    output: usize,
    learns_variance: bool,
    classes: Option<usize>,
    has_null_class: bool,
}

#[derive(Debug, Default, Deserialize)]
struct Config {
    num_classes: Option<usize>,
    class_dropout_prob: Option<f64>,
}

impl DiffusionModel {
    /// Checks that `model` is a diffusion model, and reads the number of classes, `num_classes`, from the `config.json`
    /// beside it. A `class_dropout_prob` of 0 there means that the model has no null class.
    ///
    /// # Errors
    /// [`Error::Task`] for another kind of model, [`Error::Read`] or [`Error::Malformed`] for the file.
    pub fn new(model: Model) -> Result<DiffusionModel> {
        let other = |reason| task::other_task(&model, "a diffusion model of classes", reason);
        let (channels, size, element_type) = hidden_states(model.inputs()).map_err(other)?;
        let output = model.outputs().iter().position(|output| output.name == OUTPUT);
        let output = output.ok_or_else(|| other(format!("expected an output {OUTPUT}")))?;
        let learns_variance = match model.outputs()[output].dims.get(1) {
            Some(Dim::Fixed(found)) if *found == channels => false,
            Some(Dim::Fixed(found)) if *found == 2 * channels => true,
            _ => {
                let found = &model.outputs()[output];
                return Err(other(format!(
                    "expected {channels} or {} channels of {OUTPUT}, found {found}",
                    2 * channels
                )));
            }
        };
        let folder = model.files_folder();
        let config: Config = read_json(&folder.join("config.json"))?;
        let has_null_class = config.class_dropout_prob != Some(0.0);
        let classes = config.num_classes;
        Ok(DiffusionModel { model, channels, size, element_type, output, learns_variance, classes, has_null_class })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Channels of what it makes.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Rows, and columns, of what it makes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The number of classes, the null class left out, if the configuration says it.
    pub fn classes(&self) -> Option<usize> {
        self.classes
    }

    /// Draws one sample of every class in `labels`; gives (labels, channels, size, size) float32. The sample at position i is
    /// drawn from the noise of number `first + i`, so that samples do not depend on how they are divided into batches.
    ///
    /// `on_step` is told after each step how many are done, and may break off; the result is then what there is.
    ///
    /// # Errors
    /// [`Error::Request`] for a class or options that the model does not have, [`Error::Runtime`] where the runtime fails, [`Error::Output`] where the
    /// model gives no finite numbers.
    pub fn sample(
        &mut self,
        labels: &[i64],
        first: u64,
        options: &SampleOptions,
        mut on_step: impl FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Tensor> {
        self.check(labels, options)?;
        let (batch, each) = (labels.len(), self.channels * self.size * self.size);
        let mut noise: Vec<Random> = (first..).take(batch).map(|stream| Random::new(options.seed, stream)).collect();
        let mut x: Vec<f64> = noise.iter_mut().flat_map(|random| (0..each).map(|_| random.normal())).collect();
        let labels = self.with_null_class(labels, options);
        for (done, step) in (1..).zip(schedule::respaced(options.steps)) {
            let output = self.predict(&x, &labels, step.timestep)?;
            for (i, random) in noise.iter_mut().enumerate() {
                let predicted = Predicted::new(self, &output, batch, i, options);
                for (j, x) in x[i * each..(i + 1) * each].iter_mut().enumerate() {
                    let variance = predicted.variance(j);
                    *x = step.next(options.sampler, options.clip, *x, predicted.noise(j), variance, random.normal());
                }
            }
            if on_step(done).is_break() {
                break;
            }
        }
        let x = x.into_iter().map(|x| x as f32).collect();
        Ok(Tensor::new([batch, self.channels, self.size, self.size], x)?)
    }

    fn check(&self, labels: &[i64], options: &SampleOptions) -> Result<()> {
        let bad = |reason: String| Err(Error::Request { path: self.model.path().to_owned(), reason });
        if !(1..=TRAINED_STEPS).contains(&options.steps) {
            return bad(format!("expected 1 to {TRAINED_STEPS} steps, found {}", options.steps));
        }
        if !options.guidance.is_finite() {
            return bad(format!("expected a finite guidance, found {}", options.guidance));
        }
        if let Some(guided) = options.guidance_channels.filter(|&guided| guided > self.channels) {
            return bad(format!("expected at most {} channels to guide, found {guided}", self.channels));
        }
        match self.classes {
            Some(classes) => {
                let outside =
                    labels.iter().find(|&&label| usize::try_from(label).map_or(true, |label| label >= classes));
                if let Some(label) = outside {
                    return bad(format!("class {label}: the model has classes 0 to {}", classes.saturating_sub(1)));
                }
                if guides(options) && !self.has_null_class {
                    return bad(
                        "guidance needs a null class, and the model has none: class_dropout_prob is 0".to_owned()
                    );
                }
            }
            None if guides(options) => {
                return bad(
                    "guidance needs to know the null class: num_classes in a config.json beside the model".to_owned()
                );
            }
            None => {
                if let Some(label) = labels.iter().find(|&&label| label < 0) {
                    return bad(format!("class {label}: classes begin with 0"));
                }
            }
        }
        Ok(())
    }

    /// The labels, and as many null classes if there is guidance.
    fn with_null_class(&self, labels: &[i64], options: &SampleOptions) -> Vec<i64> {
        let null = self.classes.filter(|_| guides(options)).and_then(|classes| i64::try_from(classes).ok());
        labels.iter().copied().chain(null.into_iter().flat_map(|null| labels.iter().map(move |_| null))).collect()
    }

    /// The model's outputs in the middle of sampling: draws a sample of the class `label` in [`LOOK_STEPS`] steps down to the
    /// first timestep not above `timestep`. Returns that timestep and the outputs there.
    ///
    /// # Errors
    /// As [`DiffusionModel::sample`].
    pub fn outputs_at(&mut self, label: i64, timestep: usize, seed: u64) -> Result<(usize, Vec<Value>)> {
        let options = SampleOptions {
            steps: LOOK_STEPS,
            sampler: Sampler::Ddpm,
            guidance: 1.0,
            guidance_channels: None,
            clip: false,
            seed,
        };
        self.check(&[label], &options)?;
        let steps = schedule::respaced(LOOK_STEPS);
        let before = steps.iter().take_while(|step| step.timestep > timestep).count();
        let reached = steps.get(before).map_or(0, |step| step.timestep);
        let x = match before {
            0 => {
                let random = &mut Random::new(seed, 0);
                (0..self.channels * self.size * self.size).map(|_| random.normal()).collect()
            }
            _ => {
                let until =
                    |done: usize| if done < before { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
                let x = self.sample(&[label], 0, &options, until)?;
                x.data().to_f32().unwrap_or_default().into_iter().map(f64::from).collect::<Vec<f64>>()
            }
        };
        Ok((reached, self.run(&x, &[label], reached)?))
    }

    /// Runs the model on `x`, repeated until there is one for every label.
    fn run(&mut self, x: &[f64], labels: &[i64], timestep: usize) -> Result<Vec<Value>> {
        let rows = labels.len();
        let shape = [rows, self.channels, self.size, self.size];
        let len = shape.iter().product();
        let x: Vec<f32> = x.iter().map(|&x| x as f32).cycle().take(len).collect();
        let inputs = [
            (HIDDEN_STATES, Tensor::rounded(HIDDEN_STATES, shape, x, self.element_type)?.into()),
            (TIMESTEP, Tensor::new([rows], vec![timestep as f32; rows])?.into()),
            (CLASS_LABELS, Tensor::new([rows], labels.to_vec())?.into()),
        ];
        Ok(self.model.run(inputs)?)
    }

    /// What the model makes of `x`, repeated until there is one for every label.
    fn predict(&mut self, x: &[f64], labels: &[i64], timestep: usize) -> Result<Vec<f32>> {
        let rows = labels.len();
        let outputs = self.run(x, labels, timestep)?;
        let output = &outputs[self.output];
        let channels = self.channels * if self.learns_variance { 2 } else { 1 };
        let bad = |reason: String| Error::Output {
            path: self.model.path().to_owned(),
            runtime: self.model.runtime_name(),
            reason: format!("{OUTPUT}: {reason}"),
        };
        let numbers = output.data()?.to_f32().filter(|_| output.shape() == [rows, channels, self.size, self.size]);
        let numbers = numbers.ok_or_else(|| {
            let expected = [rows, channels, self.size, self.size];
            bad(format!("expected numbers of shape {expected:?}, found {} {:?}", output.element_type(), output.shape()))
        })?;
        match numbers.iter().any(|x| !x.is_finite()) {
            true => Err(bad(format!("expected finite numbers, found others at timestep {timestep}"))),
            false => Ok(numbers),
        }
    }
}

fn guides(options: &SampleOptions) -> bool {
    options.guidance != 1.0
}

/// The model's prediction for one sample.
struct Predicted<'a> {
    with_class: &'a [f32],
    without: Option<&'a [f32]>,
    guidance: f64,
    /// Numbers of the guided channels.
    guided: usize,
    /// Where the variance begins.
    variance: Option<usize>,
}

impl<'a> Predicted<'a> {
    fn new(
        model: &DiffusionModel,
        output: &'a [f32],
        batch: usize,
        i: usize,
        options: &SampleOptions,
    ) -> Predicted<'a> {
        let plane = model.size * model.size;
        let noise = model.channels * plane;
        let each = if model.learns_variance { 2 * noise } else { noise };
        let row = |i: usize| &output[i * each..(i + 1) * each];
        let guided = options.guidance_channels.unwrap_or(GUIDED_CHANNELS).min(model.channels) * plane;
        Predicted {
            with_class: row(i),
            without: guides(options).then(|| row(batch + i)),
            guidance: options.guidance,
            guided,
            variance: model.learns_variance.then_some(noise),
        }
    }

    fn noise(&self, j: usize) -> f64 {
        let with_class = f64::from(self.with_class[j]);
        match self.without {
            Some(without) if j < self.guided => {
                let without = f64::from(without[j]);
                without + self.guidance * (with_class - without)
            }
            _ => with_class,
        }
    }

    fn variance(&self, j: usize) -> Option<f64> {
        self.variance.map(|start| f64::from(self.with_class[start + j]))
    }
}

/// Channels, side and element type of the noisy input.
fn hidden_states(inputs: &[TensorInfo]) -> std::result::Result<(usize, usize, ElementType), String> {
    let found = || inputs.iter().map(TensorInfo::to_string).collect::<Vec<_>>().join(", ");
    let wanted = [HIDDEN_STATES, TIMESTEP, CLASS_LABELS];
    let (3, Some([states, timestep, labels])) = (inputs.len(), by_name(inputs, wanted)) else {
        return Err(format!("expected inputs {}, found {}", wanted.join(", "), found()));
    };
    if (timestep.element_type, labels.element_type) != (ElementType::F32, ElementType::I64) {
        return Err(format!("expected {TIMESTEP} in float32 and {CLASS_LABELS} in int64, found {}", found()));
    }
    match states.dims[..] {
        [_, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)]
            if height == width && channels > 0 && width > 0 =>
        {
            Ok((channels, width, states.element_type))
        }
        _ => Err(format!("expected {HIDDEN_STATES} (batch, channels, size, size), found {states}")),
    }
}

fn by_name<'a, const N: usize>(inputs: &'a [TensorInfo], names: [&str; N]) -> Option<[&'a TensorInfo; N]> {
    let found: Vec<&TensorInfo> = names.iter().filter_map(|name| inputs.iter().find(|i| i.name == *name)).collect();
    found.try_into().ok()
}
