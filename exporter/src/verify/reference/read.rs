//! What a file of inputs and outputs holds, and whether it fits the model.

use super::{Padding, Wanted, coordinates};
use crate::graph::{Dim, ElementType, Graph, Value};
use half::{bf16, f16};
use moh_models::Model;
use moh_models::families::PortDim;
use moh_models::sample::{Sample, SampleData};
use moh_operators::{DType, tolerance};
use moh_runtime::names;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;

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
pub(super) fn inputs(tensors: &SafeTensors<'_>, graph: &Graph) -> Result<Vec<Sample>, String> {
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
    port.name.starts_with(names::PAST)
}

/// The outputs that the file holds.
pub(super) fn outputs(
    tensors: &SafeTensors<'_>,
    graph: &Graph,
    model: &Model,
    inputs: &[Sample],
) -> Result<Vec<Wanted>, String> {
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
        let padding = padding(&name, &shape, model, inputs);
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

/// The padding of output `name` of `model`; `None` where no mask says so.
fn padding(name: &str, shape: &[usize], model: &Model, inputs: &[Sample]) -> Option<Padding> {
    let port = model.outputs().into_iter().find(|port| port.name == name)?;
    let axis = |symbol| port.dims.iter().position(|dim| *dim == PortDim::Named(symbol));
    if axis("batch") != Some(0) {
        return None;
    }
    let mask = inputs.iter().find(|sample| sample.name == names::ATTENTION_MASK)?;
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

/// A tensor as numbers of the port's kind; the element type of the written model comes later.
fn sample(port: &Value, view: &TensorView<'_>) -> Result<Sample, String> {
    let expected = |what: &str| format!("tensor {:?} has type {:?}, expected {what}", port.name, view.dtype());
    let data = match port.ty {
        ty if !matches!(ty, ElementType::F32 | ElementType::F16 | ElementType::BF16) => {
            SampleData::I64(integers(view).ok_or_else(|| expected("integers"))?)
        }
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use moh_models::Checkpoint;

    /// The mask is about all tokens, of which the new ones are the last.
    #[test]
    fn padding_of_new_tokens_beside_a_cache() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama-moh-tiny");
        let model = Model::load(&Checkpoint::open(folder.as_ref(), None).unwrap(), None).unwrap();
        let mask = SampleData::I64(vec![0, 1, 1, 0, 1, 0, 0, 1, 1, 1]);
        let mask = Sample { name: "attention_mask".to_owned(), shape: vec![2, 5], data: mask };
        let found = padding("logits", &[2, 2, 128], &model, &[mask]).unwrap();
        assert_eq!((found.axis, found.tokens), (1, vec![true, false, false, false]));
    }
}
