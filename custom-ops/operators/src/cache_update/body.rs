//! CacheUpdate's function body: grows the cache by zeros and scatters the new tokens into it.

use super::CacheUpdate;
use crate::operator::{Body, BodyValue, Builder, Variant};

/// Shapes in the comments: B, G KV heads, C = capacity, L = length of the output, Q new tokens, D.
pub(super) fn body(variant: Variant) -> Body {
    let mut builder = Builder::new::<CacheUpdate>(variant);
    let b = &mut builder;
    let part = |b: &mut Builder, x: &str, start: i64, end: i64, output: &str| {
        b.with("Shape", &[x], output, &[("start", BodyValue::Int(start)), ("end", BodyValue::Int(end))])
    };
    let (zero, one, rest) = (b.ints(&[0], "zero"), b.ints(&[1], "one"), b.ints(&[-1], "rest"));
    let copy = b.ints(&[0, 0], "copy");

    let rows = part(b, "past", 0, 2, "rows");
    let heads = part(b, "past", 1, 2, "kv_num_heads");
    let capacity = part(b, "past", 2, 3, "capacity");
    let dim = part(b, "past", 3, 4, "dim");
    let total = part(b, "attention_mask", 1, 2, "total");
    let q_len = part(b, "update", 1, 2, "q_len");

    // (B, G, L, D): past, then zeros.
    let length = b.node("Max", &[&capacity, &total], "length");
    let growth = b.node("Sub", &[&length, &capacity], "growth");
    let tail = b.concat(&[&rows, &growth, &dim], "tail_shape");
    let nothing = b.float(0.0, "nothing");
    let nothing = b.node("CastLike", &[&nothing, "past"], "nothing_like_past");
    let tail = b.node("Expand", &[&nothing, &tail], "tail");
    let grown = b.with("Concat", &["past", &tail], "grown", &[("axis", BodyValue::Int(2))]);

    // (B, G, Q, D)
    let split = b.concat(&[&copy, &heads, &rest], "split_heads");
    let update = b.node("Reshape", &["update", &split], "update_split");
    let update = b.transpose(&update, [0, 2, 1, 3], "update_heads");

    // (B, 1, Q, 1), expanded like the update.
    let latest = b.node("Sub", &[&length, &q_len], "latest");
    let first = b.node("Min", &["start", &latest], "start_in_time");
    let first = b.node("Max", &[&first, &zero], "first");
    let per_row = b.ints(&[-1, 1, 1, 1], "per_row");
    let first = b.node("Reshape", &[&first, &per_row], "first_of_row");
    let (from, step) = (b.int(0, "from"), b.int(1, "step"));
    let scalar = b.with("Squeeze", &[&q_len, &zero], "q_len_scalar", &[]);
    let tokens = b.node("Range", &[&from, &scalar, &step], "tokens");
    let column = b.node("Unsqueeze", &[&tokens, &one], "token_column");
    let positions = b.node("Add", &[&first, &column], "positions");
    let shape = b.node("Shape", &[&update], "update_shape");
    let positions = b.node("Expand", &[&positions, &shape], "position_of_each");
    b.with("ScatterElements", &[&grown, &positions, &update], "present", &[("axis", BodyValue::Int(2))]);
    builder.finish()
}
