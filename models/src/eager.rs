//! The vocabulary run by candle: on the CPU in float32 the reference of every export, with [`Parameters`] what a training
//! differentiates.

mod sharing;
mod trained;

use crate::algebra::{multiply, product, select, sigmoid, silu, softmax};
use crate::checkpoint::Weight;
use crate::error::Error;
use crate::fused::{self, Activation, Norm};
use crate::graph::Graph;
use crate::operators::{self, Computed};
use crate::ops::{Argument, Binary, Conv, Linear, ModelOperator, Ops, Reduce, Result, Tap, Type, Unary};
use crate::parameters::Parameters;
use crate::routing::{Choice, Routing};
use crate::shape::{axis, reshaped};
use candle_core::{D, DType, Device, Tensor};
use moh_operators::{ElementType, GATES, List};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Prefix of the routers' margins among the taps: for every token the distance from the last head kept to the first one
/// dropped, relative to the former.
pub const GAPS: &str = "gap.";

/// Runs a family's `forward` in candle.
pub struct Eager {
    device: Device,
    /// What [`Type::Model`] is.
    model: DType,
    /// Variables in the place of the checkpoint's tensors.
    parameters: Option<Arc<Parameters>>,
    /// Of a training in float32 on the CPU: how gradients go back. Elsewhere candle knows.
    graph: Option<Graph>,
    /// The parameters' numbers in that graph, by name.
    leaves: BTreeMap<String, Tensor>,
    /// What weights are read with.
    reader: Option<Reader>,
    weights: BTreeMap<String, Tensor>,
    path: Vec<String>,
    taps: Option<BTreeMap<String, Tensor>>,
    given_gates: BTreeMap<String, Tensor>,
    routing: Option<Vec<Routing>>,
    /// The seed of the noise, in a search for shared heads.
    search: Option<Option<u64>>,
    /// Of the router whose gates come next, and its margins.
    choice: Option<Choice>,
    margins: Option<Tensor>,
    /// Whether weights are read again each time.
    forgets: bool,
    /// The first module that gave a number that is not finite, where they are looked for.
    watched: Option<Option<String>>,
}

impl Default for Eager {
    fn default() -> Eager {
        Eager {
            device: Device::Cpu,
            model: DType::F32,
            parameters: None,
            graph: None,
            leaves: BTreeMap::new(),
            reader: None,
            weights: BTreeMap::new(),
            path: Vec::new(),
            taps: None,
            given_gates: BTreeMap::new(),
            routing: None,
            search: None,
            choice: None,
            margins: None,
            forgets: false,
            watched: None,
        }
    }
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

    /// Computes with `parameters`, on their device, in the place of the checkpoint's tensors: [`Eager::backward`] gives their gradients.
    ///
    /// Where a variable changes, a new interpreter has to be made.
    pub fn with_parameters(mut self, parameters: Arc<Parameters>) -> Eager {
        self.device = parameters.device().clone();
        self.parameters = Some(parameters);
        self.begin()
    }

    /// Computes what is of the model's type in bfloat16, with weights that are rounded to it.
    pub fn in_bf16(mut self) -> Eager {
        self.model = DType::BF16;
        self.begin()
    }

    /// Looks for numbers that are not finite in what modules give back.
    pub fn watching(mut self) -> Eager {
        self.watched = Some(None);
        self
    }

    /// The first module of the forwards so far that gave a number that is not finite.
    pub fn first_not_finite(&self) -> Option<&str> {
        self.watched.as_ref()?.as_deref()
    }

    /// The device that values are on.
    pub fn device(&self) -> &Device {
        &self.device
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

    /// The decisions of the forwards since they were last taken.
    pub fn routing(&self) -> &[Routing] {
        self.routing.as_deref().unwrap_or_default()
    }

    /// The intermediate values of the last forward.
    pub fn take_taps(&mut self) -> BTreeMap<String, Tensor> {
        self.taps.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The tensor in float32, converted once where weights are kept.
    fn load(&mut self, weight: &Weight) -> Result<Tensor> {
        if let Some(tensor) = self.weights.get(weight.name()).filter(|tensor| tensor.dims() == weight.shape()) {
            return Ok(tensor.clone());
        }
        let tensor = match self.parameters.clone() {
            Some(parameters) => self.trained(&parameters, weight)?,
            None => Tensor::from_vec(self.read(weight)?, weight.shape(), &self.device)?,
        };
        if self.forgets {
            return Ok(tensor);
        }
        self.weights.insert(weight.name().to_owned(), tensor.clone());
        Ok(tensor)
    }

    /// The tensor in the type of `x`.
    fn load_as(&mut self, weight: &Weight, x: &Tensor) -> Result<Tensor> {
        Ok(self.load(weight)?.to_dtype(x.dtype())?)
    }

    fn dtype(&self, ty: Type) -> DType {
        match ty {
            Type::Model => self.model,
            Type::F32 => DType::F32,
            Type::I64 => DType::I64,
            Type::Bool => DType::U8,
        }
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

    fn watch(&mut self, value: &Tensor) -> Result<()> {
        let path = self.path();
        if let Some(first @ None) = &mut self.watched
            && value.elem_count() > 0
        {
            let sum = value.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
            let not_a_number = value.ne(value)?.to_dtype(DType::F32)?.max_all()?.to_scalar::<f32>()?;
            if !sum.is_finite() || not_a_number != 0.0 {
                *first = Some(path);
            }
        }
        Ok(())
    }
}

impl Ops for Eager {
    type Value = Tensor;

    fn weight(&mut self, weight: &Weight, ty: Type) -> Result<Tensor> {
        Ok(self.load(weight)?.to_dtype(self.dtype(ty))?)
    }

    fn constant(&mut self, ty: Type, shape: &[usize], values: &[f32]) -> Result<Tensor> {
        Ok(Tensor::from_slice(values, shape, &self.device)?.to_dtype(self.dtype(ty))?)
    }

    fn computed(&mut self, weight: &Weight, ty: Type) -> Result<Tensor> {
        self.weight(weight, ty)
    }

    fn filled(&mut self, ty: Type, like: &Tensor, width: usize, value: f32) -> Result<Tensor> {
        let mut dims = like.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = width;
        }
        Ok(Tensor::full(value, dims, &self.device)?.to_dtype(self.dtype(ty))?)
    }

    fn cast(&mut self, x: &Tensor, ty: Type) -> Result<Tensor> {
        let dtype = self.dtype(ty);
        match x.dtype() == dtype {
            true => Ok(x.clone()),
            false => self.composed(&[x], |x| Ok(x[0].to_dtype(dtype)?)),
        }
    }

    fn unary(&mut self, op: Unary, x: &Tensor) -> Result<Tensor> {
        match op {
            Unary::Gelu if self.fuses(x) => return self.fused(x, Activation::Gelu),
            Unary::GeluTanh if self.fuses(x) => return self.fused(x, Activation::GeluTanh),
            _ => {}
        }
        self.composed(&[x], |x| {
            let x = &x[0];
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
        })
    }

    fn binary(&mut self, op: Binary, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        if self.graph.is_some() && a.dtype() == DType::F32 && b.dtype() == DType::F32 {
            let wanted = [a, b].map(|x| self.wants(x));
            let shapes = [a, b].map(|x| x.dims().to_vec());
            match op {
                Binary::Add | Binary::Sub => {
                    let of = if op == Binary::Add { fused::Arithmetic::Sum } else { fused::Arithmetic::Difference };
                    let y = fused::binary(of, a, b)?;
                    return Ok(self.step(y, &[a, b], move |g| {
                        let of_a = wanted[0].then(|| fused::reduced(g, &shapes[0])).transpose()?;
                        let of_b = wanted[1].then(|| fused::reduced(g, &shapes[1])).transpose()?;
                        let of_b = if op == Binary::Sub { of_b.map(|g| g.neg()).transpose()? } else { of_b };
                        Ok(vec![of_a, of_b])
                    }));
                }
                Binary::Mul => {
                    let y = fused::binary(fused::Arithmetic::Product, a, b)?;
                    let kept = [a.clone(), b.clone()];
                    return Ok(self.step(y, &[a, b], move |g| {
                        let [a, b] = &kept;
                        let of_a = wanted[0].then(|| fused::reduced_product(g, b, &shapes[0])).transpose()?;
                        let of_b = wanted[1].then(|| fused::reduced_product(g, a, &shapes[1])).transpose()?;
                        Ok(vec![of_a, of_b])
                    }));
                }
                _ => {}
            }
        }
        self.composed(&[a, b], |x| {
            let (a, b) = (&x[0], &x[1]);
            Ok(match op {
                Binary::Add => a.broadcast_add(b)?,
                Binary::Sub => a.broadcast_sub(b)?,
                Binary::Mul => a.broadcast_mul(b)?,
                Binary::Div => a.broadcast_div(b)?,
                Binary::Max => a.broadcast_maximum(b)?,
                Binary::Equal => a.broadcast_eq(b)?,
            })
        })
    }

    fn silu(&mut self, x: &Tensor) -> Result<Tensor> {
        match self.fuses(x) {
            true => self.fused(x, Activation::Silu),
            false => silu(x),
        }
    }

    fn select(&mut self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.composed(&[condition, a, b], |x| select(&x[0], &x[1], &x[2]))
    }

    fn reduce(&mut self, op: Reduce, x: &Tensor, axes: &[i64]) -> Result<Tensor> {
        let axes: Vec<usize> = axes.iter().map(|&a| axis(x.rank(), a)).collect();
        if self.graph.is_some() && x.dtype() == DType::F32 && op != Reduce::Max {
            let mut dims = x.dims().to_vec();
            axes.iter().for_each(|&axis| dims[axis] = 1);
            let of = if op == Reduce::Mean { axes.iter().map(|&axis| x.dims()[axis]).product() } else { 1 };
            let factor = 1.0 / of as f64;
            let scaled = move |x: Tensor| if of == 1 { Ok(x) } else { x * factor };
            let (y, shape) = (scaled(fused::reduced(x, &dims)?)?, x.dims().to_vec());
            return Ok(
                self.step(y, &[x], move |g| Ok(vec![Some(scaled(g.clone())?.broadcast_as(shape)?.contiguous()?)]))
            );
        }
        self.composed(&[x], |x| {
            let x = &x[0];
            Ok(match op {
                Reduce::Sum => x.sum_keepdim(axes)?,
                Reduce::Mean => x.mean_keepdim(axes)?,
                Reduce::Max => axes.into_iter().try_fold(x.clone(), |x, axis| x.max_keepdim(axis))?,
            })
        })
    }

    fn softmax(&mut self, x: &Tensor) -> Result<Tensor> {
        self.composed(&[x], |x| softmax(&x[0]))
    }

    fn cumulative_sum(&mut self, x: &Tensor, along: i64) -> Result<Tensor> {
        let axis = axis(x.rank(), along);
        self.composed(&[x], |x| {
            let x = &x[0];
            let mut sums = Vec::with_capacity(x.dim(axis)?);
            for i in 0..x.dim(axis)? {
                let one = x.narrow(axis, i, 1)?;
                sums.push(match sums.last() {
                    Some(last) => (last + one)?,
                    None => one,
                });
            }
            Ok(if sums.is_empty() { x.clone() } else { Tensor::cat(&sums, axis)? })
        })
    }

    fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.composed(&[a, b], |x| product(&x[0], &x[1]))
    }

    fn linear(&mut self, x: &Tensor, linear: &Linear) -> Result<Tensor> {
        if self.graph.is_some() && x.dtype() == DType::F32 {
            let weight = self.load(&linear.weight)?;
            let bias = linear.bias.as_ref().map(|bias| self.load(bias)).transpose()?;
            let y = self.product_of_rows(x, &weight, bias.as_ref())?;
            self.watch(&y)?;
            return Ok(y);
        }
        let (rows, width) = (x.elem_count() / x.dim(D::Minus1)?.max(1), x.dim(D::Minus1)?);
        let (flat, out) = (x.contiguous()?.reshape((rows, width))?, linear.weight.shape()[0]);
        let step = if self.forgets { (AT_A_TIME / width.max(1)).max(1) } else { out };
        let y = match out <= step {
            true => multiply(&flat, &self.load_as(&linear.weight, x)?.t()?, Tensor::matmul)?,
            false => {
                let part = |start: usize| {
                    let part = self.load_as(&linear.weight.rows(start..out.min(start + step)), x)?;
                    multiply(&flat, &part.t()?, Tensor::matmul)
                };
                Tensor::cat(&(0..out).step_by(step).map(part).collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        let y = match &linear.bias {
            Some(bias) => y.broadcast_add(&self.load_as(bias, x)?)?,
            None => y,
        };
        let mut dims = x.dims().to_vec();
        if let Some(last) = dims.last_mut() {
            *last = out;
        }
        self.watch(&y)?;
        Ok(y.reshape(dims)?)
    }

    fn conv2d(&mut self, x: &Tensor, weight: &Weight, bias: Option<&Weight>, conv: Conv) -> Result<Tensor> {
        let x = &if x.dtype() == self.model { x.clone() } else { x.to_dtype(self.model)? };
        let weight = self.load_as(weight, x)?;
        let (channels, side) = (x.dim(1)?, weight.dim(2)?);
        let is_depthwise = weight.dims() == [channels, 1, side, side] && conv.groups == channels;
        let keeps_size = conv.stride == 1 && side == 2 * conv.padding + 1;
        let bias = bias.map(|bias| self.load_as(bias, x)).transpose()?;
        if self.graph.is_some() && conv.groups == 1 {
            let windows = fused::windows(x, &weight, conv.padding, conv.stride)?;
            let flat = self.fused(x, windows)?;
            let [y, z] = windows.places();
            let (out, batch) = (weight.dim(0)?, x.dim(0)?);
            let flat_weight = self.reshape(&weight, &[out as i64, -1])?;
            let product = self.product_of_rows(&flat, &flat_weight, bias.as_ref())?;
            let product = self.reshape(&product, &[batch, y, z, out].map(|n| n as i64))?;
            return self.transpose(&product, &[0, 3, 1, 2]);
        }
        if self.fuses(x) && is_depthwise && keeps_size {
            let bias = match bias {
                Some(bias) => bias,
                None => Tensor::zeros(channels, DType::F32, &self.device)?,
            };
            // Channels last, which linear layers before and after it have, too.
            let x = self.transpose(x, &[0, 2, 3, 1])?;
            let y = self.fused3(&x, &weight, &bias, fused::depthwise(&x, &weight)?)?;
            return self.transpose(&y, &[0, 3, 1, 2]);
        }
        let mut inputs = vec![x, &weight];
        inputs.extend(&bias);
        self.composed(&inputs, |inputs| {
            let convolve = |x: &Tensor, weight: &Tensor| x.conv2d(weight, conv.padding, conv.stride, 1, conv.groups);
            let y = multiply(&inputs[0], &inputs[1], convolve)?;
            Ok(match inputs.get(2) {
                Some(bias) => y.broadcast_add(&bias.reshape((1, (), 1, 1))?)?,
                None => y,
            })
        })
    }

    fn layer_norm(
        &mut self,
        x: &Tensor,
        _width: usize,
        affine: Option<(&Weight, &Weight)>,
        eps: f32,
    ) -> Result<Tensor> {
        if self.fuses(x) {
            let norm = Norm { eps, centres: true };
            return match affine {
                None => self.fused(x, norm),
                Some((weight, bias)) => {
                    let (weight, bias) = (self.load(weight)?, self.load(bias)?);
                    self.fused3(x, &weight, &bias, norm)
                }
            };
        }
        let wide = x.to_dtype(DType::F32)?;
        let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let y = centred.broadcast_div(&(variance + f64::from(eps))?.sqrt()?)?;
        let y = match affine {
            Some((weight, bias)) => y.broadcast_mul(&self.load(weight)?)?.broadcast_add(&self.load(bias)?)?,
            None => y,
        };
        Ok(y.to_dtype(x.dtype())?)
    }

    fn rms_norm(&mut self, x: &Tensor, weight: &Weight, eps: f32) -> Result<Tensor> {
        if self.fuses(x) {
            let weight = self.load(weight)?;
            return self.fused2(x, &weight, Norm { eps, centres: false });
        }
        let wide = x.to_dtype(DType::F32)?;
        let mean = wide.sqr()?.mean_keepdim(D::Minus1)?;
        let y = wide.broadcast_div(&(mean + f64::from(eps))?.sqrt()?)?;
        Ok(y.broadcast_mul(&self.load(weight)?)?.to_dtype(x.dtype())?)
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
                Some(Argument::Value(value)) if value.dtype() == DType::BF16 => Some(value.to_dtype(DType::F32)?),
                Some(Argument::Value(value)) => Some(value.clone()),
                Some(Argument::Weight(weight)) if O::INPUTS[tensors.len()].ty == ElementType::T => {
                    Some(self.load(weight)?.to_dtype(self.model)?.to_dtype(DType::F32)?)
                }
                Some(Argument::Weight(weight)) => Some(self.load(weight)?),
                None => None,
            });
        }
        let Computed { output, margins, choice } = match self.graph.is_some() {
            true => self.trained_operator::<O>(&attributes, &tensors)?,
            false => {
                let tensors: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
                O::compute(&attributes, &operators::inputs::<O, _>(&tensors)?)?
            }
        };
        if choice.is_some() {
            self.choice = choice;
        }
        if margins.is_some() {
            self.margins = margins;
        }
        self.watch(&output)?;
        let ty = if O::OUTPUT.ty == ElementType::T { self.model } else { DType::F32 };
        Ok(output.to_dtype(ty)?)
    }

    fn reshape(&mut self, x: &Tensor, shape: &[i64]) -> Result<Tensor> {
        let (shape, from) = (reshaped(x.dims(), shape)?, x.dims().to_vec());
        let y = fused::packed(x)?.reshape(shape)?;
        Ok(self.step(y, &[x], move |gradient| Ok(vec![Some(fused::packed(gradient)?.reshape(from)?)])))
    }

    fn transpose(&mut self, x: &Tensor, perm: &[usize]) -> Result<Tensor> {
        let y = x.permute(perm)?;
        let mut back = vec![0; perm.len()];
        perm.iter().enumerate().for_each(|(to, &from)| back[from] = to);
        Ok(self.step(y, &[x], move |gradient| Ok(vec![Some(gradient.permute(back)?)])))
    }

    fn concat(&mut self, parts: &[&Tensor], along: i64) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        // Inputs that callers give, such as empty caches, may be wider than the model's type.
        let alike = parts.iter().all(|x| x.dtype() == first.dtype());
        let cast = |x: &&Tensor| if alike { x.contiguous() } else { x.to_dtype(self.model)?.contiguous() };
        let parts_: Vec<Tensor> = parts.iter().map(cast).collect::<candle_core::Result<_>>()?;
        let axis = axis(first.rank(), along);
        let (y, lengths) =
            (Tensor::cat(&parts_, axis)?, parts.iter().map(|part| part.dims()[axis]).collect::<Vec<_>>());
        Ok(self.step(y, parts, move |gradient| {
            let mut at = 0;
            let part = |length: usize| {
                at += length;
                Ok(Some(gradient.narrow(axis, at - length, length)?))
            };
            lengths.into_iter().map(part).collect()
        }))
    }

    fn slice(&mut self, x: &Tensor, along: i64, start: usize, end: usize) -> Result<Tensor> {
        let axis = axis(x.rank(), along);
        let (y, length) = (x.narrow(axis, start, end - start)?, x.dims()[axis]);
        Ok(self.step(y, &[x], move |gradient| Ok(vec![Some(gradient.pad_with_zeros(axis, start, length - end)?)])))
    }

    fn embedding(&mut self, weight: &Weight, indices: &Tensor) -> Result<Tensor> {
        let (indices_of, count, width) = (indices.flatten_all()?, weight.shape()[0], weight.shape()[1]);
        // On other devices numbers would have to be fetched first.
        if self.device.is_cpu() {
            let is_row = |&index: &i64| usize::try_from(index).is_ok_and(|row| row < count);
            if let Some(index) =
                indices_of.to_dtype(DType::I64)?.to_vec1::<i64>()?.into_iter().find(|index| !is_row(index))
            {
                return Err(Error::Row { tensor: weight.name().to_owned(), rows: count, index });
            }
        }
        let rows = match self.forgets {
            false => {
                let table = self.load(weight)?;
                let rows = self.composed(&[&table], |table| Ok(table[0].index_select(&indices_of, 0)?))?;
                rows.to_dtype(self.model)?
            }
            true => {
                let mut values = Vec::new();
                for row in indices_of.to_vec1::<i64>()? {
                    let row = usize::try_from(row).ok().filter(|row| *row < count);
                    let row = row.ok_or(Error::Internal("an index beyond an embedding"))?;
                    values.extend(self.read(&weight.rows(row..row + 1))?);
                }
                Tensor::from_vec(values, (indices_of.elem_count(), width), &self.device)?
            }
        };
        let mut dims: Vec<i64> = indices.dims().iter().map(|&n| n as i64).collect();
        dims.push(width as i64);
        self.reshape(&rows, &dims)
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

    fn gates(&mut self, gates: Tensor, active: usize) -> Result<Tensor> {
        let name = format!("{GATES}{}", self.path());
        let gates = self.searched(gates, active)?;
        let gates = match self.given_gates.get(&name).cloned() {
            Some(given) => self.input(given)?,
            None => gates,
        };
        self.keep(name, &gates);
        if let Some(margins) = self.margins.take() {
            // Of a token whose groups of heads choose for themselves, the smallest.
            let (batch, tokens, _) = gates.dims3()?;
            let margins = margins.reshape((batch, tokens, ()))?.min(D::Minus1)?;
            self.keep(format!("{GAPS}{}", self.path()), &margins);
        }
        let choice = self.choice.take();
        let path = self.path();
        if let (Some(routing), Some(choice)) = (&mut self.routing, choice) {
            let shown = match &mut self.graph {
                Some(graph) => graph.bridge(&gates)?,
                None => gates.clone(),
            };
            routing.push(Routing { path, choice, gates: shown });
        }
        Ok(gates)
    }

    fn input(&mut self, value: Tensor) -> Result<Tensor> {
        Ok(match &mut self.graph {
            Some(graph) => graph.enter(&value),
            None => value,
        })
    }

    fn output(&mut self, value: Tensor) -> Result<Tensor> {
        match &mut self.graph {
            Some(graph) => graph.bridge(&value),
            None => Ok(value),
        }
    }

    fn tap(&mut self, kind: Tap, value: &Tensor) -> Result<()> {
        self.keep(format!("{}.{}", kind.prefix(), self.path()), value);
        self.watch(value)
    }
}
