//! Rotary position embeddings, and the ways to stretch them beyond the length of training (formulas of Hugging Face).

use crate::checkpoint::Config;
use crate::ops::{Binary, Ops, Reduce, Result, Type, Unary};

/// Rotary frequencies of a head.
#[derive(Debug, Clone)]
pub(super) struct Rope {
    /// theta^(-2i / rotated), scaled where that does not depend on the positions.
    inverse_frequencies: Vec<f32>,
    /// Scaling that follows the longest position: (factor, length of training).
    dynamic: Option<(f64, usize)>,
    head_dim: usize,
}

/// cos and sin of the call's angles, (batch, sequence, 1, rotated), in the model's type.
pub(super) struct Rotation<V> {
    cos: V,
    sin: V,
    /// Channels of a head that are rotated, the first ones, and all of them.
    rotated: usize,
    head_dim: usize,
}

impl Rope {
    /// For heads of which the first channels are rotated, `(rotated, head_dim)`. Reads `rope_theta` and `rope_scaling`, or
    /// `rope_parameters`, which holds both from transformers 5 on.
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a kind or number that is not known.
    pub(super) fn configured(config: &Config, (rotated, head_dim): (usize, usize), context: usize) -> Result<Rope> {
        let parameters = config.value("rope_parameters");
        let (key, scaling) = match parameters {
            Some(_) => ("rope_parameters", parameters),
            None => ("rope_scaling", config.value("rope_scaling")),
        };
        let inner = |name: &str| config.inner_value(key, name);
        let theta = match parameters.and_then(|_| inner("rope_theta")) {
            Some(theta) => theta.as_f64().ok_or_else(|| config.invalid(key, "a number \"rope_theta\""))?,
            None => config.f64_or("rope_theta", 10_000.0)?,
        };
        if theta.is_nan() || theta <= 0.0 {
            let key = if parameters.is_some() { key } else { "rope_theta" };
            return Err(config.rejects(key, "a rope_theta above 0", theta.to_string()));
        }
        let plain: Vec<f64> = (0..rotated / 2).map(|i| theta.powf(-2.0 * i as f64 / rotated as f64)).collect();
        let rounded = |frequencies: Vec<f64>, dynamic| Rope {
            inverse_frequencies: frequencies.into_iter().map(|f| f as f32).collect(),
            dynamic,
            head_dim,
        };
        if scaling.is_none() {
            return Ok(rounded(plain, None));
        }
        let (kind, old) = (inner("rope_type"), inner("type"));
        let kind = kind.or(old).and_then(serde_json::Value::as_str);
        let number = |name: &str| {
            let value = inner(name).and_then(serde_json::Value::as_f64).filter(|v| *v > 0.0 && v.is_finite());
            value.ok_or_else(|| config.invalid(key, format!("a positive {name:?}")))
        };
        match kind {
            // Parameters without a type say theta alone.
            None if parameters.is_some() => Ok(rounded(plain, None)),
            Some("default") => Ok(rounded(plain, None)),
            Some("linear") => {
                let factor = number("factor")?;
                Ok(rounded(plain.into_iter().map(|f| f / factor).collect(), None))
            }
            Some("dynamic") => Ok(rounded(plain, Some((number("factor")?, context)))),
            Some("llama3") => {
                let (factor, low, high) = (number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?);
                let length = number("original_max_position_embeddings")?;
                if high <= low {
                    return Err(config.invalid(key, "a high_freq_factor above low_freq_factor"));
                }
                let scaled = |f: f64| {
                    let periods = length * f / std::f64::consts::TAU;
                    let smooth = ((periods - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                };
                Ok(rounded(plain.into_iter().map(scaled).collect(), None))
            }
            _ => Err(config.invalid(key, "a rope_type of default, linear, dynamic or llama3")),
        }
    }

    /// The angles' cosines and sines for int64 positions (batch, sequence).
    pub(super) fn rotation<O: Ops>(&self, ops: &mut O, position_ids: &O::Value) -> Result<Rotation<O::Value>> {
        let positions = ops.cast(position_ids, Type::F32)?;
        let positions = ops.reshape(&positions, &[0, 0, 1, 1])?;
        let half = self.inverse_frequencies.len();
        let mut frequencies = ops.constant(Type::F32, &[half], &self.inverse_frequencies)?;
        if let Some((factor, length)) = self.dynamic {
            let stretch = stretched(ops, &positions, (factor, length), half)?;
            frequencies = ops.mul(&stretch, &frequencies)?;
        }
        let angles = ops.mul(&positions, &frequencies)?;
        let angles = ops.concat(&[&angles, &angles], -1)?;
        let (cos, sin) = (ops.unary(Unary::Cos, &angles)?, ops.unary(Unary::Sin, &angles)?);
        let (cos, sin) = (ops.cast(&cos, Type::Model)?, ops.cast(&sin, Type::Model)?);
        Ok(Rotation { cos, sin, rotated: 2 * half, head_dim: self.head_dim })
    }
}

impl<V: Clone> Rotation<V> {
    /// x cos + (-second half, first half) sin of the channels that are rotated, and the others as they are, for x (batch, sequence,
    /// heads, head_dim).
    pub(super) fn rotate<O: Ops<Value = V>>(&self, ops: &mut O, x: &V) -> Result<V> {
        let (half, rotated) = (self.rotated / 2, self.rotated);
        let (first, second) = (ops.slice(x, -1, 0, half)?, ops.slice(x, -1, half, rotated)?);
        let second = ops.unary(Unary::Neg, &second)?;
        let turned = ops.concat(&[&second, &first], -1)?;
        if rotated == self.head_dim {
            return self.mix(ops, x, &turned);
        }
        let (front, rest) = (ops.slice(x, -1, 0, rotated)?, ops.slice(x, -1, rotated, self.head_dim)?);
        let front = self.mix(ops, &front, &turned)?;
        ops.concat(&[&front, &rest], -1)
    }

    fn mix<O: Ops<Value = V>>(&self, ops: &mut O, x: &V, turned: &V) -> Result<V> {
        let (x, turned) = (ops.mul(x, &self.cos)?, ops.mul(turned, &self.sin)?);
        ops.add(&x, &turned)
    }
}

/// Factors of the frequencies by "dynamic NTK": theta is multiplied by s^(d / (d - 2)), s = factor L / M - (factor - 1), where
/// L is the longest sequence of the call (its last position + 1, at least M) and M the length of training. Frequency i is
/// then s^(-2i / (d - 2)) times what it was.
fn stretched<O: Ops>(
    ops: &mut O,
    positions: &O::Value,
    (factor, length): (f64, usize),
    half: usize,
) -> Result<O::Value> {
    let last = ops.reduce(Reduce::Max, positions, &[0, 1, 2, 3])?;
    let trained = ops.scalar(Type::F32, length as f32 - 1.0)?;
    let last = ops.binary(Binary::Max, &last, &trained)?;
    let per_token = ops.scalar(Type::F32, (factor / length as f64) as f32)?;
    let s = ops.mul(&last, &per_token)?;
    let rest = ops.scalar(Type::F32, (factor / length as f64 - (factor - 1.0)) as f32)?;
    let s = ops.add(&s, &rest)?;
    let s = ops.unary(Unary::Log, &s)?;
    let exponents: Vec<f32> =
        (0..half).map(|i| if half > 1 { -(i as f32) / (half as f32 - 1.0) } else { 0.0 }).collect();
    let exponents = ops.constant(Type::F32, &[half], &exponents)?;
    let exponents = ops.mul(&s, &exponents)?;
    ops.unary(Unary::Exp, &exponents)
}
