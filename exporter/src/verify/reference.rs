//! Inputs and outputs of the user's own run of the model, and how far the written model is from them.

use super::Subject;
use super::runner::{Runner, host};
use crate::error::Error;
use crate::graph::{Dim, ElementType, Graph, Value};
use crate::passes::Gates;
use crate::staging::Staging;
use half::{bf16, f16};
use moh_models::Model;
use moh_models::eager::Eager;
use moh_models::families::PortDim;
use moh_models::sample::{Sample, SampleData};
use moh_operators::{DType, tolerance};
use moh_runtime::Tensor as Host;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Inputs, and what the user's own code makes of them: a safetensors file whose tensors are named as the model's inputs and outputs.
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
    #[serde(serialize_with = "crate::report::path")]
    pub file: PathBuf,
    /// What ran the model.
    pub runtime: String,
    /// The outputs, in the model's order.
    pub outputs: Vec<OutputError>,
    /// Whether the model got the heads that our own implementation selects in float32, because rounding selects others.
    pub given_gates: bool,
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
        if self.given_gates {
            write!(
                f,
                "; with the heads given that our own implementation selects in float32, as rounding selects others"
            )?;
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
            let inputs = inputs(&tensors, graph)?;
            let outputs = outputs(&tensors, graph, model, &inputs)?;
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

/// The element of the exported model's outputs that is farthest from the user's.
#[derive(Debug)]
pub struct Difference {
    /// The user's file.
    pub file: PathBuf,
    /// The output.
    pub output: String,
    /// The element.
    pub index: Vec<usize>,
    /// Its value in the file.
    pub expected: f32,
    /// Its value in the exported model's output.
    pub found: f32,
    /// How far it may be.
    pub allowed: f32,
    /// The same in units of `largest`.
    pub tolerance: f32,
    /// The largest value in the file's output, or 1.
    pub largest: f32,
    /// How many elements are farther than they may be.
    pub beyond: usize,
    /// How many were compared.
    pub elements: usize,
    /// What ran the model.
    pub runtime: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { output, index, expected, found, allowed, tolerance, largest, beyond, elements, .. } = self;
        write!(f, "{}: the exported model disagrees with your outputs: {output}{index:?}: ", self.file.display())?;
        write!(f, "expected {expected}, found {found} with {}; ", self.runtime)?;
        write!(f, "off by {:.1e}, allowed {allowed:.1e} ({tolerance:.0e} of {largest}, ", (found - expected).abs())?;
        write!(f, "the largest value or 1); {beyond} of {elements} elements are off by more than that")
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
    /// The padding of output `name` of `model`; `None` where no mask says so.
    fn of(name: &str, shape: &[usize], model: &Model, inputs: &[Sample]) -> Option<Padding> {
        let port = model.outputs().into_iter().find(|port| port.name == name)?;
        let axis = |symbol| port.dims.iter().position(|dim| *dim == PortDim::Named(symbol));
        if axis("batch") != Some(0) {
            return None;
        }
        let mask = inputs.iter().find(|sample| sample.name == "attention_mask")?;
        let (&[rows, length], SampleData::I64(mask)) = (mask.shape.as_slice(), &mask.data) else { return None };
        // New tokens are the last ones that the mask is about.
        let (axis, first) = match (axis("sequence"), axis("past+sequence")) {
            (Some(axis), _) => (axis, length.checked_sub(shape[axis])?),
            (None, Some(axis)) if shape[axis] == length => (axis, 0),
            _ => return None,
        };
        let rows = if rows == shape[0] { mask.chunks(length.max(1)) } else { return None };
        Some(Padding { axis, tokens: rows.flat_map(|row| row[first..].iter().map(|seen| *seen == 0)).collect() })
    }

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

/// Sizes of symbolic dimensions, and the tensors that they are known from.
#[derive(Default)]
struct Symbols(BTreeMap<String, (usize, String)>);

impl Symbols {
    /// Learns the symbols of `port` from the shape of its tensor; sums of symbols are for [`Symbols::check`].
    fn learn(&mut self, port: &Value, shape: &[usize]) {
        for (dim, &size) in port.dims.iter().zip(shape) {
            if let Dim::Named(name) = dim
                && !name.contains('+')
            {
                self.0.entry(name.clone()).or_insert_with(|| (size, port.name.clone()));
            }
        }
    }

    /// The size of a dimension, as far as it is known.
    fn size(&self, dim: &Dim) -> Option<usize> {
        match dim {
            Dim::Fixed(n) => Some(*n),
            Dim::Named(sum) => sum.split('+').map(|part| part.parse().ok().or_else(|| Some(self.0.get(part)?.0))).sum(),
            Dim::Unknown => None,
        }
    }

    /// Whether a tensor has the port's shape.
    fn check(&self, port: &Value, shape: &[usize]) -> Result<(), String> {
        let known = |dim: &Dim| self.size(dim);
        let fits = |(dim, &size): (&Dim, &usize)| known(dim).is_none_or(|expected| expected == size);
        if port.dims.len() == shape.len() && port.dims.iter().zip(shape).all(fits) {
            return Ok(());
        }
        let sizes: Vec<String> =
            port.dims.iter().map(|d| known(d).map_or("any".to_owned(), |n| n.to_string())).collect();
        let others: Vec<&str> = port.dims.iter().filter_map(|dim| self.source(dim, &port.name)).collect();
        let others = if others.is_empty() { String::new() } else { format!(" by {}", others.join(", ")) };
        let expected = format!("{}, here [{}]{others}", dims(port), sizes.join(", "));
        Err(format!("tensor {:?} has shape {shape:?}, expected {expected}", port.name))
    }

    /// Another tensor that a dimension's size is known from.
    fn source(&self, dim: &Dim, than: &str) -> Option<&str> {
        let Dim::Named(name) = dim else { return None };
        Some(self.0.get(name)?.1.as_str()).filter(|source| *source != than)
    }
}

fn dims(port: &Value) -> String {
    format!("({})", port.dims.iter().map(Dim::to_string).collect::<Vec<_>>().join(", "))
}

/// Names for a message: the first few.
fn names<'a>(ports: impl Iterator<Item = &'a Value>) -> String {
    const LISTED: usize = 6;
    let all: Vec<&str> = ports.map(|port| port.name.as_str()).collect();
    match all.len() {
        n if n > LISTED => format!("{} and {} more", all[..LISTED].join(", "), n - LISTED),
        _ => all.join(", "),
    }
}

/// Every input of the model: the file's, and empty caches.
fn inputs(tensors: &SafeTensors<'_>, graph: &Graph) -> Result<Vec<Sample>, String> {
    let is_port = |name: &str| graph.inputs.iter().chain(&graph.outputs).any(|port| port.name == name);
    let mut unknown: Vec<String> =
        tensors.names().into_iter().filter(|name| !is_port(name)).map(|name| format!("{name:?}")).collect();
    unknown.sort();
    if !unknown.is_empty() {
        return Err(format!(
            "{} named as no input or output of the model; its inputs are {}; its outputs are {}",
            if unknown.len() == 1 {
                format!("tensor {} is", unknown[0])
            } else {
                format!("tensors {} are", unknown.join(", "))
            },
            names(graph.inputs.iter()),
            names(graph.outputs.iter()),
        ));
    }
    let mut symbols = Symbols::default();
    let given = |port: &Value| tensors.tensor(&port.name).ok();
    for port in &graph.inputs {
        if let Some(view) = given(port) {
            symbols.learn(port, view.shape());
        }
    }
    // Where nothing is cached, nobody needs to say so.
    for dim in graph.inputs.iter().filter(|port| given(port).is_none() && is_cache(port)).flat_map(|port| &port.dims) {
        if let Dim::Named(name) = dim {
            symbols.0.entry(name.clone()).or_insert((0, "the caches, which are not given".to_owned()));
        }
    }
    let (mut inputs, mut missing) = (Vec::new(), Vec::new());
    for port in &graph.inputs {
        match given(port) {
            Some(view) => {
                symbols.check(port, view.shape())?;
                inputs.push(sample(port, &view)?);
            }
            None => {
                let shape: Option<Vec<usize>> = port.dims.iter().map(|dim| symbols.size(dim)).collect();
                match shape.filter(|shape| shape.contains(&0) && is_cache(port)) {
                    Some(shape) => {
                        inputs.push(Sample { name: port.name.clone(), shape, data: SampleData::F32(Vec::new()) });
                    }
                    None => missing.push(port),
                }
            }
        }
    }
    match missing.first() {
        None => Ok(inputs),
        Some(first) => {
            let (rest, all) = (missing.len() - 1, names(missing.iter().copied()));
            let shape = if rest == 0 { format!(" {}", dims(first)) } else { String::new() };
            Err(format!("lacks the model's input{} {all}{shape}", if rest == 0 { "" } else { "s" }))
        }
    }
}

fn is_cache(port: &Value) -> bool {
    port.name.starts_with("past_key_values.")
}

/// The outputs that the file holds.
fn outputs(tensors: &SafeTensors<'_>, graph: &Graph, model: &Model, inputs: &[Sample]) -> Result<Vec<Wanted>, String> {
    let mut symbols = Symbols::default();
    for port in &graph.inputs {
        if let Some(input) = inputs.iter().find(|input| input.name == port.name) {
            symbols.learn(port, &input.shape);
        }
    }
    let mut outputs = Vec::new();
    for port in &graph.outputs {
        let Ok(view) = tensors.tensor(&port.name) else { continue };
        let (name, shape) = (port.name.clone(), view.shape().to_vec());
        symbols.check(port, &shape)?;
        let values = floats(&view)
            .ok_or_else(|| format!("tensor {name:?} has type {:?}, expected floating-point numbers", view.dtype()))?;
        let padding = Padding::of(&name, &shape, model, inputs);
        let rounding = match view.dtype() {
            Dtype::F16 => tolerance::model_output(DType::F16),
            Dtype::BF16 => tolerance::model_output(DType::BF16),
            _ => 0.0,
        };
        let wanted = Wanted { name, shape, values, rounding, padding };
        if let Some((i, value)) = wanted.compared().find(|(_, value)| !value.is_finite()) {
            let index = coordinates(i, &wanted.shape);
            return Err(format!("{}{index:?} is {value}: nothing can be compared with that", wanted.name));
        }
        if wanted.compared().next().is_none() {
            return Err(format!("tensor {:?} holds nothing to compare", wanted.name));
        }
        outputs.push(wanted);
    }
    match outputs.is_empty() {
        true => Err(format!("holds no output of the model, which are {}", names(graph.outputs.iter()))),
        false => Ok(outputs),
    }
}

/// A tensor as numbers of the port's kind; the element type of the written model comes later.
fn sample(port: &Value, view: &TensorView<'_>) -> Result<Sample, String> {
    let expected = |what: &str| format!("tensor {:?} has type {:?}, expected {what}", port.name, view.dtype());
    let data = match port.ty {
        ElementType::I64 | ElementType::Bool => SampleData::I64(integers(view).ok_or_else(|| expected("integers"))?),
        _ => SampleData::F32(match (floats(view), integers(view)) {
            (Some(floats), _) => floats,
            // Diffusion models are trained on timesteps that are integers.
            (None, Some(integers)) => integers.iter().map(|&v| v as f32).collect(),
            (None, None) => return Err(expected("floating-point numbers")),
        }),
    };
    Ok(Sample { name: port.name.clone(), shape: view.shape().to_vec(), data })
}

fn each<T, const N: usize>(view: &TensorView<'_>, read: impl Fn([u8; N]) -> T) -> Vec<T> {
    view.data().as_chunks::<N>().0.iter().map(|&bytes| read(bytes)).collect()
}

/// The elements in f32; `None` for other types than floating-point ones.
fn floats(view: &TensorView<'_>) -> Option<Vec<f32>> {
    Some(match view.dtype() {
        Dtype::F32 => each(view, f32::from_le_bytes),
        Dtype::F64 => each(view, |bytes| f64::from_le_bytes(bytes) as f32),
        Dtype::F16 => each(view, |bytes| f16::from_le_bytes(bytes).to_f32()),
        Dtype::BF16 => each(view, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        _ => return None,
    })
}

/// The elements as integers; booleans are 0 and 1.
fn integers(view: &TensorView<'_>) -> Option<Vec<i64>> {
    Some(match view.dtype() {
        Dtype::I64 => each(view, i64::from_le_bytes),
        Dtype::I32 => each(view, |bytes| i32::from_le_bytes(bytes).into()),
        Dtype::I16 => each(view, |bytes| i16::from_le_bytes(bytes).into()),
        Dtype::U8 => view.data().iter().map(|&byte| byte.into()).collect(),
        Dtype::BOOL => view.data().iter().map(|&byte| i64::from(byte != 0)).collect(),
        _ => return None,
    })
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
        let compared = |outputs, given_gates| {
            let (file, runtime) = (reference.file.clone(), runtime.clone());
            Compared { file, runtime, outputs, given_gates }
        };
        let differs = match reference.compare(&outputs, tolerance, &runtime) {
            Ok(outputs) => return Ok(compared(outputs, false)),
            Err(differs) => differs,
        };
        let expected = self.expected(&mut Eager::new().with_taps(), &reference.inputs)?;
        if self.routes_as_reference() && !expected.undecided()? {
            return Err(differs);
        }
        self.check_finite(&outputs)?;
        let mut inputs = inputs;
        for (name, gates) in &expected.gates {
            inputs.push((name.clone(), host(gates)?));
        }
        let outputs = self.variant(staging, Gates::Input)?.run(inputs)?;
        Ok(compared(reference.compare(&outputs, tolerance, &runtime)?, true))
    }
}
