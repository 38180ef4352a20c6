//! RoutedAttention's attributes and shapes.

use super::{Agreed, OutputDim, check_count, choice, count, per_head, show};
use crate::error::Error;
use crate::schema::{Attributes, ROUTED_ATTENTION};

/// A validated call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Query tokens of a sequence.
    pub q_len: usize,
    /// Key tokens of a sequence.
    pub kv_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub kv_num_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Whether keys and values are (batch, kv_num_heads, kv_len, dim), as in a KV cache.
    pub cache_layout: bool,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether query i sees only keys j <= i + (kv_len - q_len).
    pub is_causal: bool,
    /// Strides of the bias in elements over (batch, head, query, key), 0 where it broadcasts; `None` without a bias.
    pub bias_strides: Option<[usize; 4]>,
}

impl Problem {
    /// Query heads that read one key/value head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.kv_num_heads
    }

    /// The number of keys that query `i` may see: the first ones.
    pub fn visible_keys(&self, i: usize) -> usize {
        match self.is_causal {
            true => (i + 1 + self.kv_len).saturating_sub(self.q_len).min(self.kv_len),
            false => self.kv_len,
        }
    }

    /// Offset of the first element of key or value row (batch, KV head, token), whose heads are `dim` wide.
    pub fn kv_offset(&self, batch: usize, kv_head: usize, token: usize, dim: usize) -> usize {
        match self.cache_layout {
            true => ((batch * self.kv_num_heads + kv_head) * self.kv_len + token) * dim,
            false => ((batch * self.kv_len + token) * self.kv_num_heads + kv_head) * dim,
        }
    }

    /// Distance in elements from a key or value row to the next token's.
    pub fn kv_stride(&self, dim: usize) -> usize {
        if self.cache_layout { dim } else { self.kv_num_heads * dim }
    }

    /// Reads a validated call.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn new(attributes: &Attributes, inputs: &[Option<&[usize]>]) -> Result<Problem, Error> {
        ROUTED_ATTENTION.output_shape(attributes, inputs)?;
        let heads = heads(attributes)?;
        let dims = |i: usize| inputs.get(i).copied().flatten().unwrap_or(&[]);
        let (query, key, value) = (dims(0), dims(1), dims(2));
        let cache_layout = key.len() == 4;
        let (kv_len, head_dim, value_dim) = match cache_layout {
            true => (key[2], key[3], value[3]),
            false => (key[1], key[2] / heads.kv, value[2] / heads.kv),
        };
        let bias_strides = inputs.get(4).copied().flatten().map(|bias| {
            let mut strides = [0; 4];
            let mut step = 1;
            for (axis, &dim) in bias.iter().enumerate().rev() {
                if dim != 1 {
                    strides[axis + 4 - bias.len()] = step;
                }
                step *= dim;
            }
            strides
        });
        Ok(Problem {
            batch: query[0],
            q_len: query[1],
            kv_len,
            num_heads: heads.query,
            kv_num_heads: heads.kv,
            head_dim,
            value_dim,
            cache_layout,
            scale: attributes.float("scale"),
            is_causal: attributes.int("is_causal") == 1,
            bias_strides,
        })
    }
}

struct Heads {
    query: usize,
    kv: usize,
}

fn heads(attributes: &Attributes) -> Result<Heads, Error> {
    let bad = |attribute, expected: &str, found: String| Error::Attribute {
        operator: ROUTED_ATTENTION.name,
        attribute,
        expected: expected.to_owned(),
        found,
    };
    let heads = Heads { query: count(attributes, "num_heads")?, kv: count(attributes, "kv_num_heads")? };
    if !heads.query.is_multiple_of(heads.kv) {
        return Err(bad("kv_num_heads", &format!("a divisor of num_heads = {}", heads.query), heads.kv.to_string()));
    }
    if !attributes.float("scale").is_finite() {
        return Err(bad("scale", "a finite number", attributes.float("scale").to_string()));
    }
    choice(attributes, "is_causal", 2)?;
    Ok(heads)
}

fn bad_shape(input: &'static str, expected: String, found: &[Option<usize>]) -> Error {
    Error::Shape { operator: ROUTED_ATTENTION.name, input, expected, found: show(found) }
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer(attributes: &Attributes, inputs: &[Option<&[Option<usize>]>]) -> Result<Vec<OutputDim>, Error> {
    check_count(&ROUTED_ATTENTION, inputs)?;
    let heads = heads(attributes)?;
    let dims = |i: usize| inputs.get(i).copied().flatten().unwrap_or(&[]);
    let (query, key, value, gates) = (dims(0), dims(1), dims(2), dims(3));
    let (mut batch, mut q_len, mut kv_len) = (Agreed::default(), Agreed::default(), Agreed::default());
    let (mut head_dim, mut value_dim) = (Agreed::default(), Agreed::default());

    let fits = query.len() == 3
        && batch.accept(query[0])
        && q_len.accept(query[1])
        && per_head(query[2], heads.query).is_some_and(|d| head_dim.accept(d));
    if !fits {
        let expected = format!("(batch, q_len, num_heads * head_dim) with num_heads = {}", heads.query);
        return Err(bad_shape("query", expected, query));
    }

    for (name, found, dim, dim_name) in
        [("key", key, &mut head_dim, "head_dim"), ("value", value, &mut value_dim, "value_dim")]
    {
        let known = (batch, kv_len, *dim);
        let fits = found.len() == key.len()
            && match *found {
                [b, s, width] => {
                    batch.accept(b) && kv_len.accept(s) && per_head(width, heads.kv).is_some_and(|d| dim.accept(d))
                }
                [b, h, s, d] => {
                    batch.accept(b)
                        && h.is_none_or(|h| h == heads.kv)
                        && kv_len.accept(s)
                        && d != Some(0)
                        && dim.accept(d)
                }
                _ => false,
            };
        if !fits {
            let (batch, kv_len, dim) = known;
            let expected = format!(
                "({0}, {1}, {2} * {3}) or ({0}, {2}, {1}, {3}), key and value alike",
                batch.show("batch"),
                kv_len.show("kv_len"),
                heads.kv,
                dim.show(dim_name)
            );
            return Err(bad_shape(name, expected, found));
        }
    }

    let fits = gates.len() == 3
        && batch.accept(gates[0])
        && q_len.accept(gates[1])
        && gates[2].is_none_or(|h| h == heads.query);
    if !fits {
        let expected = format!("({}, {}, {})", batch.show("batch"), q_len.show("q_len"), heads.query);
        return Err(bad_shape("head_gates", expected, gates));
    }

    if let Some(bias) = inputs.get(4).copied().flatten() {
        let full = [batch.0, Some(heads.query), q_len.0, kv_len.0];
        let fits = bias.len() <= 4
            && bias.iter().rev().zip(full.iter().rev()).all(|(found, full)| match (found, full) {
                (Some(1), _) | (None, _) | (_, None) => true,
                (found, full) => found == full,
            });
        if !fits {
            return Err(bad_shape("attn_bias", format!("one that broadcasts to {}", show(&full)), bias));
        }
    }

    let width = match value_dim.0 {
        Some(dim) => dim.checked_mul(heads.query).map(OutputDim::Size),
        None => Some(OutputDim::Unknown),
    };
    let width = width.ok_or_else(|| bad_shape("value", "a width that fits in memory".to_owned(), value))?;
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, width])
}
