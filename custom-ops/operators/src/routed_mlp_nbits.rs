//! RoutedMLPNBits: RoutedMLP with quantised matrices.

use crate::attributes::{attributes, name_of};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::nbits::{self, Dequantise, Format, Quantised};
use crate::operator::{Body, BodyValue, Builder, Definition, Example, Part, Variant};
use crate::routed_mlp::{self, Activation};
use crate::shape::{OutputDim, PartialShape};
use crate::tensor::Tensor;
use crate::tolerance;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedMlpNBits;

attributes! {
    /// RoutedMLPNBits's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Experts.
        num_experts: usize,
        /// 0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU. 4: SwiGLU, silu(gate) * other.
        activation: Activation,
        /// Bits of a weight: 4 or 8.
        bits: usize,
        /// Weights of the inner dimension that share a scale: 16, 32, 64, 128 or 256.
        block_size: usize,
        /// 0: activations stay in floating point. 4: kernels may round what a matrix is multiplied with to 8-bit integers, with a scale of max(|x|) / 127 for each token and block, or both factors to bfloat16.
        accuracy_level: i64,
    }
}

impl Attributes {
    /// Those of the operator on the dequantised matrices.
    fn dense(&self) -> routed_mlp::Attributes {
        routed_mlp::Attributes { num_experts: self.num_experts, activation: self.activation }
    }

    /// How the matrices are quantised.
    pub fn format(&self) -> Format {
        Format { bits: self.bits, block: self.block_size }
    }

    /// Whether activations may be rounded to 8-bit integers.
    pub fn int8_activations(&self) -> bool {
        self.accuracy_level == nbits::INT8
    }
}

inputs! {
    /// RoutedMLPNBits's inputs.
    pub struct Inputs {
        x: T, "(batch, q_len, width)", "The tokens.";
        fc1_weight: U8, "(num_experts, columns, width / block_size, block_size * bits / 8); columns is hidden, or 2 * hidden for SwiGLU",
            "First matrices, quantised, as nn.Linear stores them; for SwiGLU the gate's rows come first. Of 4 bits, the low half of a byte comes first.";
        fc1_scales: T, "(num_experts, columns, width / block_size)", "The blocks' scales.";
        fc2_weight: U8, "(num_experts, out_width, hidden / block_size, block_size * bits / 8)", "Second matrices, quantised.";
        fc2_scales: T, "(num_experts, out_width, hidden / block_size)", "The blocks' scales.";
        expert_gates: F32, "(batch, q_len, num_experts)", "Any finite number; 0 switches the expert off.";
        fc1_bias: T [optional], "(num_experts, columns)", "Requires fc2_bias.";
        fc2_bias: T [optional], "(num_experts, out_width)", "Requires fc1_bias.";
        fc1_zero_points: U8 [optional], "(num_experts, columns, ceil(width / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits. Requires fc2_zero_points.";
        fc2_zero_points: U8 [optional], "(num_experts, out_width, ceil(hidden / block_size * bits / 8))",
            "Requires fc1_zero_points.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the operator on the dequantised matrices.
    pub mlp: routed_mlp::Problem,
    /// How the matrices are quantised.
    pub format: Format,
    /// Whether activations may be rounded to 8-bit integers.
    pub int8_activations: bool,
}

impl Definition for RoutedMlpNBits {
    const NAME: &'static str = "RoutedMLPNBits";
    const DOC: &'static str = "RoutedMLP with quantised matrices `W = (q - zero_point) * scale`: the sum of \
          `gate * (act(x W1^T + b1) W2^T + b2)` over the experts whose gate is not 0. The others are not computed and \
          add exactly 0, even if inputs are NaN or infinite. The output of a token without experts is 0.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, out_width)",
        doc: "The tokens.",
    };
    const PART: Part = Part::Mlp;
    const SINCE: i64 = 2;

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn check(attributes: &Attributes) -> Result<(), Error> {
        nbits::check(Self::NAME, attributes.bits, attributes.block_size, attributes.accuracy_level)
    }

    fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        infer(attributes, shapes)
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Attributes { num_experts, activation, .. } = *attributes;
        let Inputs { x, fc2_weight: fc2, .. } = *shapes;
        let format = attributes.format();
        let (tokens, width, hidden) = (x[0] * x[1], x[2], fc2[2] * format.block);
        let mlp = routed_mlp::Problem { tokens, num_experts, width, hidden, out_width: fc2[1], activation };
        Ok(Problem { mlp, format, int8_activations: attributes.int8_activations() })
    }

    fn variant(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        let optional_inputs = match (shapes.fc2_bias, shapes.fc2_zero_points) {
            (_, Some(_)) => 4,
            (Some(_), None) => 2,
            (None, None) => 0,
        };
        Variant { optional_inputs, kind: attributes.activation as i64, ..Variant::default() }
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        let name = Self::INPUTS.get(input)?.name;
        let weight = if name.starts_with("fc1") { shapes.fc1_weight } else { shapes.fc2_weight };
        let (&rows, &blocks) = (weight.get(1)?, weight.get(2)?);
        let of_expert = match name {
            "fc1_bias" | "fc2_bias" => vec![rows?],
            _ => vec![rows?, attributes.format().zero_point_bytes(blocks?)],
        };
        Some([vec![attributes.num_experts], of_expert].concat())
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        let packed = Self::INPUTS.get(input).is_some_and(|input| input.ty == ElementType::Uint8);
        if packed { attributes.format().zero_point_byte() } else { 0 }
    }

    fn rounding(attributes: &Attributes) -> f64 {
        tolerance::QUANTISED_MLP + 3.0 * nbits::rounding(attributes.int8_activations())
    }

    fn body(variant: Variant) -> Body {
        body(variant)
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, expert_gates, fc1_bias, fc2_bias, .. } = *inputs;
        let Problem { mlp, format, .. } = p;
        let (width, hidden, columns) = (mlp.width, mlp.hidden, mlp.hidden * mlp.activation.columns());
        let zero_points = [inputs.fc1_zero_points, inputs.fc2_zero_points];
        let fc1 = nbits::dequantised(*format, width, &inputs.fc1_weight, &inputs.fc1_scales, zero_points[0].as_ref());
        let fc2 = nbits::dequantised(*format, hidden, &inputs.fc2_weight, &inputs.fc2_scales, zero_points[1].as_ref());
        let first = |e: usize, c: usize, j: usize| fc1[(e * columns + j) * width + c];
        let second = |e: usize, j: usize, c: usize| fc2[(e * mlp.out_width + c) * hidden + j];
        routed_mlp::reference(mlp, &x, &expert_gates, [fc1_bias, fc2_bias], first, second)
    }

    fn examples() -> Vec<Example<Attributes>> {
        // Only of 4 bits: the products of two matrices of 8-bit integers are too large for float16.
        let example = |activation: Activation, accuracy_level, optional: &[&[usize]]| {
            let columns = 16 * activation.columns();
            let shapes: [&[usize]; 6] =
                [&[2, 3, 48], &[3, columns, 3, 8], &[3, columns, 3], &[3, 7, 1, 8], &[3, 7, 1], &[2, 3, 3]];
            let attributes = Attributes { num_experts: 3, activation, bits: 4, block_size: 16, accuracy_level };
            Example::new(attributes, &[&shapes, optional].concat())
        };
        let every = Activation::ALL.iter().map(|&activation| example(activation, 0, &[]));
        every
            .chain([
                example(Activation::SwiGlu, 0, &[&[3, 32], &[3, 7], &[3, 32, 2], &[3, 7, 1]]),
                example(Activation::Silu, nbits::INT8, &[&[3, 16], &[3, 7]]),
            ])
            .collect()
    }
}

fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
    const NAME: &str = RoutedMlpNBits::NAME;
    let Inputs { x, fc1_weight: fc1, fc2_weight: fc2, fc1_scales, fc2_scales, expert_gates, .. } = *shapes;
    let Inputs { fc1_bias, fc2_bias, fc1_zero_points, fc2_zero_points, .. } = *shapes;
    let pairs = [
        [("fc1_bias", fc1_bias), ("fc2_bias", fc2_bias)],
        [("fc1_zero_points", fc1_zero_points), ("fc2_zero_points", fc2_zero_points)],
    ];
    let found = 6 + pairs.iter().flatten().filter(|(_, input)| input.is_some()).count();
    for [(first, given), (second, partner)] in pairs {
        let (absent, present) = match (given, partner) {
            (Some(_), None) => (second, first),
            (None, Some(_)) => (first, second),
            _ => continue,
        };
        return Err(Error::InputCount { operator: NAME, expected: format!("{absent} beside {present}"), found });
    }
    let format = attributes.format();
    let width = x.get(2).copied().flatten().filter(|_| x.len() == 3);
    nbits::check_inner(NAME, "x", format, x, width)?;
    // (experts, rows, k) as (experts, k, rows); a shape that no weight has is refused as a weight's.
    let dense = |weight| format.dense(weight, 4).map_or(Vec::new(), |dense| vec![dense[0], dense[2], dense[1]]);
    let (fc1_dense, fc2_dense) = (dense(fc1), dense(fc2));
    let mlp = routed_mlp::Inputs {
        x,
        fc1_weight: &fc1_dense[..],
        fc2_weight: &fc2_dense[..],
        expert_gates,
        fc1_bias,
        fc2_bias,
    };
    let (experts, columns) = (attributes.num_experts, attributes.activation.columns());
    let hidden = fc1_dense.get(2).copied().flatten().map(|rows| rows / columns);
    let output = routed_mlp::infer(NAME, &attributes.dense(), &mlp).map_err(|error| match error {
        Error::Shape { input: "fc1_weight", .. } => {
            let rows = format!("{experts}, {columns} * hidden");
            nbits::wrong_weight(NAME, "fc1_weight", format, &rows, ("width", width), fc1)
        }
        Error::Shape { input: "fc2_weight", .. } => {
            let rows = format!("{experts}, out_width");
            nbits::wrong_weight(NAME, "fc2_weight", format, &rows, ("hidden", hidden), fc2)
        }
        other => other,
    })?;
    let first = [("fc1_scales", Some(fc1_scales)), ("fc1_zero_points", fc1_zero_points)];
    nbits::check_scales(NAME, format, fc1, first)?;
    let second = [("fc2_scales", Some(fc2_scales)), ("fc2_zero_points", fc2_zero_points)];
    nbits::check_scales(NAME, format, fc2, second)?;
    Ok(output)
}

fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<RoutedMlpNBits>(variant);
    let dequantise = Dequantise::new(&mut b, name_of!(Attributes.bits));
    let has_zero_points = variant.optional_inputs > 2;
    let mut matrix = |weight: &'static str, scales, zero_points| {
        let zero_points = has_zero_points.then_some(zero_points);
        let matrix = dequantise.matrix(&mut b, &Quantised { weight, scales, zero_points, leading: 2 });
        b.with("Transpose", &[&matrix], &format!("{weight}_matrix"), &[("perm", BodyValue::Ints(vec![0, 2, 1]))])
    };
    let fc1 = matrix("fc1_weight", "fc1_scales", "fc1_zero_points");
    let fc2 = matrix("fc2_weight", "fc2_scales", "fc2_zero_points");
    let x = b.cast_f32("x", "x_f32");
    let biases = (variant.optional_inputs > 0)
        .then(|| [b.cast_f32("fc1_bias", "fc1_bias_f32"), b.cast_f32("fc2_bias", "fc2_bias_f32")]);
    let biases = biases.as_ref().map(|biases| biases.each_ref().map(String::as_str));
    routed_mlp::experts(&mut b, &x, [&fc1, &fc2], biases, variant.kind);
    b.finish()
}
