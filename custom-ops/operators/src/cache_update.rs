//! CacheUpdate: writes new keys or values into a cache, at each sequence's own length.

mod body;
mod reference;

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Definition, Example, Part, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct CacheUpdate;

attributes! {
    /// CacheUpdate has no attributes.
    #[derive(Copy)]
    pub struct Attributes {}
}

inputs! {
    /// CacheUpdate's inputs.
    pub struct Inputs {
        past: T, "(batch, kv_num_heads, capacity, dim)", "The cache. It may be the memory of the output.";
        update: T, "(batch, q_len, kv_num_heads * dim)", "New keys or values.";
        attention_mask: I64, "(batch, total)", "Only its shape is read: the cache must hold total tokens.";
        start: I64, "(batch)", "Where the first new token of each sequence goes: clamped to 0 .. length - q_len.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Batch size.
    pub batch: usize,
    /// Key/value heads.
    pub kv_num_heads: usize,
    /// Tokens that the given cache has room for.
    pub capacity: usize,
    /// Tokens that the output has room for, at least `capacity`.
    pub length: usize,
    /// New tokens per sequence.
    pub q_len: usize,
    /// Width of a head.
    pub dim: usize,
}

impl Problem {
    /// Where the new tokens of a sequence go, of which `start` is given.
    pub fn position(&self, start: i64) -> usize {
        usize::try_from(start).unwrap_or(0).min(self.length - self.q_len)
    }
}

impl Definition for CacheUpdate {
    const NAME: &'static str = "CacheUpdate";
    const DOC: &'static str = "A cache of keys or values with new tokens in it: `past`, with token `i` of sequence `b` \
          written at position `start[b] + i`. The output has room for `max(capacity, total)` tokens; positions beyond \
          `capacity` that are not written are 0. Where past and output are the same memory, only the new tokens are \
          written.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "present",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, kv_num_heads, max(capacity, total), dim)",
        doc: "The cache with the new tokens.",
    };
    const PART: Part = Part::Attention;
    const SINCE: i64 = 2;
    const IN_PLACE: Option<usize> = Some(0);

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn infer(_: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let Inputs { past, update, attention_mask, start } = *shapes;
        let mut batch = Agreed::default();
        let &[b, heads, capacity, dim] = past else {
            return Err(bad_shape("past", "(batch, kv_num_heads, capacity, dim)".to_owned(), past));
        };
        batch.accept(b);
        let width = heads.zip(dim).map(|(heads, dim)| heads.saturating_mul(dim));
        let fits = |found: &[Option<usize>], batch: &mut Agreed, rank: usize| {
            found.len() == rank && found.first().is_some_and(|&b| batch.accept(b))
        };
        if !fits(update, &mut batch, 3) || !Agreed(width).accept(update[2]) {
            let expected = format!("({}, q_len, {})", batch.show("batch"), Agreed(width).show("kv_num_heads * dim"));
            return Err(bad_shape("update", expected, update));
        }
        if !fits(attention_mask, &mut batch, 2) {
            return Err(bad_shape("attention_mask", format!("({}, total)", batch.show("batch")), attention_mask));
        }
        if !fits(start, &mut batch, 1) {
            return Err(bad_shape("start", format!("({})", batch.show("batch")), start));
        }
        let length = capacity.zip(attention_mask[1]).map(|(capacity, total)| capacity.max(total));
        if length.zip(update[1]).is_some_and(|(length, q_len)| length < q_len) {
            let expected = format!("at most {} new tokens", Agreed(length).show("max(capacity, total)"));
            return Err(bad_shape("update", expected, update));
        }
        let same = |axis| OutputDim::SameAs { input: 0, axis };
        let length = length.map_or(OutputDim::Max([(0, 2), (2, 1)]), OutputDim::Size);
        Ok(vec![same(0), same(1), length, same(3)])
    }

    fn problem(_: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Inputs { past, update, attention_mask, .. } = *shapes;
        let (capacity, q_len) = (past[2], update[1]);
        let length = capacity.max(attention_mask[1]);
        Ok(Problem { batch: past[0], kv_num_heads: past[1], capacity, length, q_len, dim: past[3] })
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
        vec![
            // Room left, room for some of the new tokens, none, and an empty cache.
            Example::new(Attributes {}, &[&[2, 3, 9, 4], &[2, 2, 12], &[2, 7], &[2]]),
            Example::new(Attributes {}, &[&[2, 1, 4, 5], &[2, 3, 5], &[2, 6], &[2]]),
            Example::new(Attributes {}, &[&[1, 2, 5, 8], &[1, 1, 16], &[1, 6], &[1]]),
            Example::new(Attributes {}, &[&[3, 2, 0, 8], &[3, 4, 16], &[3, 4], &[3]]),
        ]
    }
}

fn bad_shape(input: &'static str, expected: String, found: &[Option<usize>]) -> Error {
    Error::Shape { operator: CacheUpdate::NAME, input, expected, found: show(found) }
}
