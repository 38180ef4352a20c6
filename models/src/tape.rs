//! A forward pass written down once and played to any interpreter: how a family that this crate does not know becomes a
//! [`crate::Model`].

use crate::checkpoint::Weight;
use crate::error::{Error, Result};
use crate::families::{Family, Inputs};
use crate::operators::{self, Argument, ModelOperator};
use crate::ops::{Binary, Conv, Linear, Ops, Reduce, Tap, Type, Unary};
use moh_operators::{Attributes, List};

/// The operations of a forward in order. A value is the index of the input or operation that gives it.
pub(crate) struct Tape {
    inputs: Vec<String>,
    steps: Vec<Step>,
    outputs: Vec<Handle>,
}

type Handle = usize;

/// A value of a [`Recorder`]: its place among the values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recorded(Handle);

enum Step {
    Weight(Weight, Type),
    Computed(Weight, Type),
    Constant(Type, Vec<usize>, Vec<f32>),
    Filled(Type, Handle, usize, f32),
    Cast(Handle, Type),
    Unary(Unary, Handle),
    Silu(Handle),
    Binary(Binary, Handle, Handle),
    Select([Handle; 3]),
    Reduce(Reduce, Handle, Vec<i64>),
    Softmax(Handle),
    CumulativeSum(Handle, i64),
    Matmul(Handle, Handle),
    Linear(Handle, Linear),
    Conv2d(Handle, Weight, Option<Weight>, Conv),
    LayerNorm(Handle, usize, Option<(Weight, Weight)>, f32),
    RmsNorm(Handle, Weight, f32),
    Operator(Attributes, Vec<Option<Operand>>),
    Reshape(Handle, Vec<i64>),
    Transpose(Handle, Vec<usize>),
    Concat(Vec<Handle>, i64),
    Slice(Handle, i64, usize, usize),
    Embedding(Weight, Handle),
    Gates(Handle, usize),
    // These give no value.
    Enter(String),
    Leave,
    Tap(Tap, Handle),
}

enum Operand {
    Value(Handle),
    Weight(Weight),
}

impl Tape {
    /// Writes down the family's forward.
    ///
    /// # Errors
    /// What the family fails with.
    pub(crate) fn of(family: &impl Family) -> Result<Tape> {
        let inputs: Vec<String> = family.inputs().into_iter().map(|port| port.name).collect();
        let mut recorder = Recorder { values: inputs.len(), ..Recorder::default() };
        let handles = inputs.iter().cloned().zip((0..).map(Recorded));
        let outputs = family.forward(&mut recorder, &Inputs::new(handles))?;
        let outputs = outputs.into_iter().map(|Recorded(handle)| handle).collect();
        Ok(Tape { inputs, steps: recorder.steps, outputs })
    }

    /// Does the same in `ops`.
    ///
    /// # Errors
    /// What the interpreter fails with, or a missing input.
    pub(crate) fn play<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let mut values = self.inputs.iter().map(|name| inputs.get(name)).collect::<Result<Vec<_>>>()?;
        for step in &self.steps {
            let value = step.play(ops, &values)?;
            values.extend(value);
        }
        self.outputs.iter().map(|handle| of(&values, *handle).cloned()).collect()
    }
}

fn of<V>(values: &[V], handle: Handle) -> Result<&V> {
    values.get(handle).ok_or(Error::Internal("a value of another forward"))
}

impl Step {
    fn play<O: Ops>(&self, ops: &mut O, values: &[O::Value]) -> Result<Option<O::Value>> {
        let value = |handle: &Handle| of(values, *handle);
        Ok(Some(match self {
            Step::Weight(weight, ty) => ops.weight(weight, *ty)?,
            Step::Computed(weight, ty) => ops.computed(weight, *ty)?,
            Step::Constant(ty, shape, values) => ops.constant(*ty, shape, values)?,
            Step::Filled(ty, like, width, with) => ops.filled(*ty, value(like)?, *width, *with)?,
            Step::Cast(x, ty) => ops.cast(value(x)?, *ty)?,
            Step::Unary(op, x) => ops.unary(*op, value(x)?)?,
            Step::Silu(x) => ops.silu(value(x)?)?,
            Step::Binary(op, a, b) => ops.binary(*op, value(a)?, value(b)?)?,
            Step::Select([condition, a, b]) => ops.select(value(condition)?, value(a)?, value(b)?)?,
            Step::Reduce(op, x, axes) => ops.reduce(*op, value(x)?, axes)?,
            Step::Softmax(x) => ops.softmax(value(x)?)?,
            Step::CumulativeSum(x, axis) => ops.cumulative_sum(value(x)?, *axis)?,
            Step::Matmul(a, b) => ops.matmul(value(a)?, value(b)?)?,
            Step::Linear(x, linear) => ops.linear(value(x)?, linear)?,
            Step::Conv2d(x, weight, bias, conv) => ops.conv2d(value(x)?, weight, bias.as_ref(), *conv)?,
            Step::LayerNorm(x, width, affine, eps) => {
                let affine = affine.as_ref().map(|(weight, bias)| (weight, bias));
                ops.layer_norm(value(x)?, *width, affine, *eps)?
            }
            Step::RmsNorm(x, weight, eps) => ops.rms_norm(value(x)?, weight, *eps)?,
            Step::Operator(attributes, operands) => {
                let mut arguments: Vec<Option<Argument<'_, O::Value>>> = Vec::with_capacity(operands.len());
                for operand in operands {
                    arguments.push(match operand {
                        Some(Operand::Value(handle)) => Some(Argument::Value(of(values, *handle)?)),
                        Some(Operand::Weight(weight)) => Some(Argument::Weight(weight)),
                        None => None,
                    });
                }
                operators::play(ops, attributes, &arguments)?
            }
            Step::Reshape(x, shape) => ops.reshape(value(x)?, shape)?,
            Step::Transpose(x, perm) => ops.transpose(value(x)?, perm)?,
            Step::Concat(parts, axis) => {
                let parts = parts.iter().map(value).collect::<Result<Vec<_>>>()?;
                ops.concat(&parts, *axis)?
            }
            Step::Slice(x, axis, start, end) => ops.slice(value(x)?, *axis, *start, *end)?,
            Step::Embedding(weight, indices) => ops.embedding(weight, value(indices)?)?,
            Step::Gates(gates, active) => ops.gates(value(gates)?.clone(), *active)?,
            Step::Enter(name) => {
                ops.enter(name);
                return Ok(None);
            }
            Step::Leave => {
                ops.leave();
                return Ok(None);
            }
            Step::Tap(kind, x) => {
                ops.tap(*kind, value(x)?)?;
                return Ok(None);
            }
        }))
    }
}

/// Writes operations down.
#[derive(Default)]
struct Recorder {
    steps: Vec<Step>,
    /// How many there are.
    values: usize,
    path: Vec<String>,
}

impl Recorder {
    fn add(&mut self, step: Step) -> Result<Recorded> {
        self.steps.push(step);
        self.values += 1;
        Ok(Recorded(self.values - 1))
    }
}

impl Ops for Recorder {
    type Value = Recorded;

    fn weight(&mut self, weight: &Weight, ty: Type) -> Result<Recorded> {
        self.add(Step::Weight(weight.clone(), ty))
    }

    fn constant(&mut self, ty: Type, shape: &[usize], values: &[f32]) -> Result<Recorded> {
        self.add(Step::Constant(ty, shape.to_vec(), values.to_vec()))
    }

    fn computed(&mut self, weight: &Weight, ty: Type) -> Result<Recorded> {
        self.add(Step::Computed(weight.clone(), ty))
    }

    fn filled(&mut self, ty: Type, like: &Recorded, width: usize, value: f32) -> Result<Recorded> {
        self.add(Step::Filled(ty, like.0, width, value))
    }

    fn cast(&mut self, x: &Recorded, ty: Type) -> Result<Recorded> {
        self.add(Step::Cast(x.0, ty))
    }

    fn unary(&mut self, op: Unary, x: &Recorded) -> Result<Recorded> {
        self.add(Step::Unary(op, x.0))
    }

    fn silu(&mut self, x: &Recorded) -> Result<Recorded> {
        self.add(Step::Silu(x.0))
    }

    fn binary(&mut self, op: Binary, a: &Recorded, b: &Recorded) -> Result<Recorded> {
        self.add(Step::Binary(op, a.0, b.0))
    }

    fn select(&mut self, condition: &Recorded, a: &Recorded, b: &Recorded) -> Result<Recorded> {
        self.add(Step::Select([condition.0, a.0, b.0]))
    }

    fn reduce(&mut self, op: Reduce, x: &Recorded, axes: &[i64]) -> Result<Recorded> {
        self.add(Step::Reduce(op, x.0, axes.to_vec()))
    }

    fn softmax(&mut self, x: &Recorded) -> Result<Recorded> {
        self.add(Step::Softmax(x.0))
    }

    fn cumulative_sum(&mut self, x: &Recorded, axis: i64) -> Result<Recorded> {
        self.add(Step::CumulativeSum(x.0, axis))
    }

    fn matmul(&mut self, a: &Recorded, b: &Recorded) -> Result<Recorded> {
        self.add(Step::Matmul(a.0, b.0))
    }

    fn linear(&mut self, x: &Recorded, linear: &Linear) -> Result<Recorded> {
        self.add(Step::Linear(x.0, linear.clone()))
    }

    fn conv2d(&mut self, x: &Recorded, weight: &Weight, bias: Option<&Weight>, conv: Conv) -> Result<Recorded> {
        self.add(Step::Conv2d(x.0, weight.clone(), bias.cloned(), conv))
    }

    fn layer_norm(
        &mut self,
        x: &Recorded,
        width: usize,
        affine: Option<(&Weight, &Weight)>,
        eps: f32,
    ) -> Result<Recorded> {
        let affine = affine.map(|(weight, bias)| (weight.clone(), bias.clone()));
        self.add(Step::LayerNorm(x.0, width, affine, eps))
    }

    fn rms_norm(&mut self, x: &Recorded, weight: &Weight, eps: f32) -> Result<Recorded> {
        self.add(Step::RmsNorm(x.0, weight.clone(), eps))
    }

    fn operator<O: ModelOperator>(
        &mut self,
        attributes: O::Attributes,
        inputs: &O::Inputs<List<'_, Argument<'_, Recorded>>>,
    ) -> Result<Recorded> {
        let operand = |argument: Argument<'_, Recorded>| match argument {
            Argument::Value(value) => Operand::Value(value.0),
            Argument::Weight(weight) => Operand::Weight(weight.clone()),
        };
        let operands = O::list(inputs).into_iter().map(|argument| argument.map(operand)).collect();
        self.add(Step::Operator(Attributes::new::<O>(attributes)?, operands))
    }

    fn reshape(&mut self, x: &Recorded, shape: &[i64]) -> Result<Recorded> {
        self.add(Step::Reshape(x.0, shape.to_vec()))
    }

    fn transpose(&mut self, x: &Recorded, perm: &[usize]) -> Result<Recorded> {
        self.add(Step::Transpose(x.0, perm.to_vec()))
    }

    fn concat(&mut self, parts: &[&Recorded], axis: i64) -> Result<Recorded> {
        self.add(Step::Concat(parts.iter().map(|part| part.0).collect(), axis))
    }

    fn slice(&mut self, x: &Recorded, axis: i64, start: usize, end: usize) -> Result<Recorded> {
        self.add(Step::Slice(x.0, axis, start, end))
    }

    fn embedding(&mut self, weight: &Weight, indices: &Recorded) -> Result<Recorded> {
        self.add(Step::Embedding(weight.clone(), indices.0))
    }

    fn enter(&mut self, name: &str) {
        self.path.push(name.to_owned());
        self.steps.push(Step::Enter(name.to_owned()));
    }

    fn leave(&mut self) {
        self.path.pop();
        self.steps.push(Step::Leave);
    }

    fn path(&self) -> String {
        self.path.join(".")
    }

    fn gates(&mut self, gates: Recorded, active: usize) -> Result<Recorded> {
        self.add(Step::Gates(gates.0, active))
    }

    fn tap(&mut self, kind: Tap, value: &Recorded) -> Result<()> {
        self.steps.push(Step::Tap(kind, value.0));
        Ok(())
    }
}
