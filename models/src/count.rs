//! The vocabulary as arithmetic on shapes: how many multiply-accumulates a forward takes, dense and routed.

use crate::checkpoint::Weight;
use crate::error::Error;
pub use crate::macs::Macs;
use crate::operators;
use crate::ops::{Argument, Binary, Conv, Linear, ModelOperator, Ops, Reduce, Result, Tap, Type, Unary};
pub use crate::shape::Shape;
use crate::shape::{axis, reshaped};
use moh_operators::{Attributes, List};
use std::collections::BTreeMap;

/// Counts the multiply-accumulates of a family's `forward`.
#[derive(Debug, Default)]
pub struct Count {
    path: Vec<String>,
    modules: BTreeMap<String, Macs>,
}

impl Count {
    /// A counter at zero.
    pub fn new() -> Count {
        Count::default()
    }

    /// The count so far.
    pub fn macs(&self) -> Macs {
        self.below("")
    }

    /// The count of the module at `path` and those below it.
    pub fn below(&self, path: &str) -> Macs {
        let mut sum = Macs::default();
        let inside = |name: &str| {
            path.is_empty() || name.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        for (_, macs) in self.modules.iter().filter(|(name, _)| inside(name)) {
            sum += *macs;
        }
        sum
    }

    fn spend(&mut self, macs: Macs) {
        *self.modules.entry(self.path.join(".")).or_default() += macs;
    }
}

fn broadcast(a: &Shape, b: &Shape) -> Result<Shape> {
    let rank = a.dims.len().max(b.dims.len());
    let dim = |x: &Shape, i: usize| (i + x.dims.len()).checked_sub(rank).map_or(1, |i| x.dims[i]);
    let dims = (0..rank).map(|i| match (dim(a, i), dim(b, i)) {
        (1, d) => Ok(d),
        (d, 1) => Ok(d),
        (d, e) if d == e => Ok(d),
        _ => Err(Error::Internal("shapes that do not broadcast")),
    });
    Ok(Shape { dims: dims.collect::<Result<_>>()?, active: None })
}

impl Ops for Count {
    type Value = Shape;

    fn weight(&mut self, weight: &Weight, _ty: Type) -> Result<Shape> {
        Ok(Shape::new(weight.shape()))
    }

    fn constant(&mut self, _ty: Type, shape: &[usize], _values: &[f32]) -> Result<Shape> {
        Ok(Shape::new(shape))
    }

    fn filled(&mut self, _ty: Type, like: &Shape, width: usize, _value: f32) -> Result<Shape> {
        let mut shape = Shape::new(&like.dims);
        if let Some(last) = shape.dims.last_mut() {
            *last = width;
        }
        Ok(shape)
    }

    fn cast(&mut self, x: &Shape, _ty: Type) -> Result<Shape> {
        Ok(x.clone())
    }

    fn unary(&mut self, _op: Unary, x: &Shape) -> Result<Shape> {
        Ok(Shape::new(&x.dims))
    }

    fn binary(&mut self, _op: Binary, a: &Shape, b: &Shape) -> Result<Shape> {
        broadcast(a, b)
    }

    fn select(&mut self, condition: &Shape, a: &Shape, b: &Shape) -> Result<Shape> {
        broadcast(&broadcast(condition, a)?, b)
    }

    fn reduce(&mut self, _op: Reduce, x: &Shape, axes: &[i64]) -> Result<Shape> {
        let mut shape = Shape::new(&x.dims);
        for &along in axes {
            shape.dims[axis(x.dims.len(), along)] = 1;
        }
        Ok(shape)
    }

    fn softmax(&mut self, x: &Shape) -> Result<Shape> {
        Ok(Shape::new(&x.dims))
    }

    fn cumulative_sum(&mut self, x: &Shape, _axis: i64) -> Result<Shape> {
        Ok(Shape::new(&x.dims))
    }

    fn matmul(&mut self, a: &Shape, b: &Shape) -> Result<Shape> {
        let (rank_a, rank_b) = (a.dims.len(), b.dims.len());
        if rank_a < 2 || rank_b < 2 || a.dims[rank_a - 1] != b.dims[rank_b - 2] {
            return Err(Error::Internal("a matrix product of shapes that do not fit"));
        }
        let (left, right) = (Shape::new(&a.dims[..rank_a - 2]), Shape::new(&b.dims[..rank_b - 2]));
        let mut shape = broadcast(&left, &right)?;
        shape.dims.extend([a.dims[rank_a - 2], b.dims[rank_b - 1]]);
        let macs = shape.elements().saturating_mul(a.dims[rank_a - 1]);
        self.spend(Macs::all(macs));
        Ok(shape)
    }

    fn linear(&mut self, x: &Shape, linear: &Linear) -> Result<Shape> {
        let (out, width) = (linear.weight.shape()[0], linear.weight.shape()[1]);
        if x.dims.last() != Some(&width) {
            return Err(Error::Internal("a linear layer of another width than its input"));
        }
        let macs = x.elements().saturating_mul(out);
        self.spend(Macs::all(macs));
        self.filled(Type::Model, x, out, 0.0)
    }

    fn conv2d(&mut self, x: &Shape, weight: &Weight, _bias: Option<&Weight>, conv: Conv) -> Result<Shape> {
        let (&[batch, _, rows, columns], &[out, per_group, kernel, _]) = (x.dims.as_slice(), weight.shape()) else {
            return Err(Error::Internal("a convolution of another rank than 4"));
        };
        let size = |n: usize| (n + 2 * conv.padding - kernel) / conv.stride + 1;
        let dims = [batch, out, size(rows), size(columns)];
        let shape = Shape::new(&dims);
        self.spend(Macs::all(shape.elements().saturating_mul(per_group * kernel * kernel)));
        Ok(shape)
    }

    fn layer_norm(
        &mut self,
        x: &Shape,
        _width: usize,
        _affine: Option<(&Weight, &Weight)>,
        _eps: f32,
    ) -> Result<Shape> {
        Ok(Shape::new(&x.dims))
    }

    fn rms_norm(&mut self, x: &Shape, _weight: &Weight, _eps: f32) -> Result<Shape> {
        Ok(Shape::new(&x.dims))
    }

    fn operator<O: ModelOperator>(
        &mut self,
        attributes: O::Attributes,
        inputs: &O::Inputs<List<'_, Argument<'_, Shape>>>,
    ) -> Result<Shape> {
        let shape = |argument| match argument {
            Argument::Value(shape) => Shape::clone(shape),
            Argument::Weight(weight) => Shape::new(weight.shape()),
        };
        let shapes: Vec<Option<Shape>> = O::list(inputs).into_iter().map(|argument| argument.map(shape)).collect();
        let shapes: Vec<Option<&Shape>> = shapes.iter().map(Option::as_ref).collect();
        self.spend(O::macs(&attributes, &operators::inputs::<O, _>(&shapes)?));
        let dims: Vec<Option<&[usize]>> = shapes.iter().map(|shape| shape.map(Shape::dims)).collect();
        Ok(Shape::new(&O::OPERATOR.output_shape(&Attributes::new::<O>(attributes)?, &dims)?))
    }

    fn reshape(&mut self, x: &Shape, shape: &[i64]) -> Result<Shape> {
        Ok(Shape::new(&reshaped(&x.dims, shape)?))
    }

    fn transpose(&mut self, x: &Shape, perm: &[usize]) -> Result<Shape> {
        Ok(Shape::new(&perm.iter().map(|&i| x.dims[i]).collect::<Vec<_>>()))
    }

    fn concat(&mut self, parts: &[&Shape], along: i64) -> Result<Shape> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        let axis = axis(first.dims.len(), along);
        let mut shape = Shape::new(&first.dims);
        shape.dims[axis] = parts.iter().map(|x| x.dims[axis]).sum();
        Ok(shape)
    }

    fn slice(&mut self, x: &Shape, along: i64, start: usize, end: usize) -> Result<Shape> {
        let mut shape = Shape::new(&x.dims);
        shape.dims[axis(x.dims.len(), along)] = end - start;
        Ok(shape)
    }

    fn embedding(&mut self, weight: &Weight, indices: &Shape) -> Result<Shape> {
        let mut shape = Shape::new(&indices.dims);
        shape.dims.push(weight.shape()[1]);
        Ok(shape)
    }

    fn enter(&mut self, name: &str) {
        self.path.push(name.to_owned());
    }

    fn leave(&mut self) {
        self.path.pop();
    }

    fn path(&self) -> String {
        self.path.join(".")
    }

    fn gates(&mut self, gates: Shape, active: usize) -> Result<Shape> {
        Ok(Shape { active: Some(active), ..gates })
    }

    fn tap(&mut self, _kind: Tap, _value: &Shape) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_counts_those_below_it_alone() {
        let mut count = Count::new();
        for (path, macs) in [("blocks.1", 1), ("blocks.1.attn", 10), ("blocks.10", 100), ("head", 1000)] {
            count.modules.insert(path.to_owned(), Macs { dense: macs, routed: macs });
        }
        let below = |path| count.below(path).dense;
        assert_eq!((below("blocks.1"), below("blocks.10"), below("blocks"), below("block")), (11, 100, 111, 0));
        assert_eq!(count.macs().routed, 1111);
    }
}
