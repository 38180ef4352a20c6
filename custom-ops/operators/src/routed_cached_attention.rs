//! RoutedCachedAttention: RoutedAttention on a cache with more room than tokens, and a length per sequence.

mod body;
mod reference;

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, per_head, show};
use crate::tensor::Tensor;
use std::ops::Range;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedCachedAttention;

attributes! {
    /// RoutedCachedAttention's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Query heads.
        num_heads: usize,
        /// Key/value heads; divides num_heads.
        kv_num_heads: usize,
        /// Factor applied to the scores, usually 1/sqrt(head_dim). 0 means 0, not a default.
        scale: f32,
    }
}

inputs! {
    /// RoutedCachedAttention's inputs.
    pub struct Inputs {
        query: T, "(batch, q_len, num_heads * head_dim)", "Queries.";
        key: T, "(batch, kv_num_heads, capacity, head_dim)", "The cache of keys, the queries' own among them.";
        value: T, "(batch, kv_num_heads, capacity, value_dim)", "The cache of values.";
        head_gates: F32, "(batch, q_len, num_heads)", "Any finite number; 0 switches the head off.";
        first: I64, "(batch)", "Position of each sequence's first key; those before it are padding.";
        start: I64, "(batch)", "Position of each sequence's first query.";
    }
}

/// Sizes and attributes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Problem {
    /// Batch size.
    pub batch: usize,
    /// Query tokens per sequence.
    pub q_len: usize,
    /// Tokens that the cache has room for.
    pub capacity: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub kv_num_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Factor applied to the scores.
    pub scale: f32,
}

impl Problem {
    /// The keys that query `i` sees, where the sequence's `first` and `start` are given.
    pub fn visible_keys(&self, first: i64, start: i64, i: usize) -> Range<usize> {
        let clamped = |position: i64| usize::try_from(position).unwrap_or(0).min(self.capacity);
        let end = clamped(start.saturating_add(i64::try_from(i).unwrap_or(i64::MAX)).saturating_add(1));
        clamped(first).min(end)..end
    }
}

impl Definition for RoutedCachedAttention {
    const NAME: &'static str = "RoutedCachedAttention";
    const DOC: &'static str = "RoutedAttention on a KV cache that has room for more tokens than there are: query `i` of \
          sequence `b` sees the keys `first[b] <= j <= start[b] + i`, as far as the cache goes, and nothing else of the \
          cache is read. The work follows these lengths, not the cache's. If a row sees no key, its output is 0.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, num_heads * value_dim)",
        doc: "The heads' outputs, concatenated.",
    };
    const PART: Part = Part::Attention;
    const SINCE: i64 = 2;

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
        let Inputs { query, key, value, head_gates, first, start } = *shapes;
        let Attributes { num_heads, kv_num_heads, .. } = *attributes;
        let (mut batch, mut q_len, mut capacity) = (Agreed::default(), Agreed::default(), Agreed::default());
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
            let known = (batch, capacity, *dim);
            let fits = matches!(*found, [b, h, s, d] if batch.accept(b)
                && h.is_none_or(|h| h == kv_num_heads)
                && capacity.accept(s)
                && d != Some(0)
                && dim.accept(d));
            if !fits {
                let (batch, capacity, dim) = (known.0.show("batch"), known.1.show("capacity"), known.2.show(dim_name));
                return Err(bad_shape(name, format!("({batch}, {kv_num_heads}, {capacity}, {dim})"), found));
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
        for (name, found) in [("first", first), ("start", start)] {
            if !matches!(*found, [b] if batch.accept(b)) {
                return Err(bad_shape(name, format!("({})", batch.show("batch")), found));
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
        let Inputs { query, key, value, .. } = *shapes;
        let Attributes { num_heads, kv_num_heads, scale } = *attributes;
        Ok(Problem {
            batch: query[0],
            q_len: query[1],
            capacity: key[2],
            num_heads,
            kv_num_heads,
            head_dim: key[3],
            value_dim: value[3],
            scale,
        })
    }

    fn variant(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::default()
    }

    fn zeros(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        None
    }

    fn body(variant: Variant) -> Body {
        body::body(variant)
    }

    fn reference(problem: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        reference::reference(problem, inputs)
    }

    fn examples() -> Vec<Example<Attributes>> {
        let attributes = |kv_num_heads| Attributes { num_heads: 4, kv_num_heads, scale: 0.5 };
        vec![
            Example::new(attributes(4), &[&[2, 3, 16], &[2, 4, 8, 4], &[2, 4, 8, 6], &[2, 3, 4], &[2], &[2]]),
            Example::new(attributes(2), &[&[3, 1, 16], &[3, 2, 7, 4], &[3, 2, 7, 4], &[3, 1, 4], &[3], &[3]]),
            Example::new(attributes(1), &[&[1, 9, 16], &[1, 1, 12, 4], &[1, 1, 12, 4], &[1, 9, 4], &[1], &[1]]),
        ]
    }
}

fn bad_shape(input: &'static str, expected: String, found: &[Option<usize>]) -> Error {
    Error::Shape { operator: RoutedCachedAttention::NAME, input, expected, found: show(found) }
}
