//! How far a training is.

use std::fmt;

/// A reported step. It displays as one line.
#[derive(Debug, Clone)]
pub struct Progress {
    /// The step, counted from 1.
    pub step: usize,
    /// Steps in all.
    pub steps: usize,
    /// The loss, averaged over the steps since the last report.
    pub loss: f64,
    /// Parts of the last step's loss, as the task names them, averaged over its batches.
    pub parts: Vec<(&'static str, f64)>,
    /// The learning rate.
    pub rate: f64,
    /// The gradients' norm, before it was clipped.
    pub norm: f64,
    /// Heads or experts that a token uses, and all of them: means over the routed layers.
    pub active: Option<(f64, f64)>,
    /// Seconds a step since the last report.
    pub seconds: f64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}/{}: loss {:.4}", self.step, self.steps, self.loss)?;
        if self.parts.len() > 1 {
            let parts: Vec<String> = self.parts.iter().map(|(name, value)| format!("{name} {value:.4}")).collect();
            write!(f, " ({})", parts.join(", "))?;
        }
        write!(f, ", rate {:.2e}, gradient norm {:.3}", self.rate, self.norm)?;
        if let Some((active, all)) = self.active {
            write!(f, ", {active:.2} of {all:.0} heads active")?;
        }
        write!(f, ", {:.0} ms a step", self.seconds * 1e3)
    }
}
