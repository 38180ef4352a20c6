//! The options of quantisation.

use moh_export::Quantize;
use moh_export::quantize::{Activations, BLOCKS, Bits, Form};

/// How weights are quantised.
#[derive(Debug, clap::Args)]
pub(crate) struct QuantizeArgs {
    /// Store the weights of large layers and embeddings as integers, blocks of which share a scale.
    #[arg(long, value_enum, value_name = "TYPE")]
    quantize: Option<Bits>,

    /// Numbers that share a scale: 16, 32, 64, 128 or 256 [default: 64 of int8, 32 of int4, fewer where a layer's rows are no multiple].
    #[arg(long, value_name = "N", allow_negative_numbers = true, requires = "quantize", value_parser = block)]
    block: Option<usize>,

    /// Give each block a zero point.
    #[arg(long, requires = "quantize")]
    zero_points: bool,

    /// With int8: use 7 bits of the 8, as onnxruntime's option of this name does. Weights are half as exact, and products with int8
    /// activations faster on processors with AVX2 but without VNNI.
    #[arg(long, requires = "quantize")]
    reduce_range: bool,

    /// What products with quantised weights are computed in; int8 is faster, and rounds activations as well [default: float, or as
    /// --for says].
    #[arg(long, value_enum, requires = "quantize")]
    activations: Option<Activations>,

    /// How quantised dense layers are written: DequantizeLinear and MatMul, com.microsoft.MatMulNBits, or ai.moh.LinearNBits, which
    /// runs on libmoh_ops and tract; other runtimes dequantise its weights first [default: as --for says; else qdq, but nbits for int8
    /// activations].
    #[arg(long, value_enum, requires = "quantize")]
    form: Option<Form>,

    /// Layers to leave in floating point, by names in the checkpoint; * stands for any text.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', requires = "quantize")]
    keep: Vec<String>,

    /// With int8: quantise query projections and embedding too where the heads are chosen by query norms. The model is smaller, and
    /// chooses other heads for about 1 % of the tokens.
    #[arg(long, requires = "quantize")]
    quantize_routing: bool,
}

impl QuantizeArgs {
    /// What was asked for, if anything, and for the rest what is `usual` for the target ([`moh_export::Target::quantized`]).
    ///
    /// # Errors
    /// Options that contradict each other.
    pub(crate) fn options(self, usual: Option<(Form, Activations)>) -> anyhow::Result<Option<Quantize>> {
        // ONNX's own operators have no activations in int8.
        let activations = match (self.activations, self.form) {
            (Some(activations), _) => activations,
            (None, Some(Form::Qdq)) => Activations::Float,
            (None, _) => usual.map_or(Activations::Float, |(_, activations)| activations),
        };
        let form = match (usual, activations) {
            (Some((form, _)), _) => form,
            (None, Activations::Float) => Form::Qdq,
            (None, Activations::Int8) => Form::Nbits,
        };
        let Some(bits) = self.quantize else { return Ok(None) };
        if self.quantize_routing && bits == Bits::Int4 {
            anyhow::bail!(
                "--quantize-routing is for --quantize int8: int4 quantises what decides the heads anyhow; leave it out"
            );
        }
        Ok(Some(Quantize {
            bits,
            block: self.block.unwrap_or(bits.block()),
            fit_blocks: self.block.is_none(),
            zero_points: self.zero_points,
            reduce_range: self.reduce_range,
            activations,
            form: self.form.unwrap_or(form),
            keep: self.keep,
            exact_routing: bits == Bits::Int8 && !self.quantize_routing,
        }))
    }
}

/// The size of a block.
fn block(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| BLOCKS.contains(n)).ok_or_else(|| "expected 16, 32, 64, 128 or 256".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        quantize: QuantizeArgs,
    }

    #[test]
    fn routing_is_exact_in_int8_unless_it_is_quantised_too() {
        let exact = |arguments: &[&str]| {
            let line = Line::try_parse_from([&["moh-export"], arguments].concat()).unwrap();
            line.quantize.options(None).map(|options| options.map(|options| options.exact_routing)).ok()
        };
        assert_eq!(exact(&[]), Some(None));
        assert_eq!(exact(&["--quantize", "int8"]), Some(Some(true)));
        assert_eq!(exact(&["--quantize", "int8", "--quantize-routing"]), Some(Some(false)));
        assert_eq!(exact(&["--quantize", "int4"]), Some(Some(false)));
        assert_eq!(exact(&["--quantize", "int4", "--quantize-routing"]), None);
    }
}
