//! RoutedAttention: multi-head attention in which each query token uses only the heads whose gate is not 0.

mod body;
mod reference;

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Variant};
use crate::operator::{Definition, Example, Part};
use crate::shape::{Agreed, OutputDim, PartialShape, per_head, show};
use crate::tensor::Tensor;
pub(crate) use body::{Layout, attend};

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedAttention;

attributes! {
    /// RoutedAttention's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Query heads.
        num_heads: usize,
        /// Key/value heads; divides num_heads.
        kv_num_heads: usize,
        /// Factor applied to the scores, usually 1/sqrt(head_dim). 0 means 0, not a default.
        scale: f32,
        /// 1: query i sees keys j <= i + (kv_len - q_len). 0: all keys.
        is_causal: bool,
    }
}

inputs! {
    /// RoutedAttention's inputs.
    pub struct Inputs {
        query: T, "(batch, q_len, num_heads * head_dim)", "Queries.";
        key: T, "(batch, kv_len, kv_num_heads * head_dim) or (batch, kv_num_heads, kv_len, head_dim)",
            "Keys. Rank 4 is the layout of a KV cache, which is read in place. Key and value have the same rank.";
        value: T, "(batch, kv_len, kv_num_heads * value_dim) or (batch, kv_num_heads, kv_len, value_dim)", "Values.";
        head_gates: F32, "(batch, q_len, num_heads)", "Any finite number; 0 switches the head off.";
        attn_bias: T [optional], "broadcastable to (batch, num_heads, q_len, kv_len)",
            "Added to the scaled scores; -inf masks a key.";
    }
}

/// Sizes and attributes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// Batch size.
    pub batch: usize,
    /// Query tokens per sequence.
    pub q_len: usize,
    /// Key tokens per sequence.
    pub kv_len: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub kv_num_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Whether keys and values are (batch, kv_num_heads, kv_len, dim), as in a KV cache.
    pub cache_layout: bool,
    /// Factor applied to the scores.
    pub scale: f32,
    /// Whether query i sees only keys j <= i + (kv_len - q_len).
    pub is_causal: bool,
    /// Strides of the bias in elements over (batch, head, query, key), 0 along broadcast axes; `None` without a bias.
    pub bias_strides: Option<[usize; 4]>,
}

impl Problem {
    /// Query heads per key/value head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.kv_num_heads
    }

    /// How many keys query `i` may see; they are the first ones.
    pub fn visible_keys(&self, i: usize) -> usize {
        match self.is_causal {
            true => (i + 1 + self.kv_len).saturating_sub(self.q_len).min(self.kv_len),
            false => self.kv_len,
        }
    }

    /// Offset in elements of the key or value row (batch, KV head, token). `dim` is the width of a head.
    pub fn kv_offset(&self, batch: usize, kv_head: usize, token: usize, dim: usize) -> usize {
        match self.cache_layout {
            true => ((batch * self.kv_num_heads + kv_head) * self.kv_len + token) * dim,
            false => ((batch * self.kv_len + token) * self.kv_num_heads + kv_head) * dim,
        }
    }

    /// Stride in elements between the key or value rows of consecutive tokens.
    pub fn kv_stride(&self, dim: usize) -> usize {
        if self.cache_layout { dim } else { self.kv_num_heads * dim }
    }
}

impl Definition for RoutedAttention {
    const NAME: &'static str = "RoutedAttention";
    const DOC: &'static str = "Scaled dot-product attention with heads gated per query token: per head, `gate * \
          softmax(scale * q.k + bias) v`. Query head `h` reads key/value head `h / (num_heads / kv_num_heads)`. A \
          gate of exactly 0 switches the head off for the token: it is not computed, and its block of the output is \
          exactly 0, even if inputs are NaN or infinite. If all keys of a row are masked, the row's output is 0. \
          Scores and sums are accumulated in float32.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, num_heads * value_dim)",
        doc: "The heads' outputs, concatenated.",
    };
    const PART: Part = Part::Attention;

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn check(attributes: &Attributes) -> Result<(), Error> {
        let Attributes { num_heads, kv_num_heads, .. } = *attributes;
        if num_heads.is_multiple_of(kv_num_heads) {
            return Ok(());
        }
        Err(Error::Attribute {
            operator: Self::NAME,
            attribute: "kv_num_heads",
            expected: format!("a divisor of num_heads = {num_heads}"),
            found: kv_num_heads.to_string(),
        })
    }

    fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { query, key, value, head_gates, attn_bias } = *shapes;
        let Attributes { num_heads, kv_num_heads, .. } = *attributes;
        let (mut batch, mut q_len, mut kv_len) = (Agreed::default(), Agreed::default(), Agreed::default());
        let (mut head_dim, mut value_dim) = (Agreed::default(), Agreed::default());

        let fits = query.len() == 3
            && batch.accept(query[0])
            && q_len.accept(query[1])
            && per_head(query[2], num_heads).is_some_and(|d| head_dim.accept(d));
        if !fits {
            let expected = format!("(batch, q_len, num_heads * head_dim) with num_heads = {num_heads}");
            return Err(bad_shape("query", expected, query));
        }

        for (name, found, dim, dim_name) in
            [("key", key, &mut head_dim, "head_dim"), ("value", value, &mut value_dim, "value_dim")]
        {
            let known = (batch, kv_len, *dim);
            let fits = found.len() == key.len()
                && match *found {
                    [b, s, width] => {
                        batch.accept(b)
                            && kv_len.accept(s)
                            && per_head(width, kv_num_heads).is_some_and(|d| dim.accept(d))
                    }
                    [b, h, s, d] => {
                        batch.accept(b)
                            && h.is_none_or(|h| h == kv_num_heads)
                            && kv_len.accept(s)
                            && d != Some(0)
                            && dim.accept(d)
                    }
                    _ => false,
                };
            if !fits {
                let (batch, kv_len, dim) = known;
                let expected = format!(
                    "({0}, {1}, {2} * {3}) or ({0}, {2}, {1}, {3}), the same layout for key and value",
                    batch.show("batch"),
                    kv_len.show("kv_len"),
                    kv_num_heads,
                    dim.show(dim_name)
                );
                return Err(bad_shape(name, expected, found));
            }
        }

        let fits = head_gates.len() == 3
            && batch.accept(head_gates[0])
            && q_len.accept(head_gates[1])
            && head_gates[2].is_none_or(|h| h == num_heads);
        if !fits {
            let expected = format!("({}, {}, {})", batch.show("batch"), q_len.show("q_len"), num_heads);
            return Err(bad_shape("head_gates", expected, head_gates));
        }

        if let Some(bias) = attn_bias {
            let full = [batch.0, Some(num_heads), q_len.0, kv_len.0];
            let fits = bias.len() <= 4
                && bias.iter().rev().zip(full.iter().rev()).all(|(found, full)| match (found, full) {
                    (Some(1), _) | (None, _) | (_, None) => true,
                    (found, full) => found == full,
                });
            if !fits {
                return Err(bad_shape("attn_bias", format!("a shape that broadcasts to {}", show(&full)), bias));
            }
        }

        let width = match value_dim.0 {
            Some(dim) => dim.checked_mul(num_heads).map(OutputDim::Size),
            None => Some(OutputDim::Unknown),
        };
        let width = width.ok_or_else(|| bad_shape("value", "a width that fits in memory".to_owned(), value))?;
        Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, width])
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Inputs { query, key, value, attn_bias, .. } = *shapes;
        let Attributes { num_heads, kv_num_heads, scale, is_causal } = *attributes;
        let cache_layout = key.len() == 4;
        let (kv_len, head_dim, value_dim) = match cache_layout {
            true => (key[2], key[3], value[3]),
            false => (key[1], key[2] / kv_num_heads, value[2] / kv_num_heads),
        };
        let bias_strides = attn_bias.map(|bias| {
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
            num_heads,
            kv_num_heads,
            head_dim,
            value_dim,
            cache_layout,
            scale,
            is_causal,
            bias_strides,
        })
    }

    fn variant(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant {
            per_head: shapes.key.len() == 4,
            optional_inputs: usize::from(shapes.attn_bias.is_some()),
            causal: attributes.is_causal,
            ..Variant::default()
        }
    }

    fn zeros(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        Some(vec![1; 4])
    }

    fn body(variant: Variant) -> Body {
        body::body(variant)
    }

    fn reference(problem: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        reference::reference(problem, inputs)
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes = |kv_num_heads, is_causal| Attributes { num_heads: 4, kv_num_heads, scale: 0.5, is_causal };
        vec![
            Example::new(attributes(4, false), &[&[2, 3, 16], &[2, 5, 16], &[2, 5, 24], &[2, 3, 4], &[1, 4, 3, 5]]),
            Example::new(attributes(4, false), &[&[2, 3, 16], &[2, 5, 16], &[2, 5, 16], &[2, 3, 4]]),
            Example::new(attributes(2, true), &[&[1, 3, 16], &[1, 2, 7, 4], &[1, 2, 7, 4], &[1, 3, 4]]),
        ]
    }
}

fn bad_shape(input: &'static str, expected: String, found: &[Option<usize>]) -> Error {
    Error::Shape { operator: RoutedAttention::NAME, input, expected, found: show(found) }
}
