//! Shared by the linear operators with quantised weights: RoutedProjectionNBits, RoutedCombineNBits and, for what heads have no
//! part in, LinearNBits and LinearActivationNBits.

use crate::attributes::{attributes, name_of};
use crate::error::Error;
use crate::head_linear::{self, Direction, WeightLayout};
use crate::nbits::{self, Dequantise, Format, Quantised};
use crate::operator::{BodyValue, Builder};
use crate::shape::{OutputDim, PartialShape};

attributes! {
    /// The attributes of RoutedProjectionNBits and RoutedCombineNBits.
    #[derive(Copy)]
    pub struct Attributes {
        /// Heads.
        num_heads: usize,
        /// Bits of a weight: 4 or 8.
        bits: usize,
        /// Weights of the inner dimension that share a scale: 16, 32, 64, 128 or 256.
        block_size: usize,
        /// 0: x stays in floating point. 4: kernels may round x to 8-bit integers, with a scale of max(|x|) / 127 for each token and block, or x and W to bfloat16.
        accuracy_level: i64,
    }
}

/// Sizes of a validated call of either operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the operator on the dequantised weight, one (out, in) matrix.
    pub linear: head_linear::Problem,
    /// How the weight is quantised.
    pub format: Format,
    /// Whether x may be rounded to 8-bit integers.
    pub int8_activations: bool,
}

impl Attributes {
    /// Those of the operator on the dequantised weight.
    fn dense(&self) -> head_linear::Attributes {
        head_linear::Attributes { num_heads: self.num_heads, weight_layout: WeightLayout::OutIn }
    }

    /// How the weight is quantised, of attributes that `Attributes::check` accepts.
    pub fn format(&self) -> Format {
        Format { bits: self.bits, block: self.block_size }
    }

    /// # Errors
    /// [`Error::Attribute`] naming the one that is out of range.
    pub(crate) fn check(&self, operator: &'static str) -> Result<(), Error> {
        nbits::check(operator, self.bits, self.block_size, self.accuracy_level)
    }

    /// Whether x may be rounded to 8-bit integers.
    pub fn int8_activations(&self) -> bool {
        self.accuracy_level == nbits::INT8
    }
}

/// Input shapes of either operator.
pub(crate) struct Shapes<'a> {
    pub(crate) x: PartialShape<'a>,
    pub(crate) weight: PartialShape<'a>,
    pub(crate) scales: PartialShape<'a>,
    pub(crate) head_gates: PartialShape<'a>,
    pub(crate) bias: Option<PartialShape<'a>>,
    pub(crate) zero_points: Option<PartialShape<'a>>,
}

/// Validates the input shapes and returns the output's.
pub(crate) fn infer(
    operator: &'static str,
    direction: Direction,
    attributes: &Attributes,
    shapes: &Shapes<'_>,
) -> Result<Vec<OutputDim>, Error> {
    let &Shapes { x, weight, scales, head_gates, bias, zero_points } = shapes;
    let format = attributes.format();
    let inner = x.get(2).copied().flatten().filter(|_| x.len() == 3);
    nbits::check_inner(operator, "x", format, x, inner)?;
    // A shape that no weight has is refused as a weight's.
    let dense = format.dense(weight, 3).unwrap_or_default();
    let linear = head_linear::Shapes { x, weight: &dense, head_gates, bias };
    let output = head_linear::infer(operator, direction, &attributes.dense(), &linear);
    let output = output.map_err(|error| match error {
        Error::Shape { input: "weight", .. } => {
            let (rows, k) = match direction {
                Direction::Projection => (format!("{} * head_dim", attributes.num_heads), "width"),
                Direction::Combination => ("width".to_owned(), "num_heads * value_dim"),
            };
            nbits::wrong_weight(operator, "weight", format, &rows, (k, inner), weight)
        }
        other => other,
    })?;
    nbits::check_scales(operator, format, weight, [("scales", Some(scales)), ("zero_points", zero_points)])?;
    Ok(output)
}

/// Sizes of a validated call, from the shapes of x and of the weight.
pub(crate) fn problem(direction: Direction, attributes: &Attributes, x: &[usize], weight: &[usize]) -> Problem {
    let format = attributes.format();
    let dense = [weight[0], weight[1] * format.block];
    Problem {
        linear: head_linear::problem(direction, &attributes.dense(), x, &dense),
        format,
        int8_activations: attributes.int8_activations(),
    }
}

/// The shape of what can stand in for absent optional input `name`.
pub(crate) fn zeros(format: Format, weight: PartialShape<'_>, name: &str) -> Option<Vec<usize>> {
    let (&rows, &blocks) = (weight.first()?, weight.get(1)?);
    match name {
        "bias" => Some(vec![rows?]),
        "gate" | "residual" => Some(vec![1]),
        _ => Some(vec![rows?, format.zero_point_bytes(blocks?)]),
    }
}

/// What each of its elements is.
pub(crate) fn filler(format: Format, name: &str) -> u8 {
    match name {
        "zero_points" => format.zero_point_byte(),
        "gate" => 1,
        _ => 0,
    }
}

/// In a body: `x` times the dequantised weight, with the optional inputs that the body takes, in float32.
pub(crate) fn product(b: &mut Builder, x: &str) -> String {
    let dequantise = Dequantise::new(b, name_of!(Attributes.bits));
    let zero_points = b.takes("zero_points").then_some("zero_points");
    let weight = Quantised { weight: "weight", scales: "scales", zero_points, leading: 1 };
    let weight = dequantise.matrix(b, &weight);
    let weight = b.with("Transpose", &[&weight], "weight_matrix", &[("perm", BodyValue::Ints(vec![1, 0]))]);
    let x = b.cast_f32(x, "x_f32");
    let mut y = b.node("MatMul", &[&x, &weight], "product");
    let steps = [
        ("Add", "bias", ["bias_f32", "product_biased"]),
        ("Mul", "gate", ["gate_f32", "product_gated"]),
        ("Add", "residual", ["residual_f32", "product_and_residual"]),
    ];
    for (op_type, input, [operand, output]) in steps {
        if b.takes(input) {
            let operand = b.cast_f32(input, operand);
            y = b.node(op_type, &[&y, &operand], output);
        }
    }
    y
}
