//! Test cases of RoutedProjection and RoutedCombine and their data.

use crate::{Call, Random};
use moh_operators::routed_projection::{self, WeightLayout};
use moh_operators::{Attributes, DType, Definition, Operator, RoutedCombine, RoutedProjection};

/// Which heads are on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    /// None: gates are 0 and -0.
    Off,
    /// All: positive and negative gates.
    On,
    /// Each (token, head) pair with this probability.
    Random(f64),
    /// The first `n` heads for all tokens, the others with this probability.
    Shared(usize, f64),
    /// The first `n` heads only.
    First(usize),
}

/// Sizes and options of a call of either operator.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// RoutedProjection or RoutedCombine.
    pub operator: &'static Operator,
    /// Batch size.
    pub batch: usize,
    /// Tokens per sequence.
    pub q_len: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head's block.
    pub block: usize,
    /// Width of a token.
    pub width: usize,
    /// Whether the weight is one matrix per head.
    pub per_head: bool,
    /// Whether there is a bias.
    pub bias: bool,
    /// The element type T.
    pub dtype: DType,
    /// Which heads are on.
    pub gates: Gates,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A small case of RoutedProjection.
pub const PROJECTION: Case = Case {
    operator: RoutedProjection::OPERATOR,
    batch: 1,
    q_len: 1,
    heads: 3,
    block: 16,
    width: 16,
    per_head: false,
    bias: false,
    dtype: DType::F32,
    gates: Gates::Random(0.6),
    seed: 1,
};

/// The same for RoutedCombine.
pub const COMBINE: Case = Case { operator: RoutedCombine::OPERATOR, ..PROJECTION };

impl Case {
    /// Whether the operator is RoutedProjection.
    pub fn is_projection(&self) -> bool {
        *self.operator == *RoutedProjection::OPERATOR
    }

    /// Tokens of all sequences.
    pub fn tokens(&self) -> usize {
        self.batch * self.q_len
    }

    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        let weight_layout = if self.per_head { WeightLayout::PerHead } else { WeightLayout::OutIn };
        let attributes = routed_projection::Attributes { num_heads: self.heads, weight_layout };
        match self.is_projection() {
            true => Attributes::new::<RoutedProjection>(attributes).unwrap(),
            false => Attributes::new::<RoutedCombine>(attributes).unwrap(),
        }
    }

    /// Random gates.
    pub fn draw_gates(&self) -> Vec<f32> {
        let mut random = Random(self.seed ^ 0x6a7e);
        let on = |head: usize, random: &mut Random| match self.gates {
            Gates::Off => false,
            Gates::On => true,
            Gates::Random(p) => random.unit() < p,
            Gates::Shared(n, p) => head < n || random.unit() < p,
            Gates::First(n) => head < n,
        };
        let gate = |i: usize| {
            let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
            sign * if on(i % self.heads, &mut random) { 0.1 + random.unit() as f32 } else { 0.0 }
        };
        (0..self.tokens() * self.heads).map(gate).collect()
    }

    /// The call with random inputs, scaled for outputs near 1, and NaN in everything that no selected head reads.
    pub fn call(&self) -> Call {
        let mut random = Random(self.seed);
        let gates = self.draw_gates();
        let (heads, block, width, tokens) = (self.heads, self.block, self.width, self.tokens());
        let on = |token: usize, head: usize| gates[token * heads + head] != 0.0;
        let used: Vec<bool> = (0..heads).map(|head| (0..tokens).any(|token| on(token, head))).collect();
        let depth = if self.is_projection() { width } else { heads * block };
        let scale = (3.0 / depth as f32).sqrt();

        let mut x = Vec::new();
        for token in 0..tokens {
            match self.is_projection() {
                true => {
                    let any = (0..heads).any(|head| on(token, head));
                    x.extend((0..width).map(|_| if any { random.signed() } else { f32::NAN }));
                }
                false => {
                    for head in 0..heads {
                        let off = if head % 2 == 0 { f32::NAN } else { f32::INFINITY };
                        x.extend((0..block).map(|_| if on(token, head) { random.signed() } else { off }));
                    }
                }
            }
        }
        let mut weight = vec![0.0; heads * block * width];
        for head in 0..heads {
            for i in 0..block {
                for j in 0..width {
                    let at = match (self.per_head, self.is_projection()) {
                        (false, true) => (head * block + i) * width + j,
                        (false, false) => (j * heads + head) * block + i,
                        (true, true) => (head * width + j) * block + i,
                        (true, false) => (head * block + i) * width + j,
                    };
                    weight[at] = if used[head] { random.signed() * scale } else { f32::NAN };
                }
            }
        }
        let mut call = Call::new(self.attributes(), self.dtype);
        let (wide, out) = if self.is_projection() { (width, heads * block) } else { (heads * block, width) };
        call.input(&[self.batch, self.q_len, wide], &x);
        match (self.per_head, self.is_projection()) {
            (false, _) => call.input(&[out, wide], &weight),
            (true, true) => call.input(&[heads, width, block], &weight),
            (true, false) => call.input(&[heads, block, width], &weight),
        }
        call.gates(&[self.batch, self.q_len, heads], &gates);
        if self.bias {
            let unused = |i: usize| self.is_projection() && !used[i / block];
            let bias: Vec<f32> = (0..out).map(|i| if unused(i) { f32::NAN } else { random.signed() }).collect();
            call.input(&[out], &bias);
        }
        call
    }
}

/// The case for both operators in both weight layouts.
pub fn each(case: Case) -> impl Iterator<Item = Case> {
    let operators = [RoutedProjection::OPERATOR, RoutedCombine::OPERATOR].into_iter();
    operators.flat_map(move |operator| [false, true].map(|per_head| Case { operator, per_head, ..case }))
}
