//! Inputs and outputs of the user's own run of the model, and how far the written model is from them.

mod read;

use super::Subject;
use super::runner::{Runner, host};
use crate::difference::Difference;
use crate::error::Error;
use crate::graph::Graph;
use crate::passes::Gates;
use crate::staging::Staging;
use moh_models::Model;
use moh_models::sample::Sample;
use moh_runtime::Tensor as Host;
use safetensors::SafeTensors;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Inputs, and what the user's own code makes of them: a safetensors file whose tensors have the names of the model's inputs
/// and outputs.
pub struct Reference {
    file: PathBuf,
    /// Every input of the model.
    inputs: Vec<Sample>,
    outputs: Vec<Wanted>,
    /// What was asked for in the place of ours.
    tolerance: Option<f32>,
}

/// An output to compare with.
struct Wanted {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
    /// Where the run that made it was rounded: our tolerance for its element type.
    rounding: f32,
    padding: Option<Padding>,
}

/// Which positions of an output are no tokens but padding, where its values mean nothing.
struct Padding {
    /// The axis of the tokens; the first one is the batch.
    axis: usize,
    /// (batch, tokens).
    tokens: Vec<bool>,
}

/// How far one output is from the user's.
#[derive(Debug, Clone, Serialize)]
pub struct OutputError {
    /// The output.
    pub name: String,
    /// The largest error, in units of the largest value (or of 1).
    pub error: f32,
    /// What it may be.
    pub tolerance: f32,
    /// Positions left out because they are padding.
    pub padding: usize,
}

/// The outputs of the written model that agree with the user's.
#[derive(Debug, Clone, Serialize)]
pub struct Compared {
    /// The user's file.
    #[serde(serialize_with = "crate::text::path")]
    pub file: PathBuf,
    /// What ran the model.
    pub runtime: String,
    /// The outputs, in the model's order.
    pub outputs: Vec<OutputError>,
    /// Where rounding selects other heads: the largest error with those, in units of the largest value. The errors of `outputs`
    /// are then with the heads given that our own implementation selects in float32.
    pub other_heads_error: Option<f32>,
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// More are too many to list.
        const LISTED: usize = 3;
        write!(f, "{}, run with {}: ", self.file.display(), self.runtime)?;
        let error = |of: &OutputError| format!("off by at most {:.1e} (allowed {:.0e})", of.error, of.tolerance);
        let (listed, rest) = self.outputs.split_at(self.outputs.len().min(LISTED));
        let mut parts: Vec<String> = listed.iter().map(|of| format!("{} {}", of.name, error(of))).collect();
        if let Some(worst) = rest.iter().max_by(|a, b| a.error.total_cmp(&b.error)) {
            parts.push(format!("{} more {}", rest.len(), error(worst)));
        }
        write!(f, "{} from your outputs", parts.join(", "))?;
        if let Some(padding) = self.outputs.iter().map(|of| of.padding).max().filter(|n| *n > 0) {
            write!(f, "; {padding} padded positions left out")?;
        }
        if let Some(error) = self.other_heads_error {
            write!(f, "; with the heads given that our own implementation selects in float32: ")?;
            write!(f, "rounding selects others for some tokens, and is off by {error:.1e} then")?;
        }
        Ok(())
    }
}

impl Reference {
    /// Reads `file` for a model whose graph is `graph`. `tolerance` takes the place of ours.
    ///
    /// # Errors
    /// [`Error::Reference`] for a file that cannot be read, a tensor that is no input or output or does not fit, an input that is
    /// missing, or no output.
    pub(crate) fn open(file: &Path, tolerance: Option<f32>, model: &Model, graph: &Graph) -> Result<Reference, Error> {
        let read = || {
            let bytes = std::fs::read(file).map_err(|e| e.to_string())?;
            let tensors = SafeTensors::deserialize(&bytes).map_err(|e| format!("not a safetensors file: {e}"))?;
            let inputs = read::inputs(&tensors, graph)?;
            let outputs = read::outputs(&tensors, graph, model, &inputs)?;
            Ok(Reference { file: file.to_owned(), inputs, outputs, tolerance })
        };
        read().map_err(|problem| Error::Reference { file: file.to_owned(), problem })
    }

    /// The errors of the model's outputs.
    fn compare(&self, found: &BTreeMap<String, Host>, of: f32, runtime: &str) -> Result<Vec<OutputError>, Error> {
        self.outputs.iter().map(|wanted| self.compare_one(wanted, found, of, runtime)).collect()
    }

    fn compare_one(
        &self,
        wanted: &Wanted,
        outputs: &BTreeMap<String, Host>,
        tolerance: f32,
        runtime: &str,
    ) -> Result<OutputError, Error> {
        let (name, shape) = (&wanted.name, &wanted.shape);
        let found = super::numbers(outputs, name)?;
        if let Some(tensor) = outputs.get(name).filter(|tensor| tensor.shape() != shape) {
            let problem = format!("tensor {name:?} has shape {shape:?}, the exported model's has {:?}", tensor.shape());
            return Err(Error::Reference { file: self.file.clone(), problem });
        }
        let tolerance = self.tolerance.unwrap_or(tolerance.max(wanted.rounding));
        let largest = wanted.compared().fold(1f32, |largest, (_, value)| largest.max(value.abs()));
        let (mut worst, mut at, mut beyond) = (0f32, 0, 0);
        for (i, expected) in wanted.compared() {
            let error = (found[i] - expected).abs() / largest;
            let error = if error.is_nan() { f32::INFINITY } else { error };
            beyond += usize::from(error > tolerance);
            if error > worst {
                (worst, at) = (error, i);
            }
        }
        if beyond > 0 {
            return Err(Error::Differs(Box::new(Difference {
                file: self.file.clone(),
                output: name.clone(),
                index: coordinates(at, shape),
                expected: wanted.values[at],
                found: found[at],
                allowed: tolerance * largest,
                tolerance,
                largest,
                beyond,
                elements: wanted.compared().count(),
                runtime: runtime.to_owned(),
            })));
        }
        let padding =
            wanted.padding.as_ref().map_or(0, |padding| padding.tokens.iter().filter(|padded| **padded).count());
        Ok(OutputError { name: name.clone(), error: worst, tolerance, padding })
    }
}

impl Wanted {
    /// Indices and values of what is compared.
    fn compared(&self) -> impl Iterator<Item = (usize, f32)> {
        let counted =
            |&(i, _): &(usize, f32)| !self.padding.as_ref().is_some_and(|padding| padding.covers(i, &self.shape));
        self.values.iter().copied().enumerate().filter(counted)
    }
}

impl Padding {
    /// Whether element `i` of an output of that shape is at padding.
    fn covers(&self, i: usize, shape: &[usize]) -> bool {
        let below = |axis: usize| shape[axis + 1..].iter().product::<usize>();
        let (row, token) = (i / below(0), i / below(self.axis) % shape[self.axis]);
        self.tokens[row * shape[self.axis] + token]
    }
}

/// The indices of element `i` of a tensor.
fn coordinates(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = vec![0; shape.len()];
    for (at, &size) in index.iter_mut().zip(shape).rev() {
        (*at, i) = (i % size, i / size);
    }
    index
}

impl Subject<'_> {
    /// Compares the written model with a reference.
    ///
    /// Where it disagrees, rounding may have selected other heads for some tokens, rightly: in f16, with attention in bf16, or at a
    /// router whose scores f32 does not tell apart. Then the heads are given that candle selects in f32.
    pub(super) fn compare(
        &self,
        staging: &Staging,
        written: &mut Runner,
        reference: &Reference,
    ) -> Result<Compared, Error> {
        let (runtime, tolerance) = (written.describe(), self.tolerance());
        let inputs = self.host_inputs(&reference.inputs)?;
        let outputs = written.run(inputs.clone())?;
        let compared = |outputs, other_heads_error| {
            let (file, runtime) = (reference.file.clone(), runtime.clone());
            Compared { file, runtime, outputs, other_heads_error }
        };
        let differs = match reference.compare(&outputs, tolerance, &runtime) {
            Ok(outputs) => return Ok(compared(outputs, None)),
            Err(Error::Differs(differs)) => differs,
            Err(other) => return Err(other),
        };
        let expected = self.expected(&mut super::eager(self.quantization).with_taps(), &reference.inputs)?;
        if self.routes_as_reference() && !expected.undecided()? {
            return Err(Error::Differs(differs));
        }
        self.check_finite(&outputs)?;
        let mut inputs = inputs;
        for (name, gates) in &expected.gates {
            inputs.push((name.clone(), host(gates)?));
        }
        let outputs = self.variant(staging, Gates::Input)?.run(inputs)?;
        let error = (differs.found - differs.expected).abs() / differs.largest;
        Ok(compared(reference.compare(&outputs, tolerance, &runtime)?, Some(error)))
    }
}
