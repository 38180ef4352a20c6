//! Test cases of RoutedAttention, their data, and the comparison of outputs.

use crate::{Call, Random};
use half::bf16;
use moh_operators::{Attributes, DType, RoutedAttention, routed_attention};

/// Maximum absolute error of an output element. The reference gets the inputs already rounded to `dtype`.
///
/// Scores and sums are float32 in every type; with values below 1 and scores of a few units their error is below 1e-5.
/// The rounding of the output adds half a unit in the last place: of 11 bits in f16, of 8 in bf16.
fn allowed(dtype: DType, expected: f64) -> f64 {
    let rounding = match dtype {
        DType::F32 => 0.0,
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::U8 | DType::I64 => 0.0,
    };
    1e-5 + rounding * expected.abs()
}

/// Which heads are on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gates {
    /// None: gates are 0 and -0.
    Off,
    /// All: positive and negative gates.
    On,
    /// Each (token, head) pair with this probability.
    Random(f64),
    /// Exactly `k` heads for each token.
    TopK(usize),
}

/// Contents of the bias.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mask {
    /// Finite numbers.
    Finite,
    /// Some -inf.
    Some,
    /// Only -inf for some queries, some -inf for the other queries.
    WholeRows,
    /// The lowest and the largest finite number: only one of them for some queries, beside others or -inf for the other queries. Not in
    /// float16, where scores are no more than the rounding of such numbers in float32.
    Huge,
}

/// Sizes and options of a RoutedAttention call.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// Batch size.
    pub batch: usize,
    /// Query tokens per sequence.
    pub q_len: usize,
    /// Key tokens per sequence.
    pub kv_len: usize,
    /// Key/value heads.
    pub kv_num_heads: usize,
    /// Query heads per key/value head.
    pub group_size: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Whether keys and values have rank 4.
    pub cache_layout: bool,
    /// Whether the mask is causal.
    pub is_causal: bool,
    /// The element type T.
    pub dtype: DType,
    /// Which heads are on.
    pub gates: Gates,
    /// Which of the axes (batch, head, query, key) the bias does not broadcast, and its contents.
    pub bias: Option<([bool; 4], Mask)>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Case {
    fn default() -> Case {
        Case {
            batch: 1,
            q_len: 1,
            kv_len: 1,
            kv_num_heads: 1,
            group_size: 1,
            head_dim: 8,
            value_dim: 8,
            cache_layout: false,
            is_causal: false,
            dtype: DType::F32,
            gates: Gates::On,
            bias: None,
            seed: 1,
        }
    }
}

/// A case with its inputs, not yet rounded to the element type.
#[derive(Debug, Clone)]
pub struct Numbers {
    /// The case.
    pub case: Case,
    /// Queries.
    pub query: Vec<f32>,
    /// Keys.
    pub key: Vec<f32>,
    /// Values.
    pub value: Vec<f32>,
    /// Gates.
    pub gates: Vec<f32>,
    /// Shape and elements of the bias.
    pub bias: Option<(Vec<usize>, Vec<f32>)>,
}

impl Case {
    /// Number of query heads.
    pub fn num_heads(&self) -> usize {
        self.kv_num_heads * self.group_size
    }

    /// The attributes.
    pub fn attributes(&self) -> Attributes {
        let (num_heads, Case { kv_num_heads, is_causal, .. }) = (self.num_heads(), *self);
        // Larger than 1/sqrt(head_dim), so that the softmax weights are far from equal.
        let scale = 3.0 / (self.head_dim as f32).sqrt();
        let attributes = routed_attention::Attributes { num_heads, kv_num_heads, scale, is_causal };
        Attributes::new::<RoutedAttention>(attributes).unwrap()
    }

    /// Index of (batch, KV token, KV head, element) in keys or values of the case's layout.
    pub fn kv_index(&self, batch: usize, token: usize, kv_head: usize, dim: usize) -> usize {
        match self.cache_layout {
            true => ((batch * self.kv_num_heads + kv_head) * self.kv_len + token) * dim,
            false => ((batch * self.kv_len + token) * self.kv_num_heads + kv_head) * dim,
        }
    }

    /// Random inputs, with NaN in every query, key and value that no selected head reads.
    pub fn draw(self) -> Numbers {
        let mut random = Random(self.seed);
        let mut numbers = |n: usize| -> Vec<f32> { (0..n).map(|_| random.signed()).collect() };
        let (heads, tokens) = (self.num_heads(), self.batch * self.q_len);
        let mut query = numbers(tokens * heads * self.head_dim);
        let mut key = numbers(self.batch * self.kv_len * self.kv_num_heads * self.head_dim);
        let mut value = numbers(self.batch * self.kv_len * self.kv_num_heads * self.value_dim);
        let gates = self.draw_gates(&mut random);
        for (block, &gate) in gates.iter().enumerate() {
            if gate == 0.0 {
                query[block * self.head_dim..(block + 1) * self.head_dim].fill(f32::NAN);
            }
        }
        for batch in 0..self.batch {
            for kv_head in 0..self.kv_num_heads {
                let used = |token: usize| {
                    let first = ((batch * self.q_len + token) * self.kv_num_heads + kv_head) * self.group_size;
                    gates[first..first + self.group_size].iter().any(|&gate| gate != 0.0)
                };
                if !(0..self.q_len).any(used) {
                    for token in 0..self.kv_len {
                        let k = self.kv_index(batch, token, kv_head, self.head_dim);
                        key[k..k + self.head_dim].fill(f32::NAN);
                        let v = self.kv_index(batch, token, kv_head, self.value_dim);
                        value[v..v + self.value_dim].fill(f32::NAN);
                    }
                }
            }
        }
        let bias = self.bias.map(|(axes, mask)| self.draw_bias(axes, mask, &mut random));
        Numbers { case: self, query, key, value, gates, bias }
    }

    fn draw_gates(&self, random: &mut Random) -> Vec<f32> {
        let heads = self.num_heads();
        let mut gates = Vec::new();
        for _ in 0..self.batch * self.q_len {
            let mut order: Vec<(u64, usize)> = (0..heads).map(|h| (random.bits(), h)).collect();
            order.sort_unstable();
            for h in 0..heads {
                let on = match self.gates {
                    Gates::Off => false,
                    Gates::On => true,
                    Gates::Random(p) => random.unit() < p,
                    Gates::TopK(k) => order.iter().take(k).any(|&(_, chosen)| chosen == h),
                };
                let sign = if random.bits() & 1 == 0 { 1.0 } else { -1.0 };
                let size = if on { 0.1 + random.unit() as f32 } else { 0.0 };
                gates.push(sign * size);
            }
        }
        gates
    }

    fn draw_bias(&self, axes: [bool; 4], mask: Mask, random: &mut Random) -> (Vec<usize>, Vec<f32>) {
        let full = [self.batch, self.num_heads(), self.q_len, self.kv_len];
        let shape: Vec<usize> = axes.iter().zip(full).map(|(&own, dim)| if own { dim } else { 1 }).collect();
        let row = shape[3].max(1);
        let rows = shape[..3].iter().product::<usize>();
        let mut bias = Vec::new();
        for _ in 0..rows {
            if mask == Mask::Huge {
                self.draw_huge(shape[3], random, &mut bias);
                continue;
            }
            let whole = mask == Mask::WholeRows && random.unit() < 0.4;
            for _ in 0..row.min(shape[3]) {
                let off = whole || (mask != Mask::Finite && random.unit() < 0.3);
                bias.push(if off { f32::NEG_INFINITY } else { random.signed() });
            }
        }
        // Leading axes of length 1 may be omitted.
        let skip = shape.iter().take_while(|&&dim| dim == 1).count().min((self.seed % 5) as usize);
        (shape[skip..].to_vec(), bias)
    }

    /// Appends a query's biases of [`Mask::Huge`].
    fn draw_huge(&self, keys: usize, random: &mut Random, bias: &mut Vec<f32>) {
        let largest = if self.dtype == DType::BF16 { bf16::MAX.to_f32() } else { f32::MAX };
        let kind = random.bits() % 5;
        for _ in 0..keys {
            let first = random.unit() < 0.5;
            bias.push(match (kind, first) {
                (0, _) => -largest,
                (1, _) => largest,
                (2, true) => largest,
                (3, false) => random.signed(),
                (4, false) => f32::NEG_INFINITY,
                _ => -largest,
            });
        }
    }
}

impl Numbers {
    /// The call, its inputs rounded to the element type.
    pub fn call(&self) -> Call {
        let case = self.case;
        let (heads, kv_heads) = (case.num_heads(), case.kv_num_heads);
        let kv_shape = |dim: usize| match case.cache_layout {
            true => vec![case.batch, kv_heads, case.kv_len, dim],
            false => vec![case.batch, case.kv_len, kv_heads * dim],
        };
        let mut call = Call::new(case.attributes(), case.dtype);
        call.input(&[case.batch, case.q_len, heads * case.head_dim], &self.query);
        call.input(&kv_shape(case.head_dim), &self.key);
        call.input(&kv_shape(case.value_dim), &self.value);
        call.gates(&[case.batch, case.q_len, heads], &self.gates);
        if let Some((shape, bias)) = &self.bias {
            call.input(shape, bias);
        }
        call
    }

    /// Panics if `found`, the output of `kernel`, differs from `expected` by more than the tolerance.
    /// `weight_rounding` is the relative rounding error of a softmax weight if the kernel rounds weights, else 0.
    pub fn compare(&self, kernel: &dyn std::fmt::Debug, found: &[f64], expected: &[f64], weight_rounding: f64) {
        let case = self.case;
        assert_eq!(found.len(), expected.len(), "{kernel:?} {case:?}");
        let largest = f64::from(self.value.iter().fold(0f32, |largest, x| largest.max(x.abs())));
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let (block, d) = (i / case.value_dim, i % case.value_dim);
            let weights = weight_rounding * largest * f64::from(self.gates[block].abs());
            let close = (found - expected).abs() <= allowed(case.dtype, expected) + weights;
            let (token, head) = (block / case.num_heads(), block % case.num_heads());
            assert!(
                close || (found.is_nan() && expected.is_nan()),
                "{kernel:?} {case:?}: token {token}, head {head}, element {d}: expected {expected}, found {found}"
            );
            if self.gates[block] == 0.0 {
                assert_eq!(found, 0.0, "{kernel:?} {case:?}: token {token} does not use head {head}");
            }
        }
    }
}
