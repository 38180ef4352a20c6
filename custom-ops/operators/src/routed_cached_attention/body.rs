//! RoutedCachedAttention's function body: RoutedAttention's, with another mask. Values that no query sees are replaced by 0: a
//! cache may hold anything there, and 0 * NaN is NaN.

use super::RoutedCachedAttention;
use crate::operator::{Body, BodyValue, Builder, Variant};
use crate::routed_attention::{Layout, attend};

/// Shapes in the comments: B, C = capacity, Tq.
pub(super) fn body(variant: Variant) -> Body {
    let mut builder = Builder::new::<RoutedCachedAttention>(variant);
    let b = &mut builder;
    let layout = Layout::new(b);
    let value = b.cast_f32("value", "value_f32");
    let axes = b.ints(&[1, 2, 3], "row_axes");
    // (B, 1, 1, 1)
    let first = b.node("Unsqueeze", &["first", &axes], "first_of_row");
    let start = b.node("Unsqueeze", &["start", &axes], "start_of_row");
    let (zero, one) = (b.int(0, "zero_int"), b.int(1, "one_int"));
    let capacity = b.with("Shape", &["key"], "capacity", &[("start", BodyValue::Int(2)), ("end", BodyValue::Int(3))]);
    let capacity = b.node("Squeeze", &[&capacity], "capacity_scalar");
    let q_len = b.node("Squeeze", &["q_len_list"], "q_len_scalar");
    let keys = b.node("Range", &[&zero, &capacity, &one], "key_index");
    let queries = b.node("Range", &[&zero, &q_len, &one], "query_index");
    let queries = b.node("Unsqueeze", &[&queries, "rest"], "query_column");
    // (B, 1, Tq, 1)
    let newest = b.node("Add", &[&start, &queries], "newest_key");
    let begun = b.node("GreaterOrEqual", &[&keys, &first], "begun");
    let reached = b.node("LessOrEqual", &[&keys, &newest], "reached");
    let allowed = b.node("And", &[&begun, &reached], "allowed");
    // (B, 1, C, 1): what some query sees.
    let last = b.node("Add", &[&start, &q_len], "end_of_row");
    let key_column = b.node("Unsqueeze", &[&keys, "rest"], "key_column");
    let begun = b.node("GreaterOrEqual", &[&key_column, &first], "begun_column");
    let reached = b.node("Less", &[&key_column, &last], "reached_column");
    let seen = b.node("And", &[&begun, &reached], "seen");
    let nothing = b.float(0.0, "nothing");
    let value = b.node("Where", &[&seen, &value, &nothing], "value_seen");

    let key = b.cast_f32("key", "key_f32");
    let key = b.transpose(&key, [0, 1, 3, 2], "key_heads");
    attend(b, &layout, [&key, &value], variant.portable, |b, scores| {
        let minus_inf = b.float(f32::NEG_INFINITY, "minus_inf");
        b.node("Where", &[&allowed, &scores, &minus_inf], "scores_masked")
    });
    builder.finish()
}
