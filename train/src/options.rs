//! How to train.

use crate::error::{Error, Result};
use candle_core::Device;

/// The type that a model computes in. Weights, their gradients' sums and the optimizer are in float32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// float32.
    #[default]
    F32,
    /// bfloat16 for what the model's `forward` has in the model's type; routers, norms, attention scores and losses stay in float32.
    /// It is for GPUs: candle has no bfloat16 products on CPUs. There they are computed in float32 and rounded, which takes longer than
    /// [`Precision::F32`] does.
    Bf16,
}

/// How to train.
#[derive(Debug, Clone)]
pub struct Options {
    /// Steps in all.
    pub steps: usize,
    /// The learning rate after the warm-up.
    pub learning_rate: f64,
    /// Steps over which the learning rate grows from 0.
    pub warmup: usize,
    /// What the cosine ends with, as a share of the learning rate.
    pub final_rate: f64,
    /// AdamW's shares of the old moments.
    pub betas: (f64, f64),
    /// AdamW's addend to the square root.
    pub eps: f64,
    /// AdamW's decay, of matrices and kernels; norms, biases and tables of positions have none.
    pub weight_decay: f64,
    /// The largest norm of all gradients together; longer ones are scaled to it.
    pub clip: Option<f64>,
    /// The share of the old average in the moving average of the weights; `None`: no average.
    pub ema: Option<f64>,
    /// Batches whose gradients are averaged for a step.
    pub accumulate: usize,
    /// What the model computes in.
    pub precision: Precision,
    /// What initial weights, and the random numbers of tasks, come from.
    pub seed: u64,
    /// Where to compute.
    pub device: Device,
    /// Steps between checkpoints. There is one after the last step, too.
    pub save_every: usize,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// Steps between lines of progress.
    pub report_every: usize,
    /// Tensors that stay as they are: those whose name begins with one of these.
    pub frozen: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            steps: 1000,
            learning_rate: 1e-3,
            warmup: 100,
            final_rate: 0.1,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.05,
            clip: Some(1.0),
            ema: None,
            accumulate: 1,
            precision: Precision::F32,
            seed: 0,
            device: Device::Cpu,
            save_every: 200,
            keep: 2,
            report_every: 20,
            frozen: Vec::new(),
        }
    }
}

impl Options {
    /// Refuses what cannot train.
    ///
    /// # Errors
    /// [`Error::Option`] for the first field that is out of range.
    pub fn check(&self) -> Result<()> {
        let counts = [
            ("steps", self.steps),
            ("accumulate", self.accumulate),
            ("save_every", self.save_every),
            ("keep", self.keep),
            ("report_every", self.report_every),
        ];
        if let Some((name, found)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(Error::Option { name, expected: "at least 1", found: found.to_string() });
        }
        if self.warmup > self.steps {
            let expected = "at most as many as steps";
            return Err(Error::Option { name: "warmup", expected, found: self.warmup.to_string() });
        }
        let positive = |x: f64| x > 0.0 && x.is_finite();
        let share = |x: f64| (0.0..1.0).contains(&x);
        let rules = [
            ("learning_rate", positive(self.learning_rate), "a positive number", self.learning_rate),
            ("final_rate", (0.0..=1.0).contains(&self.final_rate), "a share from 0 to 1", self.final_rate),
            ("betas", share(self.betas.0), "shares from 0 up to 1", self.betas.0),
            ("betas", share(self.betas.1), "shares from 0 up to 1", self.betas.1),
            ("eps", positive(self.eps), "a positive number", self.eps),
            ("weight_decay", self.weight_decay >= 0.0 && self.weight_decay.is_finite(), "0 or more", self.weight_decay),
            ("clip", self.clip.is_none_or(positive), "a positive number", self.clip.unwrap_or(1.0)),
            ("ema", self.ema.is_none_or(share), "a share from 0 up to 1", self.ema.unwrap_or(0.0)),
        ];
        match rules.into_iter().find(|(_, holds, ..)| !holds) {
            Some((name, _, expected, found)) => Err(Error::Option { name, expected, found: found.to_string() }),
            None => Ok(()),
        }
    }

    /// The learning rate of a step, counted from 1: it grows in proportion during the warm-up, and then follows half a cosine.
    pub fn rate(&self, step: usize) -> f64 {
        if step <= self.warmup {
            return self.learning_rate * step as f64 / self.warmup as f64;
        }
        let share = (step - self.warmup) as f64 / (self.steps - self.warmup).max(1) as f64;
        let cosine = 0.5 * (1.0 + (std::f64::consts::PI * share.min(1.0)).cos());
        self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * cosine)
    }

    /// What another run must have in common with this one to give the same numbers.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("steps", self.steps.to_string()),
            ("learning_rate", self.learning_rate.to_string()),
            ("warmup", self.warmup.to_string()),
            ("final_rate", self.final_rate.to_string()),
            ("betas", format!("{:?}", self.betas)),
            ("eps", self.eps.to_string()),
            ("weight_decay", self.weight_decay.to_string()),
            ("clip", format!("{:?}", self.clip)),
            ("ema", format!("{:?}", self.ema)),
            ("accumulate", self.accumulate.to_string()),
            ("precision", format!("{:?}", self.precision)),
            ("seed", self.seed.to_string()),
            ("frozen", format!("{:?}", self.frozen)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_and_cosine() {
        let options = Options { steps: 110, warmup: 10, learning_rate: 2.0, final_rate: 0.25, ..Options::default() };
        let rates = [1, 5, 10, 60, 110].map(|step| options.rate(step));
        let expected = [0.2, 1.0, 2.0, 1.25, 0.5];
        assert!(rates.iter().zip(expected).all(|(rate, expected)| (rate - expected).abs() < 1e-12), "{rates:?}");
    }

    /// All that the numbers of a training depend on.
    #[test]
    fn settings_tell_trainings_apart() {
        let usual = Options::default();
        for other in [
            Options { steps: 7, ..Options::default() },
            Options { learning_rate: 7e-3, ..Options::default() },
            Options { warmup: 7, ..Options::default() },
            Options { final_rate: 0.7, ..Options::default() },
            Options { betas: (0.7, usual.betas.1), ..Options::default() },
            Options { betas: (usual.betas.0, 0.7), ..Options::default() },
            Options { eps: 7e-8, ..Options::default() },
            Options { weight_decay: 0.7, ..Options::default() },
            Options { clip: None, ..Options::default() },
            Options { ema: Some(0.7), ..Options::default() },
            Options { accumulate: 7, ..Options::default() },
            Options { precision: Precision::Bf16, ..Options::default() },
            Options { seed: 7, ..Options::default() },
            Options { frozen: vec!["embed".to_owned()], ..Options::default() },
        ] {
            assert_ne!(other.settings(), usual.settings(), "{other:?}");
        }
        let about_the_disk = Options { save_every: 7, keep: 7, report_every: 7, ..Options::default() };
        assert_eq!(about_the_disk.settings(), usual.settings());
    }

    #[test]
    fn what_cannot_train_is_refused() {
        let text = |options: Options| options.check().err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(text(Options::default()), "");
        let text_of = text(Options { learning_rate: f64::NAN, ..Options::default() });
        assert_eq!(text_of, "option learning_rate: expected a positive number, found NaN");
        let text_of = text(Options { accumulate: 0, ..Options::default() });
        assert_eq!(text_of, "option accumulate: expected at least 1, found 0");
        let text_of = text(Options { warmup: 2000, ..Options::default() });
        assert_eq!(text_of, "option warmup: expected at most as many as steps, found 2000");
        assert!(text(Options { ema: Some(1.0), ..Options::default() }).starts_with("option ema"));
    }
}
