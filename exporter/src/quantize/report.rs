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
    /// Tensors that stayed: as asked for, because they decide which heads are on, or because no blocks fit their rows.
    pub kept: Vec<String>,
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
        let (mut layers, mut kept) = (BTreeMap::new(), BTreeSet::new());
        for part in parts {
            for (name, matrix) in &part.matrices {
                layers.entry(name.clone()).or_insert_with(|| layer(matrix, part.options.zero_points));
            }
            kept.extend(part.kept.iter().cloned());
        }
        let layers: Vec<LayerError> = layers.into_values().collect();
        QuantizationReport {
            options: options.clone(),
            bytes_before: layers.iter().map(|layer| layer.bytes_before).sum(),
            bytes: layers.iter().map(|layer| layer.bytes).sum(),
            layers,
            kept: kept.into_iter().collect(),
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
        match self.kept.len() {
            0 => Ok(()),
            kept if kept <= WORST => write!(f, "; kept: {}", self.kept.join(", ")),
            kept => write!(f, "; kept: {} and {} more", self.kept[..WORST - 1].join(", "), kept - WORST + 1),
        }
    }
}
