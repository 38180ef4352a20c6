//! The vocabulary run by candle on the CPU in float32: the reference of every export.
//!
//! `routed_attention` and its like are written densely in tensor algebra and share nothing with the kernels: it is the other opinion.

mod router;

use crate::checkpoint::Weight;
use crate::error::Error;
use crate::heads::HeadSet;
use crate::ops::{
    Activation, Aggregated, Aggregation, Attention, Binary, Conv, Experts, Gating, HeadLinear, Linear, Ops, Reduce,
    Result, Tap, Type, Unary,
};
use candle_core::{D, DType, Device, Tensor};
use std::collections::BTreeMap;

/// Prefix of the routers' margins among the taps: for every token the distance from the last head kept to the first one
/// dropped, relative to the former.
pub const GAPS: &str = "gap.";

/// Runs a family's `forward` in candle.
#[derive(Default)]
pub struct Eager {
    weights: BTreeMap<String, Tensor>,
    path: Vec<String>,
    taps: Option<BTreeMap<String, Tensor>>,
    given_gates: BTreeMap<String, Tensor>,
}

impl Eager {
    /// An interpreter that keeps no intermediate values.
    pub fn new() -> Eager {
        Eager::default()
    }

    /// Keeps gates and taps of the forwards that follow, under the golden data's names (`gates.blocks.0.attn`).
    pub fn with_taps(mut self) -> Eager {
        self.taps = Some(BTreeMap::new());
        self
    }

    /// Uses these gates, named `gates.<module path>`, instead of the routers' own.
    pub fn with_gates(mut self, gates: BTreeMap<String, Tensor>) -> Eager {
        self.given_gates = gates;
        self
    }

    /// The intermediate values of the last forward.
    pub fn take_taps(&mut self) -> BTreeMap<String, Tensor> {
        self.taps.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The checkpoint's tensor in float32, converted once.
    fn load(&mut self, weight: &Weight) -> Result<Tensor> {
        if let Some(tensor) = self.weights.get(weight.name()) {
            return Ok(tensor.clone());
        }
        let tensor = Tensor::from_vec(weight.to_f32(), weight.shape(), &Device::Cpu)?;
        self.weights.insert(weight.name().to_owned(), tensor.clone());
        Ok(tensor)
    }

    /// `x` (batch, q_len, heads * dim) with zeros in the blocks whose gates are 0.
    fn mask_heads(&mut self, x: &Tensor, gates: &Tensor) -> Result<Tensor> {
        let heads = gates.dim(D::Minus1)?;
        let (batch, q_len, width) = x.dims3()?;
        let blocks = x.reshape((batch, q_len, heads, width / heads))?;
        let off = gates.eq(&gates.zeros_like()?)?.unsqueeze(D::Minus1)?;
        let zero = Tensor::zeros(&[1], DType::F32, &Device::Cpu)?;
        Ok(self.select(&off, &zero, &blocks)?.reshape((batch, q_len, width))?)
    }

    fn keep(&mut self, name: String, value: &Tensor) {
        if let Some(taps) = &mut self.taps {
            taps.insert(name, value.clone());
        }
    }
}

fn dtype(ty: Type) -> DType {
    match ty {
        Type::Model | Type::F32 => DType::F32,
        Type::I64 => DType::I64,
        Type::Bool => DType::U8,
    }
}

fn axis(x: &Tensor, axis: i64) -> usize {
    if axis < 0 { (x.rank() as i64 + axis) as usize } else { axis as usize }
}

impl Ops for Eager {
    type Value = Tensor;

    fn weight(&mut self, weight: &Weight, ty: Type) -> Result<Tensor> {
        Ok(self.load(weight)?.to_dtype(dtype(ty))?)
    }

    fn constant(&mut self, ty: Type, shape: &[usize], values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::from_slice(values, shape, &Device::Cpu)?.to_dtype(dtype(ty))?)
    }

    fn filled(&mut self, ty: Type, like: &Tensor, width: usize, value: f32) -> Result<Tensor> {
        let mut dims = like.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = width;
        }
        Ok(Tensor::full(value, dims, &Device::Cpu)?.to_dtype(dtype(ty))?)
    }

    fn cast(&mut self, x: &Tensor, ty: Type) -> Result<Tensor> {
        Ok(x.to_dtype(dtype(ty))?)
    }

    fn unary(&mut self, op: Unary, x: &Tensor) -> Result<Tensor> {
        Ok(match op {
            Unary::Neg => x.neg()?,
            Unary::Exp => x.exp()?,
            Unary::Log => x.log()?,
            Unary::Sqrt => x.sqrt()?,
            Unary::Cos => x.cos()?,
            Unary::Sin => x.sin()?,
            Unary::Sigmoid => (x.neg()?.exp()? + 1.0)?.recip()?,
            Unary::Relu => x.relu()?,
            Unary::Gelu => x.gelu_erf()?,
            Unary::GeluTanh => x.gelu()?,
        })
    }

    fn binary(&mut self, op: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(match op {
            Binary::Add => a.broadcast_add(b)?,
            Binary::Sub => a.broadcast_sub(b)?,
            Binary::Mul => a.broadcast_mul(b)?,
            Binary::Div => a.broadcast_div(b)?,
            Binary::Max => a.broadcast_maximum(b)?,
            Binary::Equal => a.broadcast_eq(b)?,
        })
    }

    fn select(&mut self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let shape = condition.shape().broadcast_shape_binary_op(a.shape(), "select")?;
        let shape = shape.broadcast_shape_binary_op(b.shape(), "select")?;
        let [condition, a, b] = [condition, a, b].map(|x| x.broadcast_as(&shape));
        Ok(condition?.where_cond(&a?, &b?)?)
    }

    fn reduce(&mut self, op: Reduce, x: &Tensor, axes: &[i64]) -> Result<Tensor> {
        let axes: Vec<usize> = axes.iter().map(|&a| axis(x, a)).collect();
        Ok(match op {
            Reduce::Sum => x.sum_keepdim(axes)?,
            Reduce::Mean => x.mean_keepdim(axes)?,
            Reduce::Max => axes.into_iter().try_fold(x.clone(), |x, axis| x.max_keepdim(axis))?,
        })
    }

    fn softmax(&mut self, x: &Tensor) -> Result<Tensor> {
        let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
        Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
    }

    fn cumulative_sum(&mut self, x: &Tensor, axis_: i64) -> Result<Tensor> {
        let axis = axis(x, axis_);
        let mut sums = Vec::with_capacity(x.dim(axis)?);
        for i in 0..x.dim(axis)? {
            let one = x.narrow(axis, i, 1)?;
            sums.push(match sums.last() {
                Some(last) => (last + one)?,
                None => one,
            });
        }
        Ok(if sums.is_empty() { x.clone() } else { Tensor::cat(&sums, axis)? })
    }

    fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(a.contiguous()?.broadcast_matmul(&b.contiguous()?)?)
    }

    fn linear(&mut self, x: &Tensor, linear: &Linear) -> Result<Tensor> {
        let weight = self.load(&linear.weight)?;
        let (rows, width) = (x.elem_count() / x.dim(D::Minus1)?.max(1), x.dim(D::Minus1)?);
        let y = x.contiguous()?.reshape((rows, width))?.matmul(&weight.t()?)?;
        let y = match &linear.bias {
            Some(bias) => y.broadcast_add(&self.load(bias)?)?,
            None => y,
        };
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = weight.dim(0)?;
        }
        Ok(y.reshape(dims)?)
    }

    fn conv2d(&mut self, x: &Tensor, weight: &Weight, bias: Option<&Weight>, conv: Conv) -> Result<Tensor> {
        let weight = self.load(weight)?;
        let y = x.conv2d(&weight, conv.padding, conv.stride, 1, conv.groups)?;
        Ok(match bias {
            Some(bias) => y.broadcast_add(&self.load(bias)?.reshape((1, (), 1, 1))?)?,
            None => y,
        })
    }

    fn layer_norm(
        &mut self,
        x: &Tensor,
        _width: usize,
        affine: Option<(&Weight, &Weight)>,
        eps: f32,
    ) -> Result<Tensor> {
        let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let y = centred.broadcast_div(&(variance + f64::from(eps))?.sqrt()?)?;
        Ok(match affine {
            Some((weight, bias)) => y.broadcast_mul(&self.load(weight)?)?.broadcast_add(&self.load(bias)?)?,
            None => y,
        })
    }

    fn rms_norm(&mut self, x: &Tensor, weight: &Weight, eps: f32) -> Result<Tensor> {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        let y = x.broadcast_div(&(mean + f64::from(eps))?.sqrt()?)?;
        Ok(y.broadcast_mul(&self.load(weight)?)?)
    }

    fn route(&mut self, scores: &Tensor, gating: Gating, heads: &HeadSet) -> Result<Tensor> {
        router::route(self, scores, gating, heads)
    }

    fn routed_attention(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        head_gates: &Tensor,
        attn_bias: Option<&Tensor>,
        attention: Attention,
    ) -> Result<Tensor> {
        let (batch, q_len, _) = query.dims3()?;
        let (heads, group) = (attention.num_heads, attention.num_heads / attention.kv_num_heads);
        let per_head = |x: &Tensor| -> Result<Tensor> {
            let x = match x.rank() {
                3 => x.reshape((batch, x.dim(1)?, attention.kv_num_heads, ()))?.transpose(1, 2)?,
                _ => x.clone(),
            };
            let (_, kv_heads, kv_len, dim) = x.dims4()?;
            let x = x.unsqueeze(2)?.broadcast_as((batch, kv_heads, group, kv_len, dim))?;
            Ok(x.reshape((batch, heads, kv_len, dim))?.contiguous()?)
        };
        let q = query.reshape((batch, q_len, heads, ()))?.transpose(1, 2)?.contiguous()?;
        let (k, v) = (per_head(key)?, per_head(value)?);
        let kv_len = k.dim(2)?;
        let mut scores = (q.matmul(&k.t()?)? * f64::from(attention.scale))?;
        if let Some(bias) = attn_bias {
            scores = scores.broadcast_add(bias)?;
        }
        if attention.is_causal {
            let hidden = |(i, j): (usize, usize)| if j + q_len <= i + kv_len { 0.0 } else { f32::NEG_INFINITY };
            let mask: Vec<f32> = (0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j))).map(hidden).collect();
            scores = scores.broadcast_add(&Tensor::from_vec(mask, (q_len, kv_len), &Device::Cpu)?)?;
        }
        let max = scores.max_keepdim(D::Minus1)?;
        let dead = max.eq(&Tensor::full(f32::NEG_INFINITY, max.shape(), &Device::Cpu)?)?;
        let heads_out = self.softmax(&scores)?.matmul(&v)?;
        let gates = head_gates.transpose(1, 2)?.unsqueeze(D::Minus1)?;
        let zero = Tensor::zeros(&[1], DType::F32, &Device::Cpu)?;
        let off = (gates.eq(&gates.zeros_like()?)? + dead)?;
        let gated = heads_out.broadcast_mul(&gates)?;
        let routed = self.select(&off, &zero, &gated)?;
        Ok(routed.transpose(1, 2)?.reshape((batch, q_len, ()))?)
    }

    fn routed_projection(&mut self, x: &Tensor, linear: &HeadLinear, gates: &Tensor) -> Result<Tensor> {
        let weight = self.load(&linear.weight)?;
        let matrix = match linear.per_head() {
            true => weight.transpose(0, 1)?.flatten_from(1)?,
            false => weight.t()?,
        };
        let mut y = x.broadcast_matmul(&matrix)?;
        if let Some(bias) = &linear.bias {
            y = y.broadcast_add(&self.load(bias)?)?;
        }
        self.mask_heads(&y, gates)
    }

    fn routed_combine(&mut self, x: &Tensor, linear: &HeadLinear, gates: &Tensor) -> Result<Tensor> {
        let weight = self.load(&linear.weight)?;
        let matrix = match linear.per_head() {
            true => weight.flatten_to(1)?,
            false => weight.t()?,
        };
        let y = self.mask_heads(x, gates)?.broadcast_matmul(&matrix)?;
        Ok(match &linear.bias {
            Some(bias) => y.broadcast_add(&self.load(bias)?)?,
            None => y,
        })
    }

    fn routed_mlp(&mut self, x: &Tensor, experts: &Experts, gates: &Tensor) -> Result<Tensor> {
        let (fc1, fc2) = (self.load(&experts.fc1)?, self.load(&experts.fc2)?);
        let mut sum: Option<Tensor> = None;
        for e in 0..experts.count() {
            let mut h = x.broadcast_matmul(&fc1.get(e)?)?;
            if let Some((bias, _)) = &experts.biases {
                h = h.broadcast_add(&self.load(bias)?.get(e)?)?;
            }
            let h = match experts.activation {
                Activation::Relu => h.relu()?,
                Activation::Gelu => h.gelu_erf()?,
                Activation::GeluTanh => h.gelu()?,
                Activation::Silu => self.silu(&h)?,
                Activation::SwiGlu => {
                    let hidden = h.dim(D::Minus1)? / 2;
                    (self.silu(&h.narrow(D::Minus1, 0, hidden)?)? * h.narrow(D::Minus1, hidden, hidden)?)?
                }
            };
            let mut y = h.broadcast_matmul(&fc2.get(e)?)?;
            if let Some((_, bias)) = &experts.biases {
                y = y.broadcast_add(&self.load(bias)?.get(e)?)?;
            }
            let y = y.broadcast_mul(&gates.narrow(D::Minus1, e, 1)?)?;
            sum = Some(match sum {
                Some(sum) => (sum + y)?,
                None => y,
            });
        }
        sum.ok_or(Error::Internal("a mixture of no experts"))
    }

    fn aggregated_attention(&mut self, inputs: &Aggregated<'_, Tensor>, a: &Aggregation) -> Result<Tensor> {
        let (batch, tokens, width) = inputs.query.dims3()?;
        let (heads, dim, cells) = (a.num_heads, width / a.num_heads, a.window * a.window);
        let per_head = |x: &Tensor| x.reshape((batch, x.dim(1)?, heads, dim))?.transpose(1, 2)?.contiguous();
        let unit = |x: &Tensor| x.broadcast_div(&x.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(1e-12)?);
        let qn = unit(&per_head(inputs.query)?)?;
        let embedding = self.load(&a.query_embedding)?.unsqueeze(1)?;
        let scale = self.load(&a.query_scale)?.t()?.unsqueeze(D::Minus1)?;
        let qs = qn.broadcast_add(&embedding)?.broadcast_mul(&scale)?;

        // Window cells as rows of a padded token list: row `tokens` is zero, and -inf in the scores.
        let (cell, outside) = window_cells(a);
        let cell = Tensor::from_vec(cell, (tokens * cells,), &Device::Cpu)?;
        let outside = Tensor::from_vec(outside, (tokens, cells), &Device::Cpu)?;
        let windows = |x: &Tensor| -> Result<Tensor> {
            let zero = Tensor::zeros((batch, heads, 1, dim), DType::F32, &Device::Cpu)?;
            let rows = Tensor::cat(&[x, &zero], 2)?.index_select(&cell, 2)?;
            Ok(rows.reshape((batch, heads, tokens, cells, dim))?)
        };
        let local_keys = windows(&unit(&per_head(inputs.key)?)?)?;
        let local = local_keys.broadcast_mul(&qs.unsqueeze(3)?)?.sum(D::Minus1)?;
        let local = local.broadcast_add(&self.load(&a.local_bias)?.unsqueeze(1)?)?.broadcast_add(&outside)?;
        let pooled = qs.matmul(&unit(&per_head(inputs.pooled_key)?)?.t()?)?;
        let pooled = pooled.broadcast_add(&self.load(&a.pooled_bias)?)?;
        let weights = self.softmax(&Tensor::cat(&[&local, &pooled], 3)?)?;
        let learnt = qn.broadcast_matmul(&self.load(&a.learnable_tokens)?)?;
        let learnt = learnt.broadcast_add(&self.load(&a.learnable_bias)?.unsqueeze(1)?)?;
        let local = (weights.narrow(3, 0, cells)? + learnt)?;
        let values = windows(&per_head(inputs.value)?)?;
        let local = values.broadcast_mul(&local.unsqueeze(D::Minus1)?)?.sum(3)?;
        let pooled = weights.narrow(3, cells, pooled.dim(3)?)?.matmul(&per_head(inputs.pooled_value)?)?;
        let heads_out = (local + pooled)?.broadcast_mul(&inputs.head_gates.transpose(1, 2)?.unsqueeze(D::Minus1)?)?;
        self.mask_heads(&heads_out.transpose(1, 2)?.reshape((batch, tokens, width))?, inputs.head_gates)
    }

    fn reshape(&mut self, x: &Tensor, shape: &[i64]) -> Result<Tensor> {
        let shape = resolve_shape(x.dims(), shape)?;
        Ok(x.contiguous()?.reshape(shape)?)
    }

    fn transpose(&mut self, x: &Tensor, perm: &[usize]) -> Result<Tensor> {
        Ok(x.permute(perm)?)
    }

    fn concat(&mut self, parts: &[&Tensor], axis_: i64) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        let parts_: Vec<Tensor> = parts.iter().map(|x| x.contiguous()).collect::<candle_core::Result<_>>()?;
        Ok(Tensor::cat(&parts_, axis(first, axis_))?)
    }

    fn slice(&mut self, x: &Tensor, axis_: i64, start: usize, end: usize) -> Result<Tensor> {
        Ok(x.narrow(axis(x, axis_), start, end - start)?)
    }

    fn embedding(&mut self, weight: &Weight, indices: &Tensor) -> Result<Tensor> {
        let weight = self.load(weight)?;
        let rows = weight.index_select(&indices.flatten_all()?, 0)?;
        let mut dims = indices.dims().to_vec();
        dims.push(weight.dim(1)?);
        Ok(rows.reshape(dims)?)
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

    fn gates(&mut self, gates: Tensor, _active: usize) -> Result<Tensor> {
        let name = format!("gates.{}", self.path());
        let gates = self.given_gates.get(&name).cloned().unwrap_or(gates);
        self.keep(name, &gates);
        Ok(gates)
    }

    fn tap(&mut self, kind: Tap, value: &Tensor) -> Result<()> {
        self.keep(format!("{}.{}", kind.prefix(), self.path()), value);
        Ok(())
    }
}

/// For every token and window cell the cell's token (the number of tokens where it lies outside), and 0 or -inf.
fn window_cells(a: &Aggregation) -> (Vec<u32>, Vec<f32>) {
    let (mut cells, mut outside) = (Vec::new(), Vec::new());
    let reach = a.window / 2;
    for y in 0..a.height {
        for x in 0..a.width {
            for i in 0..a.window * a.window {
                let (cy, cx) = ((y + i / a.window).wrapping_sub(reach), (x + i % a.window).wrapping_sub(reach));
                let inside = cy < a.height && cx < a.width;
                cells.push(if inside { cy * a.width + cx } else { a.height * a.width } as u32);
                outside.push(if inside { 0.0 } else { f32::NEG_INFINITY });
            }
        }
    }
    (cells, outside)
}

/// ONNX Reshape's target for a known input shape.
pub(crate) fn resolve_shape(dims: &[usize], shape: &[i64]) -> Result<Vec<usize>> {
    let bad = || Error::Internal("a reshape that does not fit its input");
    let mut target = Vec::with_capacity(shape.len());
    for (i, &dim) in shape.iter().enumerate() {
        target.push(match dim {
            0 => *dims.get(i).ok_or_else(bad)?,
            -1 => usize::MAX,
            dim => usize::try_from(dim).map_err(|_| bad())?,
        });
    }
    let elements: usize = dims.iter().product();
    let known: usize = target.iter().filter(|&&d| d != usize::MAX).product();
    for dim in target.iter_mut().filter(|d| **d == usize::MAX) {
        *dim = elements.checked_div(known).unwrap_or(0);
    }
    if target.iter().product::<usize>() != elements {
        return Err(bad());
    }
    Ok(target)
}
