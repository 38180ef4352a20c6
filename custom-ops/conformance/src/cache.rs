//! Test cases of CacheUpdate and RoutedCachedAttention: caches with more room than tokens, and a length per sequence.

use crate::routed_attention::{self, Gates};
use crate::{Call, Random};
use moh_operators::{Attributes, CacheUpdate, DType, RoutedCachedAttention, cache_update, routed_cached_attention};

/// Sizes of a CacheUpdate call, and where the new tokens of each sequence go.
#[derive(Debug, Clone)]
pub struct Update {
    /// Key/value heads.
    pub heads: usize,
    /// Tokens that the cache has room for.
    pub capacity: usize,
    /// Tokens of the attention mask.
    pub total: usize,
    /// New tokens.
    pub q_len: usize,
    /// Width of a head.
    pub dim: usize,
    /// Where the new tokens go, one number a sequence.
    pub start: Vec<i64>,
    /// The element type T.
    pub dtype: DType,
}

impl Update {
    /// The call, with random numbers.
    pub fn call(&self) -> Call {
        let (batch, mut random) = (self.start.len(), Random(3));
        let mut numbers = |n: usize| -> Vec<f32> { (0..n).map(|_| random.signed()).collect() };
        let attributes = Attributes::new::<CacheUpdate>(cache_update::Attributes {}).unwrap();
        let mut call = Call::new(attributes, self.dtype);
        let past = numbers(batch * self.heads * self.capacity * self.dim);
        call.input(&[batch, self.heads, self.capacity, self.dim], &past);
        let update = numbers(batch * self.q_len * self.heads * self.dim);
        call.input(&[batch, self.q_len, self.heads * self.dim], &update);
        call.integers(&[batch, self.total], &vec![1; batch * self.total]);
        call.integers(&[batch], &self.start);
        call
    }
}

/// Calls of CacheUpdate that between them reach every edge of a cache.
pub fn updates(dtype: DType) -> Vec<Update> {
    let case = Update { heads: 3, capacity: 9, total: 7, q_len: 2, dim: 5, start: vec![0, 3, 7], dtype };
    vec![
        case.clone(),
        // Beyond both ends, and as far as integers go.
        Update { start: vec![-4, 8, i64::from(i32::MAX) >> 8], ..case.clone() },
        Update { total: 12, start: vec![0, 8, 10], ..case.clone() },
        Update { total: 12, q_len: 12, start: vec![0], ..case.clone() },
        Update { capacity: 0, total: 4, q_len: 4, start: vec![0, 0], ..case.clone() },
        Update { q_len: 0, start: vec![3], ..case.clone() },
        Update { start: vec![], ..case.clone() },
        Update { heads: 8, capacity: 300, total: 260, q_len: 1, dim: 64, start: vec![259, 17], ..case },
    ]
}

/// A RoutedCachedAttention call: sizes, gates and type as in RoutedAttention's, and each sequence's tokens.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Sizes, gates and element type; `kv_len` is the cache's capacity. Layout, mask and bias are not used.
    pub case: routed_attention::Case,
    /// First key and first query of each sequence.
    pub spans: Vec<(i64, i64)>,
}

impl Attention {
    /// The case, with NaN wherever no query sees it.
    pub fn draw(&self) -> routed_attention::Numbers {
        let case = routed_attention::Case { batch: self.spans.len(), cache_layout: true, bias: None, ..self.case };
        let mut numbers = case.draw();
        for (batch, &(first, start)) in self.spans.iter().enumerate() {
            let seen = first.max(0)..(start + case.q_len as i64);
            for token in (0..case.kv_len).filter(|&token| !seen.contains(&(token as i64))) {
                for head in 0..case.kv_num_heads {
                    let (k, v) = (case.head_dim, case.value_dim);
                    numbers.key[case.kv_index(batch, token, head, k)..][..k].fill(f32::NAN);
                    numbers.value[case.kv_index(batch, token, head, v)..][..v].fill(f32::NAN);
                }
            }
        }
        numbers
    }

    /// The call on these numbers.
    pub fn call(&self, numbers: &routed_attention::Numbers) -> Call {
        let case = numbers.case;
        let (num_heads, kv_num_heads) = (case.num_heads(), case.kv_num_heads);
        let scale = 3.0 / (case.head_dim as f32).sqrt();
        let attributes = routed_cached_attention::Attributes { num_heads, kv_num_heads, scale };
        let mut call = Call::new(Attributes::new::<RoutedCachedAttention>(attributes).unwrap(), case.dtype);
        call.input(&[case.batch, case.q_len, num_heads * case.head_dim], &numbers.query);
        call.input(&[case.batch, kv_num_heads, case.kv_len, case.head_dim], &numbers.key);
        call.input(&[case.batch, kv_num_heads, case.kv_len, case.value_dim], &numbers.value);
        call.gates(&[case.batch, case.q_len, num_heads], &numbers.gates);
        let (first, start): (Vec<i64>, Vec<i64>) = self.spans.iter().copied().unzip();
        call.integers(&[case.batch], &first);
        call.integers(&[case.batch], &start);
        call
    }
}

/// Calls of RoutedCachedAttention: decoding and prefill, padding on either side, full and empty rows, grouped heads.
pub fn attentions(dtype: DType) -> Vec<Attention> {
    let case = routed_attention::Case {
        kv_len: 40,
        kv_num_heads: 2,
        group_size: 2,
        head_dim: 8,
        value_dim: 12,
        dtype,
        gates: Gates::Random(0.7),
        ..Default::default()
    };
    let with = |q_len, kv_len, spans: &[(i64, i64)]| Attention {
        case: routed_attention::Case { q_len, kv_len, ..case },
        spans: spans.to_vec(),
    };
    vec![
        with(1, 40, &[(0, 0), (0, 39), (7, 20)]),
        with(1, 700, &[(0, 650), (300, 620), (3, 9), (0, 699)]),
        with(6, 40, &[(0, 0), (4, 0), (2, 30), (0, 34)]),
        // Before, beyond and outside the cache.
        with(3, 40, &[(0, -2), (0, 39), (39, 10), (40, 39), (-5, 70)]),
        with(90, 200, &[(0, 0), (17, 0), (3, 101)]),
        with(150, 300, &[(0, 150), (140, 3)]),
        with(2, 0, &[(0, 0)]),
    ]
}
