//! The vocabulary run by candle: on the CPU in float32 the reference of every export, with [`Parameters`] what a training
//! differentiates.

use crate::algebra::{multiply, product, select, sigmoid, silu, softmax};
use crate::checkpoint::Weight;
use crate::error::Error;
use crate::fused::{self, Activation};
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
    /// What weights are read with.
    reader: Option<Reader>,
    weights: BTreeMap<String, Tensor>,
    path: Vec<String>,
    taps: Option<BTreeMap<String, Tensor>>,
    given_gates: BTreeMap<String, Tensor>,
    routing: Option<Vec<Routing>>,
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
            reader: None,
            weights: BTreeMap::new(),
            path: Vec::new(),
            taps: None,
            given_gates: BTreeMap::new(),
            routing: None,
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

    /// Computes with `parameters`, on their device, in the place of the checkpoint's tensors: gradients of the outputs reach them.
    ///
    /// Where a variable changes, a new interpreter has to be made.
    pub fn with_parameters(mut self, parameters: Arc<Parameters>) -> Eager {
        self.device = parameters.device().clone();
        self.parameters = Some(parameters);
        self
    }

    /// Computes what is of the model's type in bfloat16, with weights that are rounded to it.
    pub fn in_bf16(mut self) -> Eager {
        self.model = DType::BF16;
        self
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
            Some(parameters) => self.differentiable(&parameters, weight)?,
            None => Tensor::from_vec(self.read(weight)?, weight.shape(), &self.device)?,
        };
        if self.forgets {
            return Ok(tensor);
        }
        self.weights.insert(weight.name().to_owned(), tensor.clone());
        Ok(tensor)
    }

    fn differentiable(&mut self, parameters: &Parameters, weight: &Weight) -> Result<Tensor> {
        let Some(derivation) = weight.derivation() else { return parameters.value(weight) };
        let inputs = derivation.inputs.iter().map(|input| self.load(input)).collect::<Result<Vec<_>>>()?;
        Ok((derivation.formula)(&inputs)?.reshape(weight.shape())?)
    }

    /// The tensor in the type of `x`.
    fn load_as(&mut self, weight: &Weight, x: &Tensor) -> Result<Tensor> {
        Ok(self.load(weight)?.to_dtype(x.dtype())?)
    }

    /// Whether `x` is of a training on the CPU in float32.
    fn fuses(&self, x: &Tensor) -> bool {
        self.parameters.is_some() && self.device.is_cpu() && x.dtype() == DType::F32
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
        Ok(x.to_dtype(self.dtype(ty))?)
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
            Unary::Gelu if self.fuses(x) => fused::activation(x, Activation::Gelu)?,
            Unary::GeluTanh if self.fuses(x) => fused::activation(x, Activation::GeluTanh)?,
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

    fn silu(&mut self, x: &Tensor) -> Result<Tensor> {
        match self.fuses(x) {
            true => Ok(fused::activation(x, Activation::Silu)?),
            false => silu(x),
        }
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
        product(a, b)
    }

    fn linear(&mut self, x: &Tensor, linear: &Linear) -> Result<Tensor> {
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
            Some(bias) if self.fuses(x) => fused::add_bias(&y, &self.load(bias)?)?,
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
        if self.fuses(x) && conv.groups == 1 {
            let bias = bias.map(|bias| self.load(bias)).transpose()?;
            return Ok(fused::conv2d(x, &weight, bias.as_ref(), conv.padding, conv.stride)?);
        }
        let y = match () {
            () if self.fuses(x) && is_depthwise && keeps_size => fused::depthwise(x, &weight)?,
            () => multiply(x, &weight, |x, weight| x.conv2d(weight, conv.padding, conv.stride, 1, conv.groups))?,
        };
        Ok(match bias {
            Some(bias) => y.broadcast_add(&self.load_as(bias, x)?.reshape((1, (), 1, 1))?)?,
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
        if self.fuses(x) {
            let affine =
                affine.map(|(weight, bias)| Ok::<_, Error>((self.load(weight)?, self.load(bias)?))).transpose()?;
            return Ok(fused::layer_norm(x, affine.as_ref().map(|(weight, bias)| (weight, bias)), eps)?);
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
            return Ok(fused::rms_norm(x, &self.load(weight)?, eps)?);
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
        let tensors: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
        let inputs = operators::inputs::<O, _>(&tensors)?;
        let Computed { output, margins, choice } = match self.parameters.is_some() && self.device.is_cpu() {
            true => O::train(&attributes, &inputs)?,
            false => O::compute(&attributes, &inputs)?,
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
        let shape = reshaped(x.dims(), shape)?;
        Ok(x.contiguous()?.reshape(shape)?)
    }

    fn transpose(&mut self, x: &Tensor, perm: &[usize]) -> Result<Tensor> {
        Ok(x.permute(perm)?)
    }

    fn concat(&mut self, parts: &[&Tensor], along: i64) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(Error::Internal("concat of nothing")) };
        // Inputs that callers give, such as empty caches, may be wider than the model's type.
        let alike = parts.iter().all(|x| x.dtype() == first.dtype());
        let cast = |x: &&Tensor| if alike { x.contiguous() } else { x.to_dtype(self.model)?.contiguous() };
        let parts_: Vec<Tensor> = parts.iter().map(cast).collect::<candle_core::Result<_>>()?;
        Ok(Tensor::cat(&parts_, axis(first.rank(), along))?)
    }

    fn slice(&mut self, x: &Tensor, along: i64, start: usize, end: usize) -> Result<Tensor> {
        Ok(x.narrow(axis(x.rank(), along), start, end - start)?)
    }

    fn embedding(&mut self, weight: &Weight, indices: &Tensor) -> Result<Tensor> {
        let (indices_of, width) = (indices.flatten_all()?, weight.shape()[1]);
        let rows = match self.forgets {
            false => self.load(weight)?.index_select(&indices_of, 0)?.to_dtype(self.model)?,
            true => {
                let mut values = Vec::new();
                for row in indices_of.to_vec1::<i64>()? {
                    let row = usize::try_from(row).ok().filter(|row| *row < weight.shape()[0]);
                    let row = row.ok_or(Error::Internal("an index beyond an embedding"))?;
                    values.extend(self.read(&weight.rows(row..row + 1))?);
                }
                Tensor::from_vec(values, (indices_of.elem_count(), width), &self.device)?
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
        if let Some(margins) = self.margins.take() {
            // Of a token whose groups of heads choose for themselves, the smallest.
            let (batch, tokens, _) = gates.dims3()?;
            let margins = margins.reshape((batch, tokens, ()))?.min(D::Minus1)?;
            self.keep(format!("{GAPS}{}", self.path()), &margins);
        }
        let choice = self.choice.take();
        let path = self.path();
        if let (Some(routing), Some(choice)) = (&mut self.routing, choice) {
            routing.push(Routing { path, choice, gates: gates.clone() });
        }
        Ok(gates)
    }

    fn tap(&mut self, kind: Tap, value: &Tensor) -> Result<()> {
        self.keep(format!("{}.{}", kind.prefix(), self.path()), value);
        self.watch(value)
    }
}
