//! Test cases of RoutedAggregatedAttention and their data.

use crate::{Call, Random};
use moh_operators::{Attributes, DType, RoutedAggregatedAttention, aggregated_attention};

/// Which heads are on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    /// None: gates are 0 and -0.
    Off,
    /// All: positive and negative gates.
    On,
    /// Each (token, head) pair with this probability.
    Random(f64),
    /// All heads of the first `n` tokens.
    First(usize),
    /// All heads of this token.
    Only(usize),
}

/// Sizes and options of a RoutedAggregatedAttention call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Batch size.
    pub batch: usize,
    /// Rows and columns of the grid.
    pub grid: [usize; 2],
    /// Side of the window.
    pub window: usize,
    /// Pooled tokens.
    pub pooled: usize,
    /// Heads.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// The element type T.
    pub dtype: DType,
    /// Which heads are on.
    pub gates: Gates,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// A small case.
pub const PLAIN: Case = Case {
    batch: 1,
    grid: [7, 6],
    window: 3,
    pooled: 9,
    heads: 2,
    dim: 8,
    dtype: DType::F32,
    gates: Gates::Random(0.6),
    seed: 1,
};

/// Index of input query.
pub const QUERY: usize = 0;
/// Index of input key.
pub const KEY: usize = 1;
/// Index of input value.
pub const VALUE: usize = 2;
/// Index of input pooled_key.
pub const POOLED_KEY: usize = 3;
/// Index of input pooled_value.
pub const POOLED_VALUE: usize = 4;
/// Index of input head_gates.
pub const GATES: usize = 5;
/// Index of input query_scale.
pub const SCALE: usize = 7;

impl Case {
    /// Tokens of an image.
    pub fn tokens(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Number of elements of the output.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.batch * self.tokens() * self.heads * self.dim
    }

    /// The tokens of the window around `token` that are inside the grid.
    pub fn window(&self, token: usize) -> Vec<usize> {
        let ([height, width], reach) = (self.grid, self.window / 2);
        let (y, x) = (token / width, token % width);
        let near = |a: usize, b: usize| a.abs_diff(b) <= reach;
        (0..height * width).filter(|t| near(t / width, y) && near(t % width, x)).collect()
    }

    /// Random gates.
    pub fn draw_gates(&self) -> Vec<f32> {
        let mut random = Random(self.seed ^ 0x6a7e);
        let on = |token: usize, random: &mut Random| match self.gates {
            Gates::Off => false,
            Gates::On => true,
            Gates::Random(p) => random.unit() < p,
            Gates::First(n) => token < n,
            Gates::Only(n) => token == n,
        };
        let gate = |i: usize| {
            let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
            sign * if on(i / self.heads % self.tokens(), &mut random) { 0.1 + random.unit() as f32 } else { 0.0 }
        };
        (0..self.batch * self.tokens() * self.heads).map(gate).collect()
    }

    /// The shapes of the inputs.
    pub fn shapes(&self) -> Vec<Vec<usize>> {
        let (tokens, cells) = (self.tokens(), self.window * self.window);
        let rows = |len: usize| vec![self.batch, len, self.heads * self.dim];
        let (heads, dim) = (self.heads, self.dim);
        vec![
            rows(tokens),
            rows(tokens),
            rows(tokens),
            rows(self.pooled),
            rows(self.pooled),
            vec![self.batch, tokens, heads],
            vec![heads, dim],
            vec![tokens, heads],
            vec![heads, cells],
            vec![heads, tokens, self.pooled],
            vec![heads, dim, cells],
            vec![heads, cells],
        ]
    }

    /// Random inputs, with NaN in every query, key and value that no selected head reads.
    pub fn numbers(&self) -> Vec<Vec<f32>> {
        let mut random = Random(self.seed);
        let mut numbers: Vec<Vec<f32>> =
            self.shapes().iter().map(|shape| (0..shape.iter().product()).map(|_| random.signed()).collect()).collect();
        numbers[GATES] = self.draw_gates();
        for scale in &mut numbers[SCALE] {
            *scale = 3.0 + 3.0 * *scale;
        }
        // Small, as in trained models: they are added after the softmax.
        for learnable in [10, 11] {
            numbers[learnable].iter_mut().for_each(|x| *x *= 0.3);
        }
        let windows: Vec<Vec<usize>> = (0..self.tokens()).map(|token| self.window(token)).collect();
        for batch in 0..self.batch {
            for head in 0..self.heads {
                let block = |len: usize, token: usize| (batch * len + token) * self.heads + head;
                let used: Vec<bool> =
                    (0..self.tokens()).map(|token| numbers[GATES][block(self.tokens(), token)] != 0.0).collect();
                let mut poison = |input: usize, len: usize, token: usize, value: f32| {
                    let start = block(len, token) * self.dim;
                    numbers[input][start..start + self.dim].fill(value);
                };
                for token in 0..self.tokens() {
                    if !used[token] {
                        poison(QUERY, self.tokens(), token, f32::NAN);
                    }
                    if !windows[token].iter().any(|&token| used[token]) {
                        poison(KEY, self.tokens(), token, f32::INFINITY);
                        poison(VALUE, self.tokens(), token, f32::NAN);
                    }
                }
                if !used.contains(&true) {
                    for token in 0..self.pooled {
                        poison(POOLED_KEY, self.pooled, token, f32::NAN);
                        poison(POOLED_VALUE, self.pooled, token, f32::NEG_INFINITY);
                    }
                }
            }
        }
        numbers
    }

    /// The call with these inputs.
    pub fn call_with(&self, numbers: &[Vec<f32>]) -> Call {
        let Case { heads: num_heads, grid: [height, width], window, .. } = *self;
        let attributes = aggregated_attention::Attributes { num_heads, height, width, window };
        let mut call = Call::new(Attributes::new::<RoutedAggregatedAttention>(attributes).unwrap(), self.dtype);
        for (i, (shape, numbers)) in self.shapes().iter().zip(numbers).enumerate() {
            match i {
                GATES | SCALE => call.gates(shape, numbers),
                _ => call.input(shape, numbers),
            }
        }
        call
    }

    /// The call with random inputs.
    pub fn call(&self) -> Call {
        self.call_with(&self.numbers())
    }
}
