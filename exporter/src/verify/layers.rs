//! Compares a written model with candle layer by layer, so that only one layer is in memory: for models that do not fit as a whole.
//!
//! The model is cut where a block of the family ends. Each part is a model of its own, of the written file's nodes and weights. It
//! is run on what candle computes up to that block, and has to give what candle computes after it.

mod part;

use super::runner::{Runner, host, numbers, values};
use crate::cache::Cache;
use crate::error::Error;
use crate::exported;
use crate::graph::ElementType;
use crate::proto::{ModelProto, ValueInfoProto, tensor_shape_proto::dimension};
use crate::quantize::{self, Quantization, Quantize};
use crate::record;
use crate::seq2seq;
use candle_core::Tensor;
use moh_models::eager::{Eager, GAPS};
use moh_models::families::moa::DECODER_CALLS;
use moh_models::families::{PortDim, Sizes};
use moh_models::{Checkpoint, Model};
use moh_operators::{DType, GATES, tolerance};
use moh_runtime::Tensor as Host;
use part::Parts;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// How one part of the model compares with candle.
#[derive(Debug, Clone, Serialize)]
pub struct LayerAgreement {
    /// The block that it ends with; the last part, which gives the outputs, is `outputs`.
    pub layer: String,
    /// Largest error of one of its results, in units of that result's largest value (or of 1).
    pub error: f32,
    /// What it may be.
    pub tolerance: f32,
    /// Rows of gates: tokens times routers.
    pub rows: usize,
    /// Rows that select other heads than candle.
    pub rerouted: usize,
    /// What disagrees; `None` where everything agrees.
    pub problem: Option<String>,
}

/// How a model compares with candle, part by part.
#[derive(Debug, Clone, Serialize)]
pub struct LayerReport {
    /// What ran the model.
    pub runtime: String,
    /// Whether all parts agree.
    pub agrees: bool,
    /// The parts, in the model's order.
    pub layers: Vec<LayerAgreement>,
    /// What to know of the comparison.
    pub notes: Vec<String>,
}

impl LayerReport {
    /// The part that is farthest from what is allowed.
    pub fn worst(&self) -> Option<&LayerAgreement> {
        self.layers.iter().max_by(|a, b| {
            let of = |layer: &LayerAgreement| (layer.problem.is_some(), layer.error / layer.tolerance);
            of(a).partial_cmp(&of(b)).unwrap_or(std::cmp::Ordering::Equal)
        })
    }
}

impl fmt::Display for LayerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "run with {}, layer by layer, and compared with our own implementation (candle)", self.runtime)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        let width = self.layers.iter().map(|layer| layer.layer.len()).max().unwrap_or(0).max(5);
        writeln!(f, "{:width$}  {:>8}  {:>8}  heads", "layer", "error", "allowed")?;
        for layer in &self.layers {
            let heads = match (layer.rows, layer.rerouted) {
                (0, _) => "-".to_owned(),
                (rows, 0) => format!("same in all {rows} rows"),
                (rows, other) => format!("others in {other} of {rows} rows, then given"),
            };
            let problem = layer.problem.as_ref().map_or(String::new(), |problem| format!("  DISAGREES: {problem}"));
            let (name, error, allowed) = (&layer.layer, layer.error, layer.tolerance);
            writeln!(f, "{name:width$}  {error:>8.1e}  {allowed:>8.0e}  {heads}{problem}")?;
        }
        let wrong = self.layers.iter().filter(|layer| layer.problem.is_some()).count();
        match wrong {
            0 => write!(f, "all {} layers agree", self.layers.len()),
            _ => write!(f, "{wrong} of {} layers disagree", self.layers.len()),
        }
    }
}

/// candle's values for one sample.
struct Reference {
    inputs: BTreeMap<String, Host>,
    /// Outputs, block ends and gates by the values' names in the graph.
    values: BTreeMap<String, Tensor>,
    /// The margins of gates, by the gates' names in the graph.
    gaps: BTreeMap<String, Tensor>,
}

impl Reference {
    fn value(&self, name: &str) -> Result<&Tensor, Error> {
        self.values.get(name).ok_or_else(|| Error::Disagreement(format!("candle computes no value {name}")))
    }
}

/// Chooses for `checkpoint` what the model in `file` was exported with and no configuration says: how its cache grows, and which
/// calls it is for, of a decoder that was exported with its encoder.
///
/// # Errors
/// [`Error`] where the file cannot be read or is no ONNX model.
pub fn configure(checkpoint: &mut Checkpoint, file: &Path) -> Result<(), Error> {
    let graph = exported::read(file)?.graph.unwrap_or_default();
    if Cache::of_graph(&graph) == Cache::InPlace {
        Cache::InPlace.put(checkpoint);
    }
    if let Some(calls) = seq2seq::calls_of(&graph) {
        checkpoint.configure(DECODER_CALLS, calls);
    }
    Ok(())
}

/// Compares the model in `file` with `model`, whose checkpoint it was exported from. `all_bf16` says that all of the checkpoint's
/// tensors are bfloat16, so that an export in that type has rounded none. Parts of the model are written to `scratch`, one at a time.
///
/// # Errors
/// [`Error::Exported`] for a file that is no export of such a model; [`Error::VerifyRun`]. A part that disagrees is no error.
pub fn verify_layers(file: &Path, model: &Model, all_bf16: bool, scratch: &Path) -> Result<LayerReport, Error> {
    let bad = |problem: String| Error::Exported { file: file.to_owned(), problem };
    let proto = exported::read(file)?;
    let graph = proto.graph.as_ref().ok_or_else(|| bad("an ONNX model without a graph".to_owned()))?;
    moh_runtime::links(file)?.iter().try_for_each(|link| link.check(file))?;
    let dtype = dtype_of(model, &graph.output).ok_or_else(|| bad(other_model(model)))?;
    let sizes = sizes_of(model, &graph.input);
    let recording = record::Options { dtype, opset: crate::DEFAULT_OPSET, ir_version: 10 };
    let names = record::names(model, recording, &sizes)?;
    let ports = model.inputs().into_iter().map(|port| port.name);
    let missing = |name: &String| !graph.input.iter().any(|input| input.name.as_ref() == Some(name));
    if let Some(name) = ports.clone().find(missing) {
        return Err(bad(format!("{}: there is no input {name:?}", other_model(model))));
    }
    let parts = Parts::new(file, &proto, model, &names).map_err(bad)?;
    let quantization = quantization(&proto, model, recording, &sizes).map_err(bad)?;
    let int8 = quantization.as_ref().is_some_and(Quantization::rounds_activations);
    let references = references(model, &sizes, dtype, &names, super::eager(quantization.as_ref()))?;
    let rounding = match dtype {
        ElementType::F16 => DType::F16,
        ElementType::BF16 if !all_bf16 => DType::BF16,
        // What runs is in f32, which holds bf16's numbers.
        _ => DType::F32,
    };
    let mut report = LayerReport { runtime: String::new(), agrees: true, layers: Vec::new(), notes: Vec::new() };
    if dtype == ElementType::BF16 {
        report
            .notes
            .push("no CPU runtime runs bf16 models: its nodes were run in f32, with the same weights".to_owned());
    }
    let narrow = proto_has_bf16_attention(&proto, dtype);
    let mut tolerance = tolerance::model_output(rounding);
    if narrow {
        tolerance = tolerance.max(tolerance::MODEL_BF16_ATTENTION);
    }
    if int8 {
        tolerance = tolerance.max(tolerance::MODEL_INT8_ACTIVATIONS);
    }
    let is_exact = rounding == DType::F32 && !narrow && !int8;
    let gap = if is_exact { tolerance::ROUTING_GAP_F32 } else { tolerance::ROUTING_GAP_ROUNDED };
    for index in 0..parts.count() {
        let checked = Check { parts: &parts, index, tolerance, gap, half: dtype == ElementType::F16 };
        let (runtime, layer) = checked.run(&references, scratch)?;
        report.runtime = runtime;
        report.agrees &= layer.problem.is_none();
        report.layers.push(layer);
    }
    Ok(report)
}

fn other_model(model: &Model) -> String {
    format!("not an export of this {} checkpoint", model.family())
}

/// The type of the first output that has the model's.
fn dtype_of(model: &Model, outputs: &[ValueInfoProto]) -> Option<ElementType> {
    let port = model.outputs().into_iter().find(|port| port.ty == moh_models::ops::Type::Model)?;
    let found = outputs.iter().find(|output| output.name.as_deref() == Some(&port.name))?;
    let types = [ElementType::F32, ElementType::F16, ElementType::BF16];
    types.into_iter().find(|ty| Some(ty.onnx()) == part::element_type(found))
}

/// The dimensions that the export has fixed.
fn sizes_of(model: &Model, inputs: &[ValueInfoProto]) -> Sizes {
    let mut sizes = Vec::new();
    for port in model.inputs() {
        let found = inputs.iter().find(|input| input.name.as_ref() == Some(&port.name));
        for (dim, found) in port.dims.iter().zip(found.map(part::dims).unwrap_or_default()) {
            if let (PortDim::Named(name), Some(dimension::Value::DimValue(size))) = (dim, found) {
                sizes.push(((*name).to_owned(), size as usize));
            }
        }
    }
    Sizes::new(sizes.into_iter().filter(|(name, _)| !name.contains('+')))
}

/// How the file says that its weights were quantised.
fn quantization(
    proto: &ModelProto,
    model: &Model,
    recording: record::Options,
    sizes: &Sizes,
) -> Result<Option<Quantization>, String> {
    let entry = proto.metadata_props.iter().find(|entry| entry.key.as_deref() == Some(quantize::METADATA));
    let Some(text) = entry.and_then(|entry| entry.value.as_deref()) else { return Ok(None) };
    let unread = |error: String| format!("metadata {} is {text:?}: {error}", quantize::METADATA);
    let options: Quantize = serde_json::from_str(text).map_err(|error| unread(error.to_string()))?;
    let mut graph = record::record_sized(model, recording, sizes).map_err(|error| error.to_string())?;
    quantize::apply(&mut graph, &options).map(Some).map_err(|error| unread(error.to_string()))
}

/// Whether an attention node of a model of another type computes in bfloat16.
fn proto_has_bf16_attention(proto: &ModelProto, dtype: ElementType) -> bool {
    let nodes = proto.graph.iter().flat_map(|graph| &graph.node);
    let to_bf16 = |node: &crate::proto::NodeProto| {
        node.op_type.as_deref() == Some("Cast")
            && node.attribute.iter().any(|attribute| attribute.i == Some(i64::from(ElementType::BF16.onnx())))
    };
    dtype != ElementType::BF16 && nodes.into_iter().any(to_bf16)
}

/// Runs candle on every sample. It reads the weights while it runs, and keeps none.
fn references(
    model: &Model,
    sizes: &Sizes,
    dtype: ElementType,
    names: &record::Names,
    eager: Eager,
) -> Result<Vec<Reference>, Error> {
    let mut eager = eager.with_taps().forgetting();
    let one = |sample: Vec<moh_models::sample::Sample>| {
        let outputs = model.forward(&mut eager, &super::eager_inputs(&sample)?)?;
        let taps = eager.take_taps();
        let mut values: BTreeMap<String, Tensor> =
            model.outputs().into_iter().map(|port| port.name).zip(outputs).collect();
        let tap = |name: String| taps.get(&name).cloned();
        for (path, value) in &names.blocks {
            values.extend(tap(format!("{}.{path}", moh_models::ops::Tap::Output.prefix())).map(|t| (value.clone(), t)));
        }
        let mut gaps = BTreeMap::new();
        for (path, value) in &names.gates {
            for name in [value.clone(), format!("{GATES}{path}")] {
                values.extend(tap(format!("{GATES}{path}")).map(|t| (name, t)));
            }
            gaps.extend(tap(format!("{GAPS}{path}")).map(|t| (value.clone(), t)));
        }
        Ok(Reference { inputs: super::host_inputs(model, dtype, &sample)?.into_iter().collect(), values, gaps })
    };
    model.samples(sizes).into_iter().map(one).collect()
}

/// One part that is compared.
struct Check<'a> {
    parts: &'a Parts<'a>,
    index: usize,
    tolerance: f32,
    /// The relative gap between two heads' scores from which no rounding changes which of them is used.
    gap: f32,
    half: bool,
}

impl Check<'_> {
    fn run(&self, references: &[Reference], scratch: &Path) -> Result<(String, LayerAgreement), Error> {
        let mut layer = LayerAgreement {
            layer: self.parts.name(self.index).to_owned(),
            error: 0.0,
            tolerance: self.tolerance,
            rows: 0,
            rerouted: 0,
            problem: None,
        };
        let written = self.parts.write(self.index, scratch)?;
        let mut runner = Runner::load(&written.path(false))?;
        let mut given = None;
        for reference in references {
            let outputs = runner.run(self.inputs(written.inputs(false), reference)?)?;
            let rerouted = layer.rerouted;
            self.compare_gates(&outputs, reference, written.gates(), &mut layer)?;
            // Rows that select other heads are another model's, rightly: the heads are given then.
            let outputs = match layer.rerouted > rerouted {
                false => outputs,
                true => {
                    let runner = match &mut given {
                        Some(runner) => runner,
                        None => given.insert(Runner::load(&written.path(true))?),
                    };
                    runner.run(self.inputs(written.inputs(true), reference)?)?
                }
            };
            self.compare_results(&outputs, reference, written.results(), &mut layer)?;
        }
        Ok((runner.describe(), layer))
    }

    /// The values of that name: inputs of the model, or what candle has computed.
    fn inputs(&self, names: &[String], reference: &Reference) -> Result<Vec<(String, Host)>, Error> {
        let one = |name: &String| {
            let tensor = match reference.inputs.get(name) {
                Some(input) => input.clone(),
                None if self.half && !self.parts.is_gates(name) => {
                    let value = reference.value(name)?;
                    let halves: Vec<half::f16> = values(value)?.into_iter().map(half::f16::from_f32).collect();
                    Host::new(value.dims().to_vec(), halves)?
                }
                None => host(reference.value(name)?)?,
            };
            Ok((name.clone(), tensor))
        };
        names.iter().map(one).collect()
    }

    fn compare_gates(
        &self,
        outputs: &BTreeMap<String, Host>,
        reference: &Reference,
        gates: &[String],
        layer: &mut LayerAgreement,
    ) -> Result<(), Error> {
        for name in gates {
            let expected = reference.value(name)?;
            let heads = (*expected.dims().last().unwrap_or(&1)).max(1);
            let (found, expected) = (numbers(outputs, name)?, values(expected)?);
            let gaps = reference.gaps.get(name).map(values).transpose()?;
            for (row, (found, expected)) in found.chunks(heads).zip(expected.chunks(heads)).enumerate() {
                layer.rows += 1;
                if found.iter().zip(expected).all(|(a, b)| (*a != 0.0) == (*b != 0.0)) {
                    continue;
                }
                layer.rerouted += 1;
                let gap = gaps.as_ref().and_then(|gaps| gaps.get(row)).copied().unwrap_or(f32::INFINITY);
                if gap >= self.gap && layer.problem.is_none() {
                    layer.problem = Some(format!("{name}, row {row}: gates {found:?}, expected {expected:?}"));
                }
            }
        }
        Ok(())
    }

    fn compare_results(
        &self,
        outputs: &BTreeMap<String, Host>,
        reference: &Reference,
        results: &[String],
        layer: &mut LayerAgreement,
    ) -> Result<(), Error> {
        for name in results {
            let expected = reference.value(name)?;
            let (found, expected) = (numbers(outputs, name)?, values(expected)?);
            if found.len() != expected.len() {
                layer.problem = Some(format!("{name} has {} values, expected {}", found.len(), expected.len()));
                continue;
            }
            let largest = expected.iter().fold(1f32, |m, v| m.max(v.abs()));
            for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                let error = (a - b).abs() / largest;
                let error = if error.is_nan() { f32::INFINITY } else { error };
                if error > layer.tolerance && layer.problem.is_none() {
                    let allowed = layer.tolerance * largest;
                    layer.problem = Some(format!("{name}: element {i} is {a}, expected {b} within {allowed:.1e}"));
                }
                layer.error = layer.error.max(error);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
