//! DepthwiseConv: a depthwise convolution of images, channels last, and an activation function.

use crate::attributes::{attributes, choices, name_of};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, BodyValue, Builder, Definition, Example, Part, Variant};
use crate::routed_mlp::Activation;
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct DepthwiseConv;

choices! {
    /// What is done with the sums.
    pub enum Then {
        /// max(x, 0).
        Relu,
        /// x * Phi(x); Phi is the normal distribution function.
        Gelu,
        /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
        GeluTanh,
        /// x * sigmoid(x).
        Silu,
        /// Nothing.
        Nothing,
    }
}

impl Then {
    /// The activation function, if there is one.
    pub fn activation(self) -> Option<Activation> {
        match self {
            Then::Relu => Some(Activation::Relu),
            Then::Gelu => Some(Activation::Gelu),
            Then::GeluTanh => Some(Activation::GeluTanh),
            Then::Silu => Some(Activation::Silu),
            Then::Nothing => None,
        }
    }
}

attributes! {
    /// DepthwiseConv's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Channels of the images.
        channels: usize,
        /// 0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU. 4: none.
        activation: Then,
    }
}

inputs! {
    /// DepthwiseConv's inputs.
    pub struct Inputs {
        x: T, "(batch, height, width, channels)", "Images.";
        weight: T, "(channels, 1, rows, columns)", "A kernel for each channel, as Conv reads it. Rows and columns are odd numbers.";
        bias: T [optional], "(channels)", "Added to every pixel.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Images, and their height and width.
    pub images: [usize; 3],
    /// Channels.
    pub channels: usize,
    /// Rows and columns of a kernel.
    pub kernel: [usize; 2],
    /// What is done with the sums.
    pub then: Then,
}

impl Definition for DepthwiseConv {
    const NAME: &'static str = "DepthwiseConv";
    const DOC: &'static str = "A depthwise convolution of images whose channels come last, and an activation function: each channel has a \
          kernel of its own. The stride is 1, and images are padded with zeros so that the output has their size. Kernels compute in float32 \
          and round once.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, height, width, channels)",
        doc: "The shape is x's.",
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

    fn infer(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, bias } = *inputs;
        let mut channels = Agreed(Some(attributes.channels));
        let bad = |input, expected: String, found: PartialShape<'_>| {
            Err(Error::Shape { operator: Self::NAME, input, expected, found: show(found) })
        };
        let shown = channels.show("channels");
        if !matches!(*x, [_, _, _, n] if channels.accept(n)) {
            return bad("x", format!("(batch, height, width, {shown})"), x);
        }
        let odd = |size: Option<usize>| size.is_none_or(|size| size % 2 == 1);
        if !matches!(*weight, [n, Some(1) | None, rows, columns] if channels.accept(n) && odd(rows) && odd(columns)) {
            return bad("weight", format!("({shown}, 1, rows, columns), the last two odd"), weight);
        }
        if let Some(bias) = bias
            && !matches!(*bias, [n] if channels.accept(n))
        {
            return bad("bias", format!("({shown})"), bias);
        }
        let of_x = (0..3).map(|axis| OutputDim::SameAs { input: 0, axis });
        Ok(of_x.chain([OutputDim::Size(attributes.channels)]).collect())
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let size = |shape: &[usize], axis: usize| shape.get(axis).copied().unwrap_or(1);
        Ok(Problem {
            images: [0, 1, 2].map(|axis| size(shapes.x, axis)),
            channels: attributes.channels,
            kernel: [2, 3].map(|axis| size(shapes.weight, axis)),
            then: attributes.activation,
        })
    }

    fn variant(attributes: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        let kind = attributes.activation as i64;
        Variant { optional_inputs: usize::from(inputs.bias.is_some()), kind, ..Variant::default() }
    }

    fn zeros(attributes: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        Some(vec![attributes.channels])
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<DepthwiseConv>(variant);
        let planes = b.transpose("x", [0, 3, 1, 2], "planes");
        let taken: Vec<&str> = [&planes, "weight", "bias"][..2 + variant.optional_inputs].to_vec();
        let attributes = [
            ("auto_pad", BodyValue::Text("SAME_UPPER")),
            ("group", BodyValue::Attribute(name_of!(Attributes.channels))),
        ];
        let sums = b.with("Conv", &taken, "sums", &attributes);
        let then = Then::ALL.iter().find(|&&then| then as i64 == variant.kind).copied().unwrap_or(Then::Nothing);
        let activation = then.activation();
        let h = b.transpose(&sums, [0, 2, 3, 1], if activation.is_some() { "pixels" } else { "output" });
        if let Some(activation) = activation {
            b.activation(activation, &h, "output");
        }
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let Problem { images: [batch, height, width], channels, kernel: [rows, columns], then } = *p;
        let mut output = Vec::with_capacity(batch * height * width * channels);
        for i in 0..batch * height * width * channels {
            let (channel, pixel) = (i % channels, i / channels);
            let (x, y, image) = (pixel % width, pixel / width % height, pixel / width / height);
            let mut sum = inputs.bias.map_or(0.0, |bias| bias.data.at(channel));
            for row in 0..rows {
                for column in 0..columns {
                    // The kernel's middle is on the pixel.
                    let from = ((y + row).checked_sub(rows / 2), (x + column).checked_sub(columns / 2));
                    if let (Some(y), Some(x)) = from
                        && y < height
                        && x < width
                    {
                        let value = inputs.x.data.at(((image * height + y) * width + x) * channels + channel);
                        sum += value * inputs.weight.data.at((channel * rows + row) * columns + column);
                    }
                }
            }
            output.push(then.activation().map_or(sum, |activation| activation.of(sum)));
        }
        output
    }

    fn examples() -> Vec<Example<Attributes>> {
        let example =
            |activation, shapes: &[&[usize]]| Example::new(Attributes { channels: shapes[1][0], activation }, shapes);
        vec![
            example(Then::Nothing, &[&[2, 5, 4, 13], &[13, 1, 3, 3]]),
            example(Then::Relu, &[&[1, 4, 9, 24], &[24, 1, 3, 3], &[24]]),
            example(Then::GeluTanh, &[&[1, 6, 3, 17], &[17, 1, 1, 5], &[17]]),
            example(Then::Silu, &[&[2, 2, 2, 5], &[5, 1, 5, 3]]),
            example(Then::Gelu, &[&[2, 7, 8, 40], &[40, 1, 3, 3], &[40]]),
        ]
    }
}
