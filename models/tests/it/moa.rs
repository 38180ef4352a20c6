//! MoA: candle against the published code's data, and, where that code has no data, against its formulas in f64.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod complete;
mod edges;
mod golden;
mod oracle;
mod stacks;
mod synthetic;

use candle_core::{DType, Device, Tensor};
use moh_models::Model;
use moh_models::eager::Eager;
use moh_models::families::{Inputs, PortDim};
use moh_models::sample::{Rng, SampleData};
use std::collections::{BTreeMap, HashMap};

/// Largest error on outputs of magnitude 7 and less: float32 rounding alone moves them by 5e-6.
pub(crate) const TOLERANCE: f32 = 5e-5;

pub(crate) type Values = BTreeMap<String, Tensor>;

/// Output values by name, and gates and taps.
pub(crate) fn run(model: &Model, inputs: &Values) -> (Values, Values) {
    let mut eager = Eager::new().with_taps();
    let given = inputs.iter().map(|(name, value)| (name.clone(), value.clone()));
    let outputs = model.forward(&mut eager, &Inputs::new(given)).unwrap();
    let names = model.outputs().into_iter().map(|port| port.name);
    (names.zip(outputs).collect(), eager.take_taps())
}

pub(crate) fn max_abs(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let flat = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let worse = |max: f32, d: f32| if d.is_nan() { f32::INFINITY } else { max.max(d) };
    flat(a).iter().zip(flat(b)).map(|(a, b)| (a - b).abs()).fold(0.0, worse)
}

/// Fails where the values are further apart than rounding.
pub(crate) fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    let error = max_abs(found, expected);
    assert!(error <= TOLERANCE, "{what}: {error}");
}

pub(crate) fn ids(rows: &[&[i64]]) -> Tensor {
    Tensor::from_vec(rows.concat(), (rows.len(), rows[0].len()), &Device::Cpu).unwrap()
}

pub(crate) fn normals(seed: u64, shape: &[usize]) -> Tensor {
    let SampleData::F32(values) = Rng::new(seed).normals("", shape).data else { unreachable!() };
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// (batch, length, width) from a row of tokens a batch entry.
pub(crate) fn stacked(rows: &[oracle::Rows]) -> Tensor {
    let values: Vec<f32> = rows.iter().flatten().flatten().map(|&v| v as f32).collect();
    Tensor::from_vec(values, (rows.len(), rows[0].len(), rows[0][0].len()), &Device::Cpu).unwrap()
}

/// The tokens of one batch entry.
pub(crate) fn rows_of(x: &Tensor, batch: usize) -> oracle::Rows {
    let rows = x.get(batch).unwrap().to_vec2::<f32>().unwrap();
    rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect()
}

/// 1 where a token is to be seen.
pub(crate) fn mask_of(padding: &[&[bool]]) -> Tensor {
    let rows: Vec<i64> = padding.concat().into_iter().map(|padding| i64::from(!padding)).collect();
    Tensor::from_vec(rows, (padding.len(), padding[0].len()), &Device::Cpu).unwrap()
}

/// The caches that a decoder begins with.
pub(crate) fn empty_caches(model: &Model, batch: usize) -> Values {
    let width = |dim: &PortDim| if let PortDim::Fixed(n) = dim { *n } else { 0 };
    let caches = model.inputs().into_iter().filter(|port| port.name.starts_with("past_key_values."));
    let empty = |dims: &[PortDim]| Tensor::zeros((batch, 1, 0, width(&dims[3])), DType::F32, &Device::Cpu).unwrap();
    caches.map(|port| (port.name.clone(), empty(&port.dims))).collect()
}

/// One call of a decoder: `tokens` are input_ids or inputs_embeds. The caches grow.
pub(crate) fn decode(
    model: &Model,
    tokens: &Tensor,
    source: &Tensor,
    source_mask: &Tensor,
    caches: &mut Values,
) -> Tensor {
    let mut inputs = caches.clone();
    inputs.insert(model.inputs()[0].name.clone(), tokens.clone());
    inputs.insert("encoder_hidden_states".to_owned(), source.clone());
    inputs.insert("encoder_attention_mask".to_owned(), source_mask.clone());
    let (mut outputs, _) = run(model, &inputs);
    let present: Vec<String> = outputs.keys().filter(|name| name.starts_with("present.")).cloned().collect();
    *caches = present
        .into_iter()
        .map(|name| (name.replacen("present", "past_key_values", 1), outputs.remove(&name).unwrap()))
        .collect();
    outputs.into_values().next().unwrap()
}

/// The whole target in calls of these lengths; the source is given in the first one only.
pub(crate) fn decode_in_steps(
    model: &Model,
    tokens: &Tensor,
    source: &Tensor,
    mask: &Tensor,
    lengths: &[usize],
) -> Tensor {
    let mut caches = empty_caches(model, tokens.dim(0).unwrap());
    let none = source.narrow(1, 0, 0).unwrap();
    let mut start = 0;
    let mut parts = Vec::new();
    for &length in lengths {
        let tokens = tokens.narrow(1, start, length).unwrap();
        let source = if start == 0 { source } else { &none };
        parts.push(decode(model, &tokens, source, mask, &mut caches));
        start += length;
    }
    Tensor::cat(&parts, 1).unwrap()
}

pub(crate) fn load(path: &std::path::Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}
