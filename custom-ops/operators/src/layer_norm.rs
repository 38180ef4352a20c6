//! LayerNorm: layer normalisation, and adaLN's modulation of it.

use crate::attributes::{attributes, name_of};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::linear::shared_dims;
use crate::operator::{Body, BodyValue, Builder, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct LayerNorm;

attributes! {
    /// LayerNorm's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Added to the variance; not below 0.
        epsilon: f32,
    }
}

inputs! {
    /// LayerNorm's inputs.
    pub struct Inputs {
        x: T, "(.., width)", "Rows, of any number of dimensions.";
        weight: T, "(width)", "The normalised rows are multiplied by it.";
        bias: T [optional], "(width)", "Added to every row.";
        scale: T [optional], "(.., width)",
            "A modulation: rows are multiplied by 1 + scale. Its other dimensions are x's, or 1 from one of them on: a row for each sequence, say.";
        shift: T [optional], "(.., width)", "Added last. Its shape is as scale's.";
    }
}

/// Number of the first input that modulates.
const SCALE: usize = 3;

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// Rows of x.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Rows of x in turn that share a row of the scale; 1 if there is none.
    pub rows_per_scale: usize,
    /// The same of the shift.
    pub rows_per_shift: usize,
    /// Added to the variance.
    pub epsilon: f32,
}

impl Definition for LayerNorm {
    const NAME: &'static str = "LayerNorm";
    const DOC: &'static str = "Layer normalisation over the last dimension, and adaLN's modulation of it: with the mean m and the variance v of \
          a row's numbers, `((x - m) / sqrt(v + epsilon) * weight + bias) * (1 + scale) + shift`. Kernels compute in float32 and round once.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand =
        Operand { name: "output", ty: ElementType::T, optional: false, shape: "(.., width)", doc: "The shape is x's." };
    const PART: Part = Part::Norms;
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
        match attributes.epsilon {
            0.0.. => Ok(()),
            epsilon => Err(Error::Attribute {
                operator: Self::NAME,
                attribute: name_of!(Attributes.epsilon),
                expected: "0 or more".to_owned(),
                found: epsilon.to_string(),
            }),
        }
    }

    fn infer(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { x, weight, bias, scale, shift } = *inputs;
        let bad = |input, expected: String, found: PartialShape<'_>| {
            Err(Error::Shape { operator: Self::NAME, input, expected, found: show(found) })
        };
        let Some((&width, leading)) = x.split_last().filter(|(width, _)| **width != Some(0)) else {
            return bad("x", "(.., width)".to_owned(), x);
        };
        let mut width = Agreed(width);
        for (name, vector) in [("weight", Some(weight)), ("bias", bias)] {
            if let Some(found) = vector
                && !matches!(*found, [n] if n != Some(0) && width.accept(n))
            {
                return bad(name, format!("({})", width.show("width")), found);
            }
        }
        for (name, modulation) in [("scale", scale), ("shift", shift)] {
            if let Some(found) = modulation
                && shared_dims(found, leading, width.0).is_none()
            {
                let dims = leading.iter().map(|dim| dim.map_or("?".to_owned(), |dim| dim.to_string()));
                let dims: Vec<String> = dims.chain([width.show("width")]).collect();
                return bad(
                    name,
                    format!("({}), where dimensions but the last may be 1 from one on", dims.join(", ")),
                    found,
                );
            }
        }
        Ok((0..x.len()).map(|axis| OutputDim::SameAs { input: 0, axis }).collect())
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let (&width, leading) = shapes.x.split_last().unwrap_or((&1, &[]));
        let rows: usize = leading.iter().product();
        let shared = |modulation: Option<&[usize]>| {
            let found = modulation.map_or(rows, |shape| shape.iter().rev().skip(1).product());
            rows.checked_div(found).unwrap_or(1).max(1)
        };
        let (rows_per_scale, rows_per_shift) = (shared(shapes.scale), shared(shapes.shift));
        Ok(Problem { rows, width, rows_per_scale, rows_per_shift, epsilon: attributes.epsilon })
    }

    fn variant(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        let present = [inputs.bias, inputs.scale, inputs.shift].map(|input| input.is_some());
        let optional_inputs = present.iter().rposition(|&present| present).map_or(0, |last| last + 1);
        Variant { optional_inputs, ..Variant::default() }
    }

    fn zeros(_: &Attributes, inputs: &Inputs<List<'_, PartialShape<'_>>>, input: usize) -> Option<Vec<usize>> {
        let width = [inputs.x.last(), inputs.weight.last()].into_iter().flatten().find_map(|dim| *dim)?;
        let leading = if input < SCALE { 0 } else { inputs.x.len().saturating_sub(1) };
        Some([vec![1; leading], vec![width]].concat())
    }

    fn body(variant: Variant) -> Body {
        let mut b = Builder::new::<LayerNorm>(variant);
        let axis = ("axis", BodyValue::Int(-1));
        let epsilon = ("epsilon", BodyValue::Attribute(name_of!(Attributes.epsilon)));
        let taken: Vec<&str> = Self::INPUTS.iter().map(|input| input.name).collect();
        let name = |last: usize, name| if variant.optional_inputs <= last { Self::OUTPUT.name } else { name };
        let operands = &taken[..2 + variant.optional_inputs.min(1)];
        let normed = b.with("LayerNormalization", operands, name(1, "normed"), &[axis, epsilon]);
        if variant.optional_inputs > 1 {
            let one = b.float(1.0, "one_f32");
            let one = b.node("CastLike", &[&one, "scale"], "one");
            let factor = b.node("Add", &["scale", &one], "factor");
            let scaled = b.node("Mul", &[&normed, &factor], name(2, "scaled"));
            if variant.optional_inputs > 2 {
                b.node("Add", &[&scaled, "shift"], Self::OUTPUT.name);
            }
        }
        b.finish()
    }

    fn reference(p: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        let mut output = Vec::with_capacity(p.rows * p.width);
        for row in 0..p.rows {
            let x: Vec<f64> = (0..p.width).map(|i| inputs.x.data.at(row * p.width + i)).collect();
            let mean = x.iter().sum::<f64>() / p.width as f64;
            let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / p.width as f64;
            for (i, x) in x.into_iter().enumerate() {
                let normed = (x - mean) / (variance + f64::from(p.epsilon)).sqrt() * inputs.weight.data.at(i);
                let affine = normed + inputs.bias.map_or(0.0, |bias| bias.data.at(i));
                let scale = inputs.scale.map_or(0.0, |scale| scale.data.at(row / p.rows_per_scale * p.width + i));
                let shift = inputs.shift.map_or(0.0, |shift| shift.data.at(row / p.rows_per_shift * p.width + i));
                output.push(affine * (1.0 + scale) + shift);
            }
        }
        output
    }

    fn examples() -> Vec<Example<Attributes>> {
        let example = |epsilon, shapes: &[&[usize]]| Example::new(Attributes { epsilon }, shapes);
        vec![
            example(1e-5, &[&[2, 5, 24], &[24]]),
            example(1e-6, &[&[2, 5, 33], &[33], &[33]]),
            example(1e-6, &[&[2, 5, 40], &[40], &[40], &[2, 1, 40], &[2, 1, 40]]),
            example(1e-6, &[&[3, 2, 4, 17], &[17], &[17], &[3, 2, 1, 17], &[1, 1, 1, 17]]),
            example(1e-2, &[&[2, 3, 70], &[70], &[70], &[2, 3, 70]]),
            example(1e-5, &[&[48], &[48], &[48], &[48], &[48]]),
        ]
    }
}
