//! What a training has been like so far: two tables, which are saved with every checkpoint.

use crate::error::{Error, Result};
use moh_models::routing::Routing;
use std::fmt::Write;
use std::path::Path;

/// A step's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Step {
    pub(crate) step: usize,
    pub(crate) loss: f64,
    pub(crate) rate: f64,
    pub(crate) norm: f64,
}

/// How often each head or expert of a layer was on in a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Load {
    /// The step, counted from 1.
    pub step: usize,
    /// The layer's module path.
    pub layer: String,
    /// Shares of the tokens.
    pub shares: Vec<f32>,
}

/// Loss, learning rate and gradient norm of every step, and the heads' loads of the reported ones.
#[derive(Debug, Clone, Default)]
pub struct History {
    pub(crate) steps: Vec<Step>,
    pub(crate) loads: Vec<Load>,
}

pub(crate) const STEPS: &str = "history.csv";
pub(crate) const LOADS: &str = "loads.csv";

impl History {
    /// Steps, counted from 1, and their losses.
    pub fn losses(&self) -> impl Iterator<Item = (usize, f64)> {
        self.steps.iter().map(|step| (step.step, step.loss))
    }

    /// The loads of the reported steps, layer by layer.
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// The loads of a step.
    pub(crate) fn loads_of(step: usize, routing: &[Routing]) -> Result<Vec<Load>> {
        let load = |layer: &Routing| Ok(Load { step, layer: layer.path.clone(), shares: layer.load()? });
        routing.iter().map(load).collect()
    }

    /// Adds loads of a step.
    pub(crate) fn add_loads(&mut self, loads: Vec<Load>) {
        self.loads.extend(loads);
    }

    /// The tables as files. Rust writes numbers so that reading gives the same ones.
    pub(crate) fn files(&self) -> Vec<(String, Vec<u8>)> {
        let mut steps = "step,loss,learning_rate,gradient_norm\n".to_owned();
        for Step { step, loss, rate, norm } in &self.steps {
            let _ = writeln!(steps, "{step},{loss},{rate},{norm}");
        }
        let mut loads = "step,layer,share of the tokens that each head or expert is on for\n".to_owned();
        for Load { step, layer, shares } in &self.loads {
            let shares: Vec<String> = shares.iter().map(f32::to_string).collect();
            let _ = writeln!(loads, "{step},{layer},{}", shares.join(","));
        }
        vec![(STEPS.to_owned(), steps.into_bytes()), (LOADS.to_owned(), loads.into_bytes())]
    }

    /// The tables in a checkpoint's folder.
    pub(crate) fn read(folder: &Path) -> Result<History> {
        let mut history = History::default();
        for (name, is_load) in [(STEPS, false), (LOADS, true)] {
            let file = folder.join(name);
            let text = std::fs::read_to_string(&file).map_err(Error::io(&file))?;
            for (number, line) in text.lines().enumerate().skip(1) {
                let read = if is_load { history.read_load(line) } else { history.read_step(line) };
                let problem = format!("line {}: expected a row of the table, found {line:?}", number + 1);
                read.ok_or(Error::Checkpoint { file: file.clone(), problem })?;
            }
        }
        Ok(history)
    }

    fn read_step(&mut self, line: &str) -> Option<()> {
        let mut cells = line.split(',');
        let step = cells.next()?.parse().ok()?;
        let mut number = || cells.next()?.parse().ok();
        self.steps.push(Step { step, loss: number()?, rate: number()?, norm: number()? });
        Some(())
    }

    fn read_load(&mut self, line: &str) -> Option<()> {
        let mut cells = line.split(',');
        let (step, layer) = (cells.next()?.parse().ok()?, cells.next()?.to_owned());
        let shares = cells.map(str::parse).collect::<Result<_, _>>().ok()?;
        self.loads.push(Load { step, layer, shares });
        Some(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn tables_are_read_as_they_were() {
        let step = |step, x: f64| Step { step, loss: x.sqrt(), rate: x / 3e7, norm: x.powi(9) };
        let history = History {
            steps: vec![step(1, 2.0), step(2, 0.123), step(3, 1e-9)],
            loads: vec![Load { step: 2, layer: "layers.0.attn".to_owned(), shares: vec![1.0, 0.1, 1.0 / 3.0] }],
        };
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in history.files() {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let found = History::read(folder.path()).unwrap();
        assert_eq!((found.steps, found.loads), (history.steps, history.loads));
    }
}
