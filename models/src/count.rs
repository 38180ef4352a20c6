//! The vocabulary as arithmetic on shapes: how many multiply-accumulates a forward takes, dense and routed.

use crate::checkpoint::Weight;
use crate::eager::resolve_shape;
use crate::error::Error;
use crate::heads::HeadSet;
use std::collections::BTreeMap;

use crate::ops::{
    Aggregated, Aggregation, Attention, Binary, Conv, Experts, Gating, HeadLinear, Linear, Ops, Reduce, Result, Tap,
    Type, Unary,
};

/// Multiply-accumulates of the matrix products.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Macs {
    /// With every head computed, as the published code does.
    pub dense: u64,
    /// Without the heads that are off.
    pub routed: u64,
}

impl std::ops::AddAssign for Macs {
    fn add_assign(&mut self, other: Macs) {
        self.dense += other.dense;
        self.routed += other.routed;
    }
}

impl Macs {
    /// The share of the dense work that routing saves.
    pub fn saved(&self) -> f64 {
        1.0 - self.routed as f64 / self.dense.max(1) as f64
    }
}

/// A value of which only the shape is known, and for gates how many are not zero for each token.
#[derive(Debug, Clone)]
pub struct Shape {
    dims: Vec<usize>,
    active: Option<usize>,
}

impl Shape {
    /// A value of that shape.
    pub fn new(dims: &[usize]) -> Shape {
        Shape { dims: dims.to_vec(), active: None }
    }

    /// The dimensions.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }
}

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

    /// `dense` in the share of the heads that the gates leave on.
    fn spend_heads(&mut self, dense: usize, heads: usize, gates: &Shape) {
        self.spend(dense, dense / heads.max(1) * gates.active.unwrap_or(heads));
    }

    fn spend(&mut self, dense: usize, routed: usize) {
        let macs = Macs { dense: dense as u64, routed: routed as u64 };
        *self.modules.entry(self.path.join(".")).or_default() += macs;
    }
}

fn index(rank: usize, axis: i64) -> usize {
    if axis < 0 { (rank as i64 + axis) as usize } else { axis as usize }
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
        for &axis in axes {
            shape.dims[index(x.dims.len(), axis)] = 1;
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
        let macs = shape.dims.iter().product::<usize>() * a.dims[rank_a - 1];
        self.spend(macs, macs);
        Ok(shape)
    }

    fn linear(&mut self, x: &Shape, linear: &Linear) -> Result<Shape> {
        let (out, width) = (linear.weight.shape()[0], linear.weight.shape()[1]);
        if x.dims.last() != Some(&width) {
            return Err(Error::Internal("a linear layer of another width than its input"));
        }
        let macs = x.dims.iter().product::<usize>() * out;
        self.spend(macs, macs);
        self.filled(Type::Model, x, out, 0.0)
    }

    fn conv2d(&mut self, x: &Shape, weight: &Weight, _bias: Option<&Weight>, conv: Conv) -> Result<Shape> {
        let (&[batch, _, rows, columns], &[out, per_group, kernel, _]) = (x.dims.as_slice(), weight.shape()) else {
            return Err(Error::Internal("a convolution of another rank than 4"));
        };
        let size = |n: usize| (n + 2 * conv.padding - kernel) / conv.stride + 1;
        let dims = [batch, out, size(rows), size(columns)];
        let macs = dims.iter().product::<usize>() * per_group * kernel * kernel;
        self.spend(macs, macs);
        Ok(Shape::new(&dims))
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

    fn route(&mut self, scores: &Shape, _gating: Gating, heads: &HeadSet) -> Result<Shape> {
        self.filled(Type::F32, scores, heads.counts().num_heads, 0.0)
    }

    fn routed_attention(
        &mut self,
        query: &Shape,
        key: &Shape,
        value: &Shape,
        head_gates: &Shape,
        _attn_bias: Option<&Shape>,
        attention: Attention,
    ) -> Result<Shape> {
        let &[batch, q_len, width] = query.dims.as_slice() else {
            return Err(Error::Internal("queries of another rank than 3"));
        };
        let (kv_len, value_dim) = match *value.dims.as_slice() {
            [_, kv_len, width] => (kv_len, width / attention.kv_num_heads),
            [_, _, kv_len, dim] => (kv_len, dim),
            _ => return Err(Error::Internal("values of another rank than 3 or 4")),
        };
        if key.dims.len() != value.dims.len() {
            return Err(Error::Internal("keys and values of different rank"));
        }
        let seen = |i: usize| if attention.is_causal { (i + 1 + kv_len).saturating_sub(q_len) } else { kv_len };
        let pairs = batch * (0..q_len).map(|i| seen(i).min(kv_len)).sum::<usize>();
        let per_head = pairs * (width / attention.num_heads + value_dim);
        let active = head_gates.active.unwrap_or(attention.num_heads);
        self.spend(per_head * attention.num_heads, per_head * active);
        Ok(Shape::new(&[batch, q_len, attention.num_heads * value_dim]))
    }

    fn routed_projection(&mut self, x: &Shape, linear: &HeadLinear, gates: &Shape) -> Result<Shape> {
        let out = match *linear.weight.shape() {
            [heads, _, dim] => heads * dim,
            ref shape => shape[0],
        };
        self.spend_heads(x.dims.iter().product::<usize>() * out, linear.num_heads, gates);
        self.filled(Type::Model, x, out, 0.0)
    }

    fn routed_combine(&mut self, x: &Shape, linear: &HeadLinear, gates: &Shape) -> Result<Shape> {
        let out = match *linear.weight.shape() {
            [_, _, out] => out,
            ref shape => shape[0],
        };
        self.spend_heads(x.dims.iter().product::<usize>() * out, linear.num_heads, gates);
        self.filled(Type::Model, x, out, 0.0)
    }

    fn routed_mlp(&mut self, x: &Shape, experts: &Experts, gates: &Shape) -> Result<Shape> {
        let tokens: usize = x.dims[..x.dims.len() - 1].iter().product();
        let numbers = experts.fc1.elements() + experts.fc2.elements();
        self.spend_heads(tokens * numbers, experts.count(), gates);
        self.filled(Type::Model, x, experts.fc2.shape()[2], 0.0)
    }

    fn aggregated_attention(&mut self, inputs: &Aggregated<'_, Shape>, aggregation: &Aggregation) -> Result<Shape> {
        let (query, cells) = (&inputs.query.dims, aggregation.window.pow(2));
        let pooled = inputs.pooled_key.dims[1];
        // Scores and values of the window and of the pooled tokens, and the learnable tokens.
        let per_channel = 3 * cells + 2 * pooled;
        let macs = query.iter().product::<usize>() * per_channel;
        self.spend_heads(macs, aggregation.num_heads, inputs.head_gates);
        Ok(Shape::new(query))
    }

    fn reshape(&mut self, x: &Shape, shape: &[i64]) -> Result<Shape> {
        Ok(Shape::new(&resolve_shape(&x.dims, shape)?))
    }

    fn transpose(&mut self, x: &Shape, perm: &[usize]) -> Result<Shape> {
        Ok(Shape::new(&perm.iter().map(|&i| x.dims[i]).collect::<Vec<_>>()))
    }

    fn concat(&mut self, parts: &[&Shape], axis: i64) -> Result<Shape> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        let axis = index(first.dims.len(), axis);
        let mut shape = Shape::new(&first.dims);
        shape.dims[axis] = parts.iter().map(|x| x.dims[axis]).sum();
        Ok(shape)
    }

    fn slice(&mut self, x: &Shape, axis: i64, start: usize, end: usize) -> Result<Shape> {
        let mut shape = Shape::new(&x.dims);
        shape.dims[index(x.dims.len(), axis)] = end - start;
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
