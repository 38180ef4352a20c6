//! Runs the written model and compares it with candle, and with the outputs of a run of the user's own ([`Reference`]).
//!
//! Free-running, f32 must select the same heads and give the same outputs; rows whose routing f32 does not decide are left out
//! and counted. In f16, and with attention in bf16, a few rows route differently and their outputs are another model's, rightly:
//! there the outputs are compared with the reference's gates fed in, and differing rows are only counted.

mod layers;
mod reference;
mod runner;

pub use layers::{LayerAgreement, LayerReport, configure, verify_layers};
pub use reference::{Compared, OutputError, Reference};

use crate::encode::encode;
use crate::error::Error;
use crate::graph::{ElementType, Graph};
use crate::passes::{self, Gates, ShowGates};
use crate::quantize::Quantization;
use crate::staging::{self, Staging};
use crate::weights::Plan;
use candle_core::{Device, Tensor};
use moh_models::eager::{Eager, GAPS};
use moh_models::families::{Inputs, PortDim, Sizes};
use moh_models::sample::{Sample, SampleData};
use moh_models::{Model, ops::Type};
use moh_operators::{DType, GATES, tolerance};
use moh_runtime::Tensor as Host;
use runner::{Runner, host, numbers, values};
use serde::Serialize;
use std::collections::BTreeMap;

/// What comparing the written model with our own implementation, candle's, found.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verification {
    /// Not run, and why.
    #[serde(rename = "not_run")]
    Skipped(String),
    /// The model agrees with candle.
    Agrees(Agreement),
}

/// Figures of a model that agrees with candle.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Agreement {
    /// What ran the model.
    pub runtime: String,
    /// Largest error of an output, in units of the largest output (or of 1).
    pub error: f32,
    /// What it may be.
    pub tolerance: f32,
    /// Whether outputs were compared with the reference's gates fed in.
    pub given_gates: bool,
    /// Rows of gates: tokens times layers.
    pub rows: usize,
    /// Rows that select other heads than the reference.
    pub rerouted: usize,
}

impl std::fmt::Display for Verification {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verification::Skipped(why) => write!(f, "not run: {why}"),
            Verification::Agrees(a) => {
                let of = "compared with our own implementation (candle), not with your PyTorch code";
                write!(f, "run with {} and {of}: ", a.runtime)?;
                write!(f, "outputs off by at most {:.1e} (allowed {:.0e})", a.error, a.tolerance)?;
                let given = if a.given_gates { ", with the same heads given to both" } else { "" };
                match a.rerouted {
                    0 => write!(f, "{given}; same heads in all {} rows", a.rows),
                    n => write!(f, "{given}; other heads in {n} of {} rows, within rounding", a.rows),
                }
            }
        }
    }
}

/// What is verified: the model, its recorded graph, and what was written.
pub(crate) struct Subject<'a> {
    pub(crate) model: &'a Model,
    pub(crate) recorded: &'a Graph,
    pub(crate) graph: &'a Graph,
    pub(crate) plan: &'a Plan,
    pub(crate) dtype: ElementType,
    pub(crate) options: &'a crate::Options,
    pub(crate) quantization: Option<&'a Quantization>,
}

/// candle's results for one sample.
struct Expected {
    outputs: Vec<Tensor>,
    gates: BTreeMap<String, Tensor>,
    gaps: BTreeMap<String, Tensor>,
}

impl Expected {
    /// Whether f32 does not decide the heads of some token.
    fn undecided(&self) -> Result<bool, Error> {
        for gaps in self.gaps.values() {
            if values(gaps)?.iter().any(|gap| *gap < tolerance::ROUTING_GAP_F32) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Why no model in bfloat16 is run.
pub(crate) const NO_BF16: &str = "no CPU runtime here runs bfloat16 models";

/// How many numbers the inputs, the outputs and a layer's attention have with these sizes, where those that are not fixed are 1.
pub(crate) fn extent(model: &Model, sizes: &Sizes) -> usize {
    let size = |name: &str| sizes.get(name).unwrap_or(1);
    let (sequence, past) = (size("sequence"), sizes.get("past").unwrap_or(0));
    let total = sequence.saturating_add(past);
    let dim = |dim: &PortDim| match *dim {
        PortDim::Fixed(size) => size,
        PortDim::Named("total" | "capacity" | "past+sequence") => total,
        PortDim::Named(name) => size(name),
    };
    let product = |sizes: &mut dyn Iterator<Item = usize>| sizes.fold(1, usize::saturating_mul);
    let ports = model.inputs().into_iter().chain(model.outputs());
    let ports = ports.map(|port| product(&mut port.dims.iter().map(dim))).fold(0, usize::saturating_add);
    let heads = model.layers().iter().map(|layer| layer.heads.num_heads).max().unwrap_or(0);
    ports.saturating_add(product(&mut [size("batch"), heads, sequence, total].into_iter()))
}

impl Subject<'_> {
    /// Compares the written model with candle where `skipped` says nothing against it, and with a reference where there is one.
    ///
    /// # Errors
    /// [`Error::VerifyRun`], [`Error::Disagreement`]; [`Error::Reference`] and [`Error::Differs`].
    pub(crate) fn check(
        &self,
        staging: &Staging,
        skipped: Option<String>,
        reference: Option<&Reference>,
    ) -> Result<(Verification, Option<Compared>), Error> {
        let (verification, written) = match skipped {
            Some(why) => (Verification::Skipped(why), None),
            None => {
                let (agreement, written) = self.verify(staging)?;
                (Verification::Agrees(agreement), Some(written))
            }
        };
        let Some(reference) = reference else { return Ok((verification, None)) };
        let mut written = match written {
            Some(written) => written,
            None => Runner::load(&staging.model())?,
        };
        let compared = self.compare(staging, &mut written, reference)?;
        Ok((verification, Some(compared)))
    }

    /// Largest error of an output, in units of the largest one (or of 1).
    fn tolerance(&self) -> f32 {
        let dtype = match self.dtype {
            ElementType::F16 => DType::F16,
            ElementType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let mut largest = tolerance::model_output(dtype);
        if self.narrow_attention() {
            largest = largest.max(tolerance::MODEL_BF16_ATTENTION);
        }
        if self.rounds_activations() {
            largest = largest.max(tolerance::MODEL_INT8_ACTIVATIONS);
        }
        largest
    }

    /// Also gives the loaded model.
    fn verify(&self, staging: &Staging) -> Result<(Agreement, Runner), Error> {
        let samples = self.model.samples(&self.options.sizes);
        let mut eager = eager(self.quantization).with_taps();
        let expected: Vec<Expected> =
            samples.iter().map(|sample| self.expected(&mut eager, sample)).collect::<Result<_, _>>()?;
        drop(eager);

        let mut written = Runner::load(&staging.model())?;
        let mut agreement =
            Agreement { runtime: written.describe(), tolerance: self.tolerance(), ..Agreement::default() };
        let mut shown = self.variant(staging, Gates::Output)?;
        let mut undecided = 0;
        for (sample, expected) in samples.iter().zip(&expected) {
            undecided += self.compare_gates(&shown.run(self.host_inputs(sample)?)?, expected, &mut agreement)?;
        }
        drop(shown);

        agreement.given_gates = !self.routes_as_reference() || undecided > 0;
        let mut given = if agreement.given_gates { Some(self.variant(staging, Gates::Input)?) } else { None };
        for (sample, expected) in samples.iter().zip(&expected) {
            let inputs = self.host_inputs(sample)?;
            let outputs = written.run(inputs.clone())?;
            let compared = match &mut given {
                None => outputs,
                Some(given) => {
                    self.check_finite(&outputs)?;
                    let mut inputs = inputs;
                    for (name, gates) in &expected.gates {
                        inputs.push((name.clone(), host(gates)?));
                    }
                    given.run(inputs)?
                }
            };
            self.compare_outputs(&compared, expected, &mut agreement)?;
        }
        Ok((agreement, written))
    }

    /// Whether there is attention in bfloat16: of a model of another type, nothing else is.
    fn narrow_attention(&self) -> bool {
        self.dtype != ElementType::BF16 && self.graph.values.values().any(|value| value.ty == ElementType::BF16)
    }

    fn rounds_activations(&self) -> bool {
        self.quantization.is_some_and(Quantization::rounds_activations)
    }

    /// Whether everything that routers read is computed in f32.
    fn routes_as_reference(&self) -> bool {
        self.dtype == ElementType::F32 && !self.narrow_attention() && !self.rounds_activations()
    }

    fn expected(&self, eager: &mut Eager, sample: &[Sample]) -> Result<Expected, Error> {
        let outputs = self.model.forward(eager, &eager_inputs(sample)?)?;
        let taps = eager.take_taps();
        let with = |prefix: &'static str| {
            let chosen = taps.iter().filter(move |(name, _)| name.starts_with(prefix));
            chosen.map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
        };
        Ok(Expected { outputs, gates: with(GATES), gaps: with(GAPS) })
    }

    /// Another view of the recorded graph, on the same weight file.
    fn variant(&self, staging: &Staging, gates: Gates) -> Result<Runner, Error> {
        let mut graph = self.recorded.clone();
        let options = passes::Options { gates: ShowGates { gates }, ..self.options.passes.clone() };
        passes::run(&mut graph, &options)?;
        // A name that no file of the export has.
        let path = staging.path(&format!("{}.verify.onnx", staging.data_name()));
        staging::write_file(&path, &encode(&graph, self.plan, &staging.data_name())?)?;
        let runner = Runner::load(&path);
        std::fs::remove_file(&path).map_err(Error::io(&path))?;
        runner
    }

    fn host_inputs(&self, sample: &[Sample]) -> Result<Vec<(String, Host)>, Error> {
        host_inputs(self.model, self.dtype, sample)
    }

    /// Counts rows that select other heads; returns those where rounding may.
    fn compare_gates(
        &self,
        outputs: &BTreeMap<String, Host>,
        expected: &Expected,
        agreement: &mut Agreement,
    ) -> Result<usize, Error> {
        let mut undecided = 0;
        let decided = match self.routes_as_reference() {
            true => tolerance::ROUTING_GAP_F32,
            false => tolerance::ROUTING_GAP_ROUNDED,
        };
        // In the order of the graph.
        let recorded = self.recorded.outputs.iter().map(|output| &output.name);
        for name in recorded.filter(|name| name.starts_with(GATES)) {
            let Some(reference) = expected.gates.get(name) else { continue };
            let (found, before) = (numbers(outputs, name)?, undecided);
            let heads = *reference.dims().last().unwrap_or(&1);
            let reference = values(reference)?;
            if found.len() != reference.len() {
                return Err(Error::Disagreement(format!(
                    "{name} has {} values, expected {}",
                    found.len(),
                    reference.len()
                )));
            }
            let gaps = match expected.gaps.get(&name.replacen(GATES, GAPS, 1)) {
                Some(gaps) => values(gaps)?,
                None => vec![f32::INFINITY; reference.len() / heads],
            };
            for (row, (found, reference)) in found.chunks(heads).zip(reference.chunks(heads)).enumerate() {
                agreement.rows += 1;
                if found.iter().zip(reference).all(|(a, b)| (*a != 0.0) == (*b != 0.0)) {
                    continue;
                }
                agreement.rerouted += 1;
                if gaps.get(row).is_some_and(|gap| *gap < decided) {
                    undecided += 1;
                } else if before == 0 {
                    // In layers after an undecided row everything may differ; in its own and before, nothing may.
                    return Err(Error::Disagreement(format!(
                        "{name}, row {row}: gates {found:?}, expected {reference:?}"
                    )));
                }
            }
        }
        Ok(undecided)
    }

    fn compare_outputs(
        &self,
        outputs: &BTreeMap<String, Host>,
        expected: &Expected,
        agreement: &mut Agreement,
    ) -> Result<(), Error> {
        for (port, reference) in self.model.outputs().iter().zip(&expected.outputs) {
            let (found, reference) = (numbers(outputs, &port.name)?, values(reference)?);
            if found.len() != reference.len() {
                let lengths = format!("{} has {} values, expected {}", port.name, found.len(), reference.len());
                return Err(Error::Disagreement(lengths));
            }
            let largest = reference.iter().fold(1f32, |m, v| m.max(v.abs()));
            for (i, (a, b)) in found.iter().zip(&reference).enumerate() {
                let error = (a - b).abs() / largest;
                if error.is_nan() || error > agreement.tolerance {
                    let name = &port.name;
                    let allowed = agreement.tolerance * largest;
                    let found = format!("{name}: element {i} is {a}, expected {b} within {allowed:.1e}");
                    return Err(Error::Disagreement(found));
                }
                agreement.error = agreement.error.max(error);
            }
        }
        Ok(())
    }

    fn check_finite(&self, outputs: &BTreeMap<String, Host>) -> Result<(), Error> {
        for port in self.model.outputs() {
            if let Some(i) = numbers(outputs, &port.name)?.iter().position(|v| !v.is_finite()) {
                return Err(Error::Disagreement(format!("{}: element {i} is not finite", port.name)));
            }
        }
        Ok(())
    }
}

/// candle, with the weights that the written model has.
fn eager(quantization: Option<&Quantization>) -> Eager {
    match quantization.cloned() {
        Some(quantization) => Eager::new().reading(Box::new(move |weight| quantization.read(weight))),
        None => Eager::new(),
    }
}

/// The sample for candle.
fn eager_inputs(sample: &[Sample]) -> Result<Inputs<Tensor>, Error> {
    let tensor = |s: &Sample| match &s.data {
        SampleData::F32(data) => Tensor::from_slice(data, s.shape.as_slice(), &Device::Cpu),
        SampleData::I64(data) => Tensor::from_slice(data, s.shape.as_slice(), &Device::Cpu),
    };
    let inputs = sample.iter().map(|s| Ok((s.name.clone(), tensor(s).map_err(moh_models::Error::from)?)));
    Ok(Inputs::new(inputs.collect::<Result<Vec<_>, Error>>()?))
}

/// The sample in the element types of a model exported as `dtype`.
fn host_inputs(model: &Model, dtype: ElementType, sample: &[Sample]) -> Result<Vec<(String, Host)>, Error> {
    let ports = model.inputs();
    let half = |name: &str| {
        let port = ports.iter().find(|port| port.name == name);
        dtype == ElementType::F16 && port.is_some_and(|port| port.ty == Type::Model)
    };
    let one = |s: &Sample| {
        let shape = s.shape.clone();
        let tensor = match &s.data {
            SampleData::F32(data) if half(&s.name) => {
                Host::new(shape, data.iter().map(|&v| half::f16::from_f32(v)).collect::<Vec<_>>())
            }
            SampleData::F32(data) => Host::new(shape, data.clone()),
            SampleData::I64(data) => Host::new(shape, data.clone()),
        };
        Ok((s.name.clone(), tensor?))
    };
    sample.iter().map(one).collect()
}

#[cfg(test)]
mod tests;
