//! Test cases of the operators with quantised weights, made from those of the operators that they quantise.

use crate::linear::Then;
use crate::{Buffer, Call, Random, head_linear, routed_mlp};
use moh_operators::{
    Attributes, DType, LinearActivationNBits, LinearNBits, RoutedCombineNBits, RoutedMlpNBits, RoutedProjectionNBits,
    linear_activation_nbits, linear_nbits, routed_mlp_nbits, routed_projection_nbits,
};

/// How weights are quantised, and activations may be.
#[derive(Debug, Clone, Copy)]
pub struct Quantisation {
    /// Bits of a weight.
    pub bits: usize,
    /// Weights of the inner dimension that share a scale.
    pub block: usize,
    /// Whether there are zero points; then there is a bias, too.
    pub zero_points: bool,
    /// Whether activations may be rounded to 8-bit integers.
    pub int8: bool,
}

impl Quantisation {
    /// Random matrices of `rows` rows: bytes, scales and zero points. A value is at most about `scale`; scales of blocks
    /// that are not used are what `unused` returns.
    fn matrix(
        &self,
        random: &mut Random,
        rows: usize,
        k: usize,
        scale: f32,
        unused: impl Fn(usize, usize) -> Option<f32>,
    ) -> Matrix {
        let blocks = k / self.block;
        let step = scale / (1u32 << (self.bits - 1)) as f32;
        let mut bytes = |count: usize| -> Vec<u8> { (0..count).map(|_| random.bits() as u8).collect() };
        let weight = bytes(rows * k * self.bits / 8);
        let zero_points = bytes(rows * (blocks * self.bits).div_ceil(8));
        let scales = (0..rows * blocks)
            .map(|i| unused(i / blocks, i % blocks).unwrap_or_else(|| random.signed() * step))
            .collect();
        Matrix { weight, scales, zero_points }
    }

    fn attributes(&self) -> (usize, usize, i64) {
        (self.bits, self.block, if self.int8 { 4 } else { 0 })
    }
}

struct Matrix {
    weight: Vec<u8>,
    scales: Vec<f32>,
    zero_points: Vec<u8>,
}

/// A case of RoutedProjectionNBits or RoutedCombineNBits.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The case of the operator that is quantised, of one matrix for all heads.
    pub linear: head_linear::Case,
    /// How.
    pub quantisation: Quantisation,
    /// What is done with a combination's sums: no activation function.
    pub then: Then,
}

impl Case {
    /// The same with activations in floating point: the call that judges all others.
    pub fn exact(self) -> Case {
        Case { quantisation: Quantisation { int8: false, ..self.quantisation }, ..self }
    }

    /// Length of the inner dimension.
    pub fn inner(&self) -> usize {
        let linear = &self.linear;
        if linear.is_projection() { linear.width } else { linear.heads * linear.block }
    }

    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        let (bits, block_size, accuracy_level) = self.quantisation.attributes();
        let attributes =
            routed_projection_nbits::Attributes { num_heads: self.linear.heads, bits, block_size, accuracy_level };
        match self.linear.is_projection() {
            true => Attributes::new::<RoutedProjectionNBits>(attributes).unwrap(),
            false => Attributes::new::<RoutedCombineNBits>(attributes).unwrap(),
        }
    }

    /// The call with random inputs, scaled for outputs near 1, and NaN in what no selected head reads: x, and a projection's scales.
    ///
    /// x consists of multiples of 1/128, one of which is 127/128 in each part of a block that belongs to a head: rounded to
    /// 8-bit integers it does not change, so the outputs are the same.
    pub fn call(&self) -> Call {
        let linear = head_linear::Case {
            bias: self.linear.bias || self.quantisation.zero_points || self.then.has_operands(),
            per_head: false,
            ..self.linear
        };
        let dense = linear.call();
        let (k, block) = (self.inner(), self.quantisation.block);
        let (x_shape, x) = &dense.inputs[0];
        let starts = |i: usize| i.is_multiple_of(block) || (!linear.is_projection() && i.is_multiple_of(linear.block));
        let on_grid = |(i, x): (usize, f64)| match starts(i % k) {
            _ if !x.is_finite() => x as f32,
            true => (127.0f64 / 128.0).copysign(x) as f32,
            false => ((x * 127.0).round() / 128.0) as f32,
        };
        let numbers: Vec<f32> = values(x).into_iter().enumerate().map(on_grid).collect();
        let (weight_shape, weight) = &dense.inputs[1];
        let (rows, weight) = (weight_shape[0], values(weight));
        // Few rows are multiplied with whole vectors of weights, so a finite scale beside the used ones may meet zeros of x.
        let poison = if linear.is_projection() { f32::NAN } else { 1e4 };
        let unused =
            |row: usize, b: usize| weight[row * k + b * block..][..block].iter().all(|w| w.is_nan()).then_some(poison);
        let mut random = Random(self.linear.seed ^ 0x9b17);
        let scale = 2.0 * (3.0 / k as f32).sqrt();
        let matrix = self.quantisation.matrix(&mut random, rows, k, scale, unused);

        let mut call = Call { terms: k, ..Call::new(self.attributes(), linear.dtype) };
        let blocks = k / block;
        call.input(x_shape, &numbers);
        call.bytes(&[rows, blocks, block * self.quantisation.bits / 8], &matrix.weight);
        call.input(&[rows, blocks], &matrix.scales);
        call.inputs.extend(dense.inputs[2..].iter().cloned());
        if !linear.is_projection() {
            let leading = &x_shape[..2];
            after(&mut call, self.then, self.quantisation, (leading, linear.width), &mut random);
        }
        if self.quantisation.zero_points {
            call.bytes(&[rows, matrix.zero_points.len() / rows], &matrix.zero_points);
        }
        call
    }
}

/// Adds the gate and the residual to a call, or numbers that change nothing before zero points.
fn after(call: &mut Call, then: Then, how: Quantisation, (leading, columns): (&[usize], usize), random: &mut Random) {
    then.operands(call, leading, columns, random);
    if how.zero_points && !then.has_operands() {
        call.input(&[1], &[1.0]);
    }
    if how.zero_points && !then.has_residual() {
        call.input(&[1], &[0.0]);
    }
}

/// A case of LinearNBits or LinearActivationNBits.
#[derive(Debug, Clone, Copy)]
pub struct LinearCase {
    /// Rows of x.
    pub rows: usize,
    /// Length of a row.
    pub width: usize,
    /// Length of an output's row.
    pub out_width: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// What is done with the sums.
    pub then: Then,
    /// The element type T.
    pub dtype: DType,
    /// Seed of the random numbers.
    pub seed: u64,
    /// How the weight is quantised.
    pub quantisation: Quantisation,
}

impl LinearCase {
    /// The call with random inputs, scaled for outputs near 1.
    ///
    /// x consists of multiples of 1/128, the first of each block +-127/128: rounded to 8-bit integers it does not change.
    pub fn call(&self) -> Call {
        let LinearCase { rows, width, out_width, quantisation, .. } = *self;
        let (bits, block_size, accuracy_level) = quantisation.attributes();
        let attributes = match self.then {
            Then::Activation(activation) => {
                Attributes::new::<LinearActivationNBits>(linear_activation_nbits::Attributes {
                    activation,
                    bits,
                    block_size,
                    accuracy_level,
                })
            }
            _ => Attributes::new::<LinearNBits>(linear_nbits::Attributes { bits, block_size, accuracy_level }),
        };
        let mut random = Random(self.seed);
        let mut numbers: Vec<f32> = (0..rows * width).map(|_| (random.signed() * 127.0).round() / 128.0).collect();
        numbers.iter_mut().step_by(block_size).for_each(|x| *x = (127.0f32 / 128.0).copysign(*x));
        let matrix = quantisation.matrix(&mut random, out_width, width, 2.0 * (3.0 / width as f32).sqrt(), |_, _| None);
        let blocks = width / block_size;
        let mut call = Call::new(attributes.unwrap(), self.dtype);
        let leading = self.then.leading(rows);
        call.input(&[&leading[..], &[width]].concat(), &numbers);
        call.bytes(&[out_width, blocks, block_size * bits / 8], &matrix.weight);
        call.input(&[out_width, blocks], &matrix.scales);
        if self.bias || quantisation.zero_points || self.then.has_operands() {
            call.input(&[out_width], &(0..out_width).map(|_| random.signed()).collect::<Vec<_>>());
        }
        if !matches!(self.then, Then::Activation(_)) {
            after(&mut call, self.then, quantisation, (&leading, out_width), &mut random);
        }
        if quantisation.zero_points {
            call.bytes(&[out_width, matrix.zero_points.len() / out_width], &matrix.zero_points);
        }
        call
    }
}

/// A case of RoutedMLPNBits.
#[derive(Debug, Clone, Copy)]
pub struct MlpCase {
    /// The case of RoutedMLP.
    pub mlp: routed_mlp::Case,
    /// How it is quantised.
    pub quantisation: Quantisation,
}

impl MlpCase {
    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        let (bits, block_size, accuracy_level) = self.quantisation.attributes();
        let routed_mlp::Case { experts: num_experts, activation, .. } = self.mlp;
        let attributes = routed_mlp_nbits::Attributes { num_experts, activation, bits, block_size, accuracy_level };
        Attributes::new::<RoutedMlpNBits>(attributes).unwrap()
    }

    /// The call with random inputs, and NaN in x and in scales that no selected expert reads.
    pub fn call(&self) -> Call {
        let Quantisation { bits, block, zero_points, .. } = self.quantisation;
        let mlp = routed_mlp::Case { bias: self.mlp.bias || zero_points, ..self.mlp };
        let routed_mlp::Case { experts, width, hidden, out_width, .. } = mlp;
        let (dense, gates) = (mlp.call(), mlp.draw_gates());
        let used = |expert: usize| gates.iter().skip(expert).step_by(experts).any(|&gate| gate != 0.0);
        let mut random = Random(mlp.seed ^ 0x9b17);
        let columns = hidden * mlp.activation.columns();
        let mut call = Call::new(self.attributes(), mlp.dtype);
        call.inputs.push(dense.inputs[0].clone());
        let mut packed = Vec::new();
        for (rows, k, scale) in [(columns, width, 3.0), (out_width, hidden, 2.0)] {
            let scale = 2.0 * scale / (k as f32).sqrt();
            let unused = |row: usize, _| (!used(row / rows)).then_some(f32::NAN);
            let matrix = self.quantisation.matrix(&mut random, experts * rows, k, scale, unused);
            call.bytes(&[experts, rows, k / block, block * bits / 8], &matrix.weight);
            call.input(&[experts, rows, k / block], &matrix.scales);
            packed.push(([experts, rows, matrix.zero_points.len() / (experts * rows)], matrix.zero_points));
        }
        call.inputs.extend(dense.inputs[3..].iter().cloned());
        if zero_points {
            packed.iter().for_each(|(shape, zero_points)| call.bytes(shape, zero_points));
        }
        call
    }
}

fn values(buffer: &Buffer) -> Vec<f64> {
    let data = buffer.data();
    (0..data.len()).map(|i| data.at(i)).collect()
}
