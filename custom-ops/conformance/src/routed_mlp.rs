//! Test cases of RoutedMLP and their data.

use crate::{Call, Random};
use moh_operators::routed_mlp::{self, Activation};
use moh_operators::{Attributes, DType, RoutedMlp};

/// Which experts are on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    /// None: gates are 0 and -0.
    Off,
    /// All: positive and negative gates.
    On,
    /// Each (token, expert) pair with this probability.
    Random(f64),
    /// The first `n` experts only.
    First(usize),
    /// Exactly `k` experts for each token.
    TopK(usize),
}

/// Sizes and options of a RoutedMLP call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Batch size.
    pub batch: usize,
    /// Tokens per sequence.
    pub q_len: usize,
    /// Experts.
    pub experts: usize,
    /// Width of x.
    pub width: usize,
    /// Width of the hidden layer: rows of the second matrix.
    pub hidden: usize,
    /// Width of the output.
    pub out_width: usize,
    /// The activation function between the matrices.
    pub activation: Activation,
    /// Whether both biases are present.
    pub bias: bool,
    /// The element type T.
    pub dtype: DType,
    /// Which experts are on.
    pub gates: Gates,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A small case.
pub const CASE: Case = Case {
    batch: 1,
    q_len: 1,
    experts: 3,
    width: 16,
    hidden: 16,
    out_width: 16,
    activation: Activation::Gelu,
    bias: true,
    dtype: DType::F32,
    gates: Gates::Random(0.6),
    seed: 1,
};

impl Case {
    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.batch * self.q_len
    }

    /// Random gates.
    pub fn draw_gates(&self) -> Vec<f32> {
        let mut random = Random(self.seed ^ 0x6a7e);
        let mut gates = Vec::new();
        for _ in 0..self.tokens() {
            let mut order: Vec<(u64, usize)> = (0..self.experts).map(|expert| (random.bits(), expert)).collect();
            order.sort_unstable();
            for expert in 0..self.experts {
                let on = match self.gates {
                    Gates::Off => false,
                    Gates::On => true,
                    Gates::Random(p) => random.unit() < p,
                    Gates::First(n) => expert < n,
                    Gates::TopK(n) => order.iter().take(n).any(|&(_, chosen)| chosen == expert),
                };
                let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
                gates.push(sign * if on { 0.1 + random.unit() as f32 } else { 0.0 });
            }
        }
        gates
    }

    /// The call with random inputs, scaled for activations and outputs near 1, and NaN in everything that no selected
    /// expert reads.
    pub fn call(&self) -> Call {
        let mut random = Random(self.seed);
        let gates = self.draw_gates();
        let columns = self.hidden * self.activation.columns();
        let used = |expert: usize| (0..self.tokens()).any(|token| gates[token * self.experts + expert] != 0.0);
        let mut per_expert = |n: usize, scale: f32| -> Vec<f32> {
            let mut numbers = Vec::new();
            for expert in 0..self.experts {
                let used = used(expert);
                numbers.extend((0..n).map(|_| if used { random.signed() * scale } else { f32::NAN }));
            }
            numbers
        };
        let fc1 = per_expert(self.width * columns, 3.0 / (self.width as f32).sqrt());
        let fc2 = per_expert(self.hidden * self.out_width, 2.0 / (self.hidden as f32).sqrt());
        let (fc1_bias, fc2_bias) = (per_expert(columns, 1.0), per_expert(self.out_width, 1.0));
        let mut x = Vec::new();
        for gates in gates.chunks(self.experts) {
            let any = gates.iter().any(|&gate| gate != 0.0);
            x.extend((0..self.width).map(|_| if any { random.signed() } else { f32::NAN }));
        }
        let mut call = Call::new(self.attributes(), self.dtype);
        call.input(&[self.batch, self.q_len, self.width], &x);
        call.input(&[self.experts, self.width, columns], &fc1);
        call.input(&[self.experts, self.hidden, self.out_width], &fc2);
        call.gates(&[self.batch, self.q_len, self.experts], &gates);
        if self.bias {
            call.input(&[self.experts, columns], &fc1_bias);
            call.input(&[self.experts, self.out_width], &fc2_bias);
        }
        call
    }

    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        let Case { experts: num_experts, activation, .. } = *self;
        Attributes::new::<RoutedMlp>(routed_mlp::Attributes { num_experts, activation }).unwrap()
    }
}
