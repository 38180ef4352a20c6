//! Bodies of RoutedProjection and RoutedCombine: every head is computed, and the ones that are off are replaced by zero.

use super::{Body, BodyValue, Builder, Variant};
use crate::schema::{ROUTED_COMBINE, ROUTED_PROJECTION};

/// See [`crate::Operator::body`].
pub(crate) fn projection(variant: Variant) -> Body {
    let mut b = Builder::new(&ROUTED_PROJECTION, variant);
    let weight = match variant.per_head {
        // (H, C, D) -> (C, H * D)
        true => {
            let weight = b.with("Transpose", &["weight"], "weight_by_row", &[("perm", BodyValue::Ints(vec![1, 0, 2]))]);
            let shape = b.ints(&[0, -1], "weight_shape");
            b.node("Reshape", &[&weight, &shape], "weight_matrix")
        }
        false => b.with("Transpose", &["weight"], "weight_matrix", &[("perm", BodyValue::Ints(vec![1, 0]))]),
    };
    let mut y = b.node("MatMul", &["x", &weight], "all_heads");
    if variant.optional_inputs {
        y = b.node("Add", &[&y, "bias"], "all_heads_biased");
    }
    masked(&mut b, &y, "output");
    b.finish()
}

/// See [`crate::Operator::body`].
pub(crate) fn combine(variant: Variant) -> Body {
    let mut b = Builder::new(&ROUTED_COMBINE, variant);
    let x = masked(&mut b, "x", "x_routed");
    let weight = match variant.per_head {
        // (H, Dv, C) -> (H * Dv, C)
        true => {
            let width = b.with("Shape", &["weight"], "width", &[("start", BodyValue::Int(2))]);
            let rest = b.ints(&[-1], "rest_list");
            let shape = b.concat(&[&rest, &width], "weight_shape");
            b.node("Reshape", &["weight", &shape], "weight_matrix")
        }
        false => b.with("Transpose", &["weight"], "weight_matrix", &[("perm", BodyValue::Ints(vec![1, 0]))]),
    };
    match variant.optional_inputs {
        true => {
            let y = b.node("MatMul", &[&x, &weight], "sum");
            b.node("Add", &[&y, "bias"], "output")
        }
        false => b.node("MatMul", &[&x, &weight], "output"),
    };
    b.finish()
}

/// `x` (batch, q_len, num_heads * dim) with zeros in the blocks of the heads that are off.
fn masked(b: &mut Builder, x: &str, output: &str) -> String {
    let (copy, rest) = (b.ints(&[0, 0], "copy"), b.ints(&[-1], "rest"));
    let heads = b.int_attribute("num_heads", "num_heads_scalar");
    let one = b.ints(&[1], "one");
    let heads = b.node("Reshape", &[&heads, &one], "num_heads_list");
    let split = b.concat(&[&copy, &heads, &rest], "split_heads");
    let blocks = b.node("Reshape", &[x, &split], "blocks");
    let zero = b.float(0.0, "zero");
    let gates = b.node("Unsqueeze", &["head_gates", &rest], "gates_column");
    let off = b.node("Equal", &[&gates, &zero], "off");
    let zero = b.node("CastLike", &[&zero, x], "zero_like");
    let blocks = b.node("Where", &[&off, &zero, &blocks], "blocks_routed");
    let join = b.ints(&[0, 0, -1], "join_heads");
    b.node("Reshape", &[&blocks, &join], output)
}
