//! The vocabulary that model families are written in.
//!
//! A family's `forward` is generic over [`Ops`]: [`crate::eager::Eager`] runs it in candle, the exporter records it as an ONNX
//! graph, [`crate::count::Count`] counts its multiply-accumulates. The words are ONNX's: `reshape` knows 0 and -1, binary
//! operations broadcast, axes count from 0 (or from the end when negative), and batch and sequence stay symbolic.

use crate::checkpoint::Weight;
pub use crate::error::Result;
pub use crate::operators::{Argument, ModelOperator};
use moh_operators::List;

/// Element type of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// The model's floating-point type: float32 in candle, `--dtype` in an export.
    Model,
    /// float32 whatever the model's type: routers, rotary angles, timesteps.
    F32,
    /// int64: token ids, positions, masks, labels.
    I64,
    /// Result of a comparison.
    Bool,
}

/// Elementwise functions of one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Exp,
    Log,
    Sqrt,
    Cos,
    Sin,
    Sigmoid,
    Relu,
    /// x Phi(x), Phi the normal distribution function.
    Gelu,
    /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    GeluTanh,
}

/// Elementwise functions of two values, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Max,
    /// Gives [`Type::Bool`].
    Equal,
}

/// Reductions over axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Reduce {
    Sum,
    Mean,
    Max,
}

/// y = x W^T + b, with W (out, in) as nn.Linear stores it.
#[derive(Debug, Clone)]
pub struct Linear {
    /// (out, in).
    pub weight: Weight,
    /// (out).
    pub bias: Option<Weight>,
}

impl Linear {
    /// The layer that gives these outputs only.
    pub fn rows(&self, range: std::ops::Range<usize>) -> Linear {
        let bias = self.bias.as_ref().map(|bias| bias.rows(range.clone()));
        Linear { weight: self.weight.rows(range), bias }
    }
}

/// Strides and padding of a 2-D convolution, the same for rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv {
    /// Stride.
    pub stride: usize,
    /// Zeros added on every side.
    pub padding: usize,
    /// Groups of channels.
    pub groups: usize,
}

/// The operations that a family may use. `Value` is a handle: cloning it copies no data.
pub trait Ops {
    /// A tensor.
    type Value: Clone;

    /// A tensor of the checkpoint, as values of type `ty`.
    fn weight(&mut self, weight: &Weight, ty: Type) -> Result<Self::Value>;
    /// A constant computed from the configuration, of type `ty`; `values.len()` is the product of `shape`.
    fn constant(&mut self, ty: Type, shape: &[usize], values: &[f32]) -> Result<Self::Value>;
    /// A constant that was computed from tensors of the checkpoint. One that is trained follows them.
    fn computed(&mut self, weight: &Weight, ty: Type) -> Result<Self::Value> {
        let values = weight.to_f32()?;
        self.constant(ty, weight.shape(), &values)
    }
    /// (dims of `like` but the last, `width`) filled with `value`, of type `ty`.
    fn filled(&mut self, ty: Type, like: &Self::Value, width: usize, value: f32) -> Result<Self::Value>;

    /// `x` converted to `ty`.
    fn cast(&mut self, x: &Self::Value, ty: Type) -> Result<Self::Value>;
    /// An elementwise function.
    fn unary(&mut self, op: Unary, x: &Self::Value) -> Result<Self::Value>;
    /// An elementwise function of two values of one type.
    fn binary(&mut self, op: Binary, a: &Self::Value, b: &Self::Value) -> Result<Self::Value>;
    /// `a` where `condition`, else `b`.
    fn select(&mut self, condition: &Self::Value, a: &Self::Value, b: &Self::Value) -> Result<Self::Value>;
    /// A reduction over `axes`, which are kept with size 1.
    fn reduce(&mut self, op: Reduce, x: &Self::Value, axes: &[i64]) -> Result<Self::Value>;
    /// exp(x) / sum(exp(x)) over the last axis.
    fn softmax(&mut self, x: &Self::Value) -> Result<Self::Value>;

    /// Running sums along `axis`, each with its own element.
    fn cumulative_sum(&mut self, x: &Self::Value, axis: i64) -> Result<Self::Value>;

    /// Matrix products over the last two axes; leading axes broadcast.
    fn matmul(&mut self, a: &Self::Value, b: &Self::Value) -> Result<Self::Value>;
    /// x W^T + b over the last axis. The weight takes x's type.
    fn linear(&mut self, x: &Self::Value, linear: &Linear) -> Result<Self::Value>;
    /// Cross-correlation of (batch, in, rows, columns) with W (out, in / groups, rows, columns), plus a bias (out).
    fn conv2d(&mut self, x: &Self::Value, weight: &Weight, bias: Option<&Weight>, conv: Conv) -> Result<Self::Value>;
    /// (x - mean) / sqrt(variance + eps) over the last axis of size `width`, times and plus `affine`.
    fn layer_norm(
        &mut self,
        x: &Self::Value,
        width: usize,
        affine: Option<(&Weight, &Weight)>,
        eps: f32,
    ) -> Result<Self::Value>;
    /// w (x / sqrt(mean(x^2) + eps)) over the last axis; the quotient is computed in float32.
    fn rms_norm(&mut self, x: &Self::Value, weight: &Weight, eps: f32) -> Result<Self::Value>;
    /// An `ai.moh` operator, see `docs/operators.md`.
    fn operator<O: ModelOperator>(
        &mut self,
        attributes: O::Attributes,
        inputs: &O::Inputs<List<'_, Argument<'_, Self::Value>>>,
    ) -> Result<Self::Value>;

    /// ONNX Reshape: 0 copies the dimension, one -1 takes the rest.
    fn reshape(&mut self, x: &Self::Value, shape: &[i64]) -> Result<Self::Value>;
    /// Axis `i` of the result is axis `perm[i]` of `x`.
    fn transpose(&mut self, x: &Self::Value, perm: &[usize]) -> Result<Self::Value>;
    /// The parts one after the other along `axis`.
    fn concat(&mut self, parts: &[&Self::Value], axis: i64) -> Result<Self::Value>;
    /// Elements `start..end` of `axis`.
    fn slice(&mut self, x: &Self::Value, axis: i64, start: usize, end: usize) -> Result<Self::Value>;
    /// Rows of the weight (rows, width) at the int64 indices: (dims of `indices`, width).
    fn embedding(&mut self, weight: &Weight, indices: &Self::Value) -> Result<Self::Value>;

    /// Names what follows until `leave`: a module path component.
    fn enter(&mut self, name: &str);
    /// Ends the innermost `enter`.
    fn leave(&mut self);
    /// The current module path, as in the checkpoint's names: `blocks.0.attn`.
    fn path(&self) -> String;
    /// Every router's result passes through here: head gates (batch, q_len, num_heads) in float32, of which `active` are not
    /// zero for each token. An interpreter may show them, or put others in their place.
    fn gates(&mut self, gates: Self::Value, active: usize) -> Result<Self::Value>;
    /// Shows an intermediate value under the current module path.
    fn tap(&mut self, kind: Tap, value: &Self::Value) -> Result<()>;

    /// Every input of a model passes through here.
    fn input(&mut self, value: Self::Value) -> Result<Self::Value> {
        Ok(value)
    }
    /// Every output of a model passes through here.
    fn output(&mut self, value: Self::Value) -> Result<Self::Value> {
        Ok(value)
    }

    /// Runs `body` inside module `name`.
    fn scoped<R>(&mut self, name: &str, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R>
    where
        Self: Sized,
    {
        self.enter(name);
        let result = body(self);
        self.leave();
        result
    }
    /// a + b.
    fn add(&mut self, a: &Self::Value, b: &Self::Value) -> Result<Self::Value> {
        self.binary(Binary::Add, a, b)
    }
    /// a * b.
    fn mul(&mut self, a: &Self::Value, b: &Self::Value) -> Result<Self::Value> {
        self.binary(Binary::Mul, a, b)
    }
    /// A scalar of type `ty`.
    fn scalar(&mut self, ty: Type, value: f32) -> Result<Self::Value> {
        self.constant(ty, &[], &[value])
    }
    /// x * sigmoid(x).
    fn silu(&mut self, x: &Self::Value) -> Result<Self::Value> {
        let gate = self.unary(Unary::Sigmoid, x)?;
        self.mul(x, &gate)
    }
}

/// Which intermediate value of a module a tap shows; the names are those of the golden data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tap {
    /// What an attention module reads.
    AttentionInput,
    /// What an attention module gives back, after the output projection.
    AttentionOutput,
    /// What any other module gives back.
    Output,
}

impl Tap {
    /// The name's prefix.
    pub fn prefix(self) -> &'static str {
        match self {
            Tap::AttentionInput => "attn_in",
            Tap::AttentionOutput => "attn_out",
            Tap::Output => "tap",
        }
    }
}
