//! LinearNBits: a dense layer with a quantised weight.

use crate::attributes::attributes;
use crate::error::Error;
use crate::head_linear_nbits::{filler, product, zeros};
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::linear::{self, check_after};
use crate::nbits::{self, Format};
use crate::operator::{Body, Builder, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct LinearNBits;

attributes! {
    /// LinearNBits's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Bits of a weight: 4 or 8.
        bits: usize,
        /// Weights of the inner dimension that share a scale: 16, 32, 64, 128 or 256.
        block_size: usize,
        /// 0: x stays in floating point. 4: kernels may round x to 8-bit integers, with a scale of max(|x|) / 127 for each row and block, or x and W to bfloat16.
        accuracy_level: i64,
    }
}

inputs! {
    /// LinearNBits's inputs.
    pub struct Inputs {
        x: T, "(.., width)", "Rows, of any number of dimensions.";
        weight: U8, "(out_width, width / block_size, block_size * bits / 8)",
            "The matrix, quantised. Of 4 bits, the low half of a byte comes first.";
        scales: T, "(out_width, width / block_size)", "The blocks' scales.";
        bias: T [optional], "(out_width)", "Added to every row.";
        gate: T [optional], "(.., out_width) or (1)",
            "The sums are multiplied by it. Its other dimensions are x's, or 1 from one of them on: a row for each sequence, say.";
        residual: T [optional], "(.., out_width) or (1)", "Added last. Its other dimensions are x's.";
        zero_points: U8 [optional], "(out_width, ceil(width / block_size * bits / 8))",
            "The blocks' zero points, packed as the weight. Without them 8 for 4 bits, 128 for 8 bits.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Those of the layer with the dequantised weight.
    pub linear: linear::Problem,
    /// How the weight is quantised.
    pub format: Format,
    /// Whether x may be rounded to 8-bit integers.
    pub int8_activations: bool,
}

impl Attributes {
    pub(crate) fn format(&self) -> Format {
        Format { bits: self.bits, block: self.block_size }
    }

    pub(crate) fn int8_activations(&self) -> bool {
        self.accuracy_level == nbits::INT8
    }
}

impl Problem {
    /// Of a call without gate and residual, whose shapes of x and of the weight are valid.
    pub(crate) fn new(attributes: &Attributes, x: &[usize], weight: &[usize]) -> Problem {
        let (&width, leading) = x.split_last().unwrap_or((&0, &[]));
        let out_width = weight.first().copied().unwrap_or(0);
        Problem {
            linear: linear::Problem::of_rows(leading.iter().product(), width, out_width),
            format: attributes.format(),
            int8_activations: attributes.int8_activations(),
        }
    }
}

/// The shapes of a product of rows with a quantised matrix.
pub(crate) struct Product<'a> {
    pub(crate) operator: &'static str,
    pub(crate) format: Format,
    pub(crate) x: PartialShape<'a>,
    pub(crate) weight: PartialShape<'a>,
    pub(crate) scales: PartialShape<'a>,
    pub(crate) bias: Option<PartialShape<'a>>,
    pub(crate) zero_points: Option<PartialShape<'a>>,
}

impl<'a> Product<'a> {
    /// Validates the shapes. Returns the dimensions of x before the last one, and the length of an output's row.
    pub(crate) fn check(&self) -> Result<(PartialShape<'a>, Option<usize>), Error> {
        let &Product { operator, format, x, weight, scales, bias, zero_points } = self;
        let bad = |input, expected: &str, found| {
            Err(Error::Shape { operator, input, expected: expected.to_owned(), found: show(found) })
        };
        let Some((&width, leading)) = x.split_last().filter(|(width, _)| **width != Some(0)) else {
            return bad("x", "(.., width)", x);
        };
        nbits::check_inner(operator, "x", format, x, width)?;
        let out = match format.dense(weight, 3).as_deref() {
            Some(&[out, k]) if Agreed(width).accept(k) => out,
            _ => return Err(nbits::wrong_weight(operator, "weight", format, "out_width", ("width", width), weight)),
        };
        if let Some(bias) = bias
            && !(bias.len() == 1 && Agreed(out).accept(bias[0]))
        {
            return bad("bias", &format!("({})", Agreed(out).show("out_width")), bias);
        }
        nbits::check_scales(operator, format, weight, [("scales", Some(scales)), ("zero_points", zero_points)])?;
        Ok((leading, out))
    }

    /// The shape of the output.
    pub(crate) fn infer(&self) -> Result<Vec<OutputDim>, Error> {
        self.check().map(|(leading, out)| linear::output(leading, out))
    }
}

/// The products in f64, with the bias: (rows, out_width).
pub(crate) fn products(
    p: &Problem,
    [x, weight, scales]: [Tensor<'_>; 3],
    [bias, zero_points]: [Option<Tensor<'_>>; 2],
) -> impl Iterator<Item = f64> {
    let linear::Problem { rows, width, out_width, .. } = p.linear;
    let w = nbits::dequantised(p.format, width, &weight, &scales, zero_points.as_ref());
    (0..rows * out_width).map(move |i| {
        let (row, n) = (i / out_width, i % out_width);
        let sum: f64 = (0..width).map(|i| x.data.at(row * width + i) * w[n * width + i]).sum();
        sum + bias.map_or(0.0, |bias| bias.data.at(n))
    })
}

impl Definition for LinearNBits {
    const NAME: &'static str = "LinearNBits";
    const DOC: &'static str = "A dense layer with a quantised weight `W = (q - zero_point) * scale`: `(x W^T + bias) * gate + residual` \
          along the last dimension.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(.., out_width)",
        doc: "The other dimensions are x's.",
    };
    const PART: Part = Part::Dense;
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

    fn infer(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, scales, bias, gate, residual, zero_points } = *inputs;
        let format = attributes.format();
        let product = Product { operator: Self::NAME, format, x, weight, scales, bias, zero_points };
        let (leading, out) = product.check()?;
        check_after(Self::NAME, (leading, out), gate, residual)?;
        Ok(linear::output(leading, out))
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let problem = Problem::new(attributes, shapes.x, shapes.weight);
        Ok(Problem { linear: problem.linear.followed_by(shapes.gate, shapes.residual), ..problem })
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::taking(&[inputs.bias, inputs.gate, inputs.residual, inputs.zero_points])
    }

    fn zeros(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        zeros(attributes.format(), shapes.weight, Self::INPUTS.get(input)?.name)
    }

    fn filler(attributes: &Attributes, input: usize) -> u8 {
        Self::INPUTS.get(input).map_or(0, |input| filler(attributes.format(), input.name))
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<LinearNBits>(variant);
        let y = product(&mut b, "x");
        b.node("CastLike", &[&y, "x"], "output");
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Inputs { x, weight, scales, bias, gate, residual, zero_points } = *inputs;
        p.linear.after(products(p, [x, weight, scales], [bias, zero_points]), gate, residual).collect()
    }

    fn rounding(attributes: &Attributes) -> f64 {
        nbits::rounding(attributes.int8_activations())
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes = |bits, block_size, accuracy_level| Attributes { bits, block_size, accuracy_level };
        vec![
            Example::new(
                attributes(4, 32, 0),
                &[&[2, 5, 96], &[13, 3, 16], &[13, 3], &[13], &[2, 1, 13], &[2, 5, 13], &[13, 2]],
            ),
            Example::new(
                attributes(8, 16, 0),
                &[&[1, 4, 48], &[12, 3, 16], &[12, 3], &[12], &[1], &[1, 4, 12], &[12, 3]],
            ),
            Example::new(attributes(4, 16, 0), &[&[18, 32], &[51, 2, 8], &[51, 2]]),
            Example::new(attributes(8, 32, 4), &[&[64], &[15, 2, 32], &[15, 2], &[15]]),
            Example::new(attributes(8, 32, 4), &[&[2, 3, 64], &[21, 2, 32], &[21, 2], &[21], &[2, 3, 21], &[1]]),
            Example::new(attributes(4, 128, 4), &[&[1, 7, 1, 256], &[48, 2, 64], &[48, 2]]),
        ]
    }
}
