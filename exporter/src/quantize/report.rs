//! What quantisation did to a model's weights.

use super::{Matrix, Quantization, Quantize};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Layers that text names.
const WORST: usize = 3;

/// The quantised weights of a model and their errors.
#[derive(Debug, Clone, Serialize)]
pub struct QuantizationReport {
    /// As asked for.
    pub options: Quantize,
    /// Bytes of the quantised tensors, had they not been.
    pub bytes_before: u64,
    /// Their bytes, with scales and zero points. What is stored in two forms counts once.
    pub bytes: u64,
    /// The tensors, by name.
    pub layers: Vec<LayerError>,
    /// The tensors that stayed, by name.
    pub kept: Vec<KeptTensor>,
}

/// A tensor that stayed as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptTensor {
    /// Its name in the model.
    pub tensor: String,
    /// Why it was not quantised.
    pub reason: KeptReason,
}

/// Why a tensor was not quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KeptReason {
    /// Its name was asked for.
    Asked,
    /// It decides which heads are on.
    Routing,
    /// Its rows are no whole blocks of any size.
    Rows,
    /// Its node has another weight that stayed.
    Together,
}

impl fmt::Display for KeptReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeptReason::Asked => "as asked for",
            KeptReason::Routing => "because they choose heads",
            KeptReason::Rows => "because their rows are no whole blocks",
            KeptReason::Together => "because another weight of their node is",
        })
    }
}

/// A quantised tensor.
#[derive(Debug, Clone, Serialize)]
pub struct LayerError {
    /// Its name in the model.
    pub tensor: String,
    /// Its shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Numbers that share a scale.
    pub block: usize,
    /// Root mean square of the errors, in units of that of the numbers.
    pub relative_error: f64,
    /// Its bytes, had it not been quantised.
    pub bytes_before: u64,
    /// Its bytes, with scales and zero points.
    pub bytes: u64,
}

impl QuantizationReport {
    /// The report on models that were written together. A tensor of several of them counts once.
    pub(crate) fn of<'a>(options: &Quantize, parts: impl IntoIterator<Item = &'a Quantization>) -> QuantizationReport {
        let (mut layers, mut kept) = (BTreeMap::new(), BTreeMap::new());
        for part in parts {
            for (name, matrix) in &part.matrices {
                layers.entry(name.clone()).or_insert_with(|| layer(matrix, part.options.zero_points));
            }
            kept.extend(part.kept.iter().map(|(tensor, reason)| (tensor.clone(), *reason)));
        }
        let layers: Vec<LayerError> = layers.into_values().collect();
        QuantizationReport {
            options: options.clone(),
            bytes_before: layers.iter().map(|layer| layer.bytes_before).sum(),
            bytes: layers.iter().map(|layer| layer.bytes).sum(),
            layers,
            kept: kept.into_iter().map(|(tensor, reason)| KeptTensor { tensor, reason }).collect(),
        }
    }
}

fn layer(matrix: &Matrix, zero_points: bool) -> LayerError {
    let sums = matrix.sums().unwrap_or_default();
    let weight = matrix.weight();
    let (ty, bits, numbers) = (matrix.scale_type(), matrix.grid().bits.count(), weight.elements());
    let of_block = ty.bits() + if zero_points { bits } else { 0 };
    LayerError {
        tensor: weight.name().to_owned(),
        shape: weight.shape().to_vec(),
        block: matrix.block(),
        relative_error: if sums.squares > 0.0 { (sums.error / sums.squares).sqrt() } else { 0.0 },
        bytes_before: (ty.bits() * numbers) as u64 / 8,
        bytes: (bits * numbers + of_block * (numbers / matrix.block())) as u64 / 8,
    }
}

impl fmt::Display for QuantizationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quantize { bits, zero_points, reduce_range, activations, form, .. } = &self.options;
        let zeros = if *zero_points { "with zero points" } else { "symmetric" };
        let (bits, activations, form) = (bits.name(), activations.name(), form.name());
        let range = if *reduce_range { ", reduced range" } else { "" };
        let blocks: BTreeSet<usize> = self.layers.iter().map(|layer| layer.block).collect();
        let blocks: Vec<String> = blocks.iter().rev().map(usize::to_string).collect();
        write!(f, "{} tensors to {bits}, blocks of {}, {zeros}{range}, ", self.layers.len(), blocks.join(" and "))?;
        write!(f, "{activations} activations, form {form}")?;
        let bytes = crate::text::bytes;
        write!(f, "; {} in place of {}", bytes(self.bytes), bytes(self.bytes_before))?;
        let mut worst: Vec<&LayerError> = self.layers.iter().collect();
        worst.sort_by(|a, b| b.relative_error.total_cmp(&a.relative_error));
        let percent = |error: &LayerError| format!("{} {:.2} %", error.tensor, 100.0 * error.relative_error);
        let named: Vec<String> = worst.iter().take(WORST).map(|error| percent(error)).collect();
        if !named.is_empty() {
            write!(f, "; largest errors: {}", named.join(", "))?;
        }
        let mut kept = BTreeMap::<KeptReason, Vec<&str>>::new();
        for one in &self.kept {
            kept.entry(one.reason).or_default().push(&one.tensor);
        }
        kept.iter().try_for_each(|(reason, names)| match names.len() {
            count if count <= WORST => write!(f, "; kept {reason}: {}", names.join(", ")),
            count => write!(f, "; kept {reason}: {} and {} more", names[..WORST - 1].join(", "), count - WORST + 1),
        })
    }
}
