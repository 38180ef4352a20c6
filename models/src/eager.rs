//! The vocabulary run by candle on the CPU in float32: the reference of every export.

use crate::algebra::{select, sigmoid, softmax};
use crate::checkpoint::Weight;
use crate::error::Error;
use crate::operators::{self, Computed};
use crate::ops::{Argument, Binary, Conv, Linear, ModelOperator, Ops, Reduce, Result, Tap, Type, Unary};
use crate::routing::{Choice, Routing};
use crate::shape::{axis, reshaped};
use candle_core::{D, DType, Device, Tensor};
use moh_operators::{GATES, List};
use std::collections::BTreeMap;

/// Prefix of the routers' margins among the taps: for every token the distance from the last head kept to the first one
/// dropped, relative to the former.
pub const GAPS: &str = "gap.";

/// Runs a family's `forward` in candle.
#[derive(Default)]
pub struct Eager {
    /// What weights are read with.
    reader: Option<Reader>,
    weights: BTreeMap<String, Tensor>,
    path: Vec<String>,
    taps: Option<BTreeMap<String, Tensor>>,
    given_gates: BTreeMap<String, Tensor>,
    routing: Option<Vec<Routing>>,
    /// Of the router whose gates come next.
    choice: Option<Choice>,
    /// Whether weights are read again each time.
    forgets: bool,
}

/// Gives the numbers of a weight.
pub type Reader = Box<dyn Fn(&Weight) -> Result<Vec<f32>>>;

/// Numbers of a matrix that are in memory at a time where weights are not kept.
const AT_A_TIME: usize = 1 << 26;

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

    /// Keeps no weight: each is read when it is wanted, large matrices in parts. For models that do not fit into memory.
    pub fn forgetting(mut self) -> Eager {
        self.forgets = true;
        self
    }

    /// Reads weights with `reader` in the place of the checkpoint: what they are after a rounding, for example.
    pub fn reading(mut self, reader: Reader) -> Eager {
        self.reader = Some(reader);
        self
    }

    /// Uses these gates, named `gates.<module path>`, instead of the routers' own.
    pub fn with_gates(mut self, gates: BTreeMap<String, Tensor>) -> Eager {
        self.given_gates = gates;
        self
    }

    /// Keeps what the routers of the forwards that follow decide.
    pub fn with_routing(mut self) -> Eager {
        self.routing = Some(Vec::new());
        self
    }

    /// The decisions of the last forward's routers, layer by layer. Layers whose heads are all on have none.
    pub fn take_routing(&mut self) -> Vec<Routing> {
        self.routing.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The intermediate values of the last forward.
    pub fn take_taps(&mut self) -> BTreeMap<String, Tensor> {
        self.taps.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The checkpoint's tensor in float32, converted once where weights are kept.
    fn load(&mut self, weight: &Weight) -> Result<Tensor> {
        if let Some(tensor) = self.weights.get(weight.name()) {
            return Ok(tensor.clone());
        }
        let tensor = Tensor::from_vec(self.read(weight)?, weight.shape(), &Device::Cpu)?;
        if self.forgets {
            return Ok(tensor);
        }
        self.weights.insert(weight.name().to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn read(&self, weight: &Weight) -> Result<Vec<f32>> {
        match &self.reader {
            Some(read) => read(weight),
            None => weight.to_f32(),
        }
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
            Unary::Sigmoid => sigmoid(x)?,
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
        select(condition, a, b)
    }

    fn reduce(&mut self, op: Reduce, x: &Tensor, axes: &[i64]) -> Result<Tensor> {
        let axes: Vec<usize> = axes.iter().map(|&a| axis(x.rank(), a)).collect();
        Ok(match op {
            Reduce::Sum => x.sum_keepdim(axes)?,
            Reduce::Mean => x.mean_keepdim(axes)?,
            Reduce::Max => axes.into_iter().try_fold(x.clone(), |x, axis| x.max_keepdim(axis))?,
        })
    }

    fn softmax(&mut self, x: &Tensor) -> Result<Tensor> {
        softmax(x)
    }

    fn cumulative_sum(&mut self, x: &Tensor, along: i64) -> Result<Tensor> {
        let axis = axis(x.rank(), along);
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
        let (rows, width) = (x.elem_count() / x.dim(D::Minus1)?.max(1), x.dim(D::Minus1)?);
        let (flat, out) = (x.contiguous()?.reshape((rows, width))?, linear.weight.shape()[0]);
        let step = if self.forgets { (AT_A_TIME / width.max(1)).max(1) } else { out };
        let y = match out <= step {
            true => flat.matmul(&self.load(&linear.weight)?.t()?)?,
            false => {
                let part = |start: usize| {
                    let part = self.load(&linear.weight.rows(start..out.min(start + step)))?;
                    Ok(flat.matmul(&part.t()?)?)
                };
                Tensor::cat(&(0..out).step_by(step).map(part).collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        let y = match &linear.bias {
            Some(bias) => y.broadcast_add(&self.load(bias)?)?,
            None => y,
        };
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = out;
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

    fn operator<O: ModelOperator>(
        &mut self,
        attributes: O::Attributes,
        inputs: &O::Inputs<List<'_, Argument<'_, Tensor>>>,
    ) -> Result<Tensor> {
        O::check(&attributes)?;
        let mut tensors = Vec::with_capacity(O::INPUTS.len());
        for argument in O::list(inputs) {
            tensors.push(match argument {
                Some(Argument::Value(value)) => Some(value.clone()),
                Some(Argument::Weight(weight)) => Some(self.load(weight)?),
                None => None,
            });
        }
        let tensors: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
        let Computed { output, margins, choice } = O::compute(&attributes, &operators::inputs::<O, _>(&tensors)?)?;
        if let Some(margins) = margins {
            self.keep(format!("{GAPS}{}", self.path()), &margins);
        }
        if choice.is_some() {
            self.choice = choice;
        }
        Ok(output)
    }

    fn reshape(&mut self, x: &Tensor, shape: &[i64]) -> Result<Tensor> {
        let shape = reshaped(x.dims(), shape)?;
        Ok(x.contiguous()?.reshape(shape)?)
    }

    fn transpose(&mut self, x: &Tensor, perm: &[usize]) -> Result<Tensor> {
        Ok(x.permute(perm)?)
    }

    fn concat(&mut self, parts: &[&Tensor], along: i64) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        let parts_: Vec<Tensor> = parts.iter().map(|x| x.contiguous()).collect::<candle_core::Result<_>>()?;
        Ok(Tensor::cat(&parts_, axis(first.rank(), along))?)
    }

    fn slice(&mut self, x: &Tensor, along: i64, start: usize, end: usize) -> Result<Tensor> {
        Ok(x.narrow(axis(x.rank(), along), start, end - start)?)
    }

    fn embedding(&mut self, weight: &Weight, indices: &Tensor) -> Result<Tensor> {
        let (indices_of, width) = (indices.flatten_all()?, weight.shape()[1]);
        let rows = match self.forgets {
            false => self.load(weight)?.index_select(&indices_of, 0)?,
            true => {
                let mut values = Vec::new();
                for row in indices_of.to_vec1::<i64>()? {
                    let row = usize::try_from(row).ok().filter(|row| *row < weight.shape()[0]);
                    let row = row.ok_or(Error::Internal("an index beyond an embedding"))?;
                    values.extend(self.read(&weight.rows(row..row + 1))?);
                }
                Tensor::from_vec(values, (indices_of.elem_count(), width), &Device::Cpu)?
            }
        };
        let mut dims = indices.dims().to_vec();
        dims.push(width);
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
        let name = format!("{GATES}{}", self.path());
        let gates = self.given_gates.get(&name).cloned().unwrap_or(gates);
        self.keep(name, &gates);
        let choice = self.choice.take();
        let path = self.path();
        if let (Some(routing), Some(choice)) = (&mut self.routing, choice) {
            routing.push(Routing { path, choice, gates: gates.clone() });
        }
        Ok(gates)
    }

    fn tap(&mut self, kind: Tap, value: &Tensor) -> Result<()> {
        self.keep(format!("{}.{}", kind.prefix(), self.path()), value);
        Ok(())
    }
}
