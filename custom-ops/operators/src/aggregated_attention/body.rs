//! RoutedAggregatedAttention's function body: computes every head, then sets the outputs of heads that are off to 0.

use super::{Attributes, RoutedAggregatedAttention};
use crate::attributes::name_of;
use crate::operator::{Body, BodyValue, Builder, Variant};

/// Shapes in the comments: B, N tokens, H heads, D, W = window * window, M pooled.
pub(super) fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<RoutedAggregatedAttention>(variant);
    let last = b.ints(&[-1], "last_axis");
    let (index, inside) = window_cells(&mut b);
    let split = split_heads(&mut b);
    let qn = heads(&mut b, "query", &split);
    let qn = unit(&mut b, &qn, "query");

    // (B, H, N, D): normalised, shifted, scaled.
    let embedding = b.cast_f32("query_embedding", "embedding");
    let row_axis = b.ints(&[1], "row_axis");
    let embedding = b.node("Unsqueeze", &[&embedding, &row_axis], "embedding_row");
    let scale = b.with("Transpose", &["query_scale"], "scale_heads", &[("perm", BodyValue::Ints(vec![1, 0]))]);
    let scale = b.node("Unsqueeze", &[&scale, &last], "scale_column");
    let qs = b.node("Add", &[&qn, &embedding], "query_shifted");
    let qs = b.node("Mul", &[&qs, &scale], "query_scaled");

    // (B, H, N, W): scores of the window.
    let cell_axis = b.ints(&[3], "cell_axis");
    let k = heads(&mut b, "key", &split);
    let k = unit(&mut b, &k, "key");
    let k = b.with("Gather", &[&k, &index], "key_window", &[("axis", BodyValue::Int(2))]);
    let q_row = b.node("Unsqueeze", &[&qs, &cell_axis], "query_row");
    let local = b.node("Mul", &[&k, &q_row], "local_products");
    let local = b.with("ReduceSum", &[&local, &last], "local_scores", &[("keepdims", BodyValue::Int(0))]);
    let bias = b.cast_f32("local_bias", "local_bias_f32");
    let bias = b.node("Unsqueeze", &[&bias, &row_axis], "local_bias_row");
    let local = b.node("Add", &[&local, &bias], "local_biased");
    let minus_inf = b.float(f32::NEG_INFINITY, "minus_inf");
    let local = b.node("Where", &[&inside, &local, &minus_inf], "local_masked");

    // (B, H, N, M): scores of the pooled tokens.
    let pooled_key = heads(&mut b, "pooled_key", &split);
    let pooled_key = unit(&mut b, &pooled_key, "pooled_key");
    let pooled_key = b.transpose(&pooled_key, [0, 1, 3, 2], "pooled_key_columns");
    let pooled = b.node("MatMul", &[&qs, &pooled_key], "pooled_scores");
    let bias = b.cast_f32("pooled_bias", "pooled_bias_f32");
    let pooled = b.node("Add", &[&pooled, &bias], "pooled_biased");

    let scores = b.with("Concat", &[&local, &pooled], "scores", &[("axis", BodyValue::Int(3))]);
    let weights = b.with("Softmax", &[&scores], "weights", &[("axis", BodyValue::Int(-1))]);
    let first = b.ints(&[0], "first_cell");
    let cells =
        b.with("Shape", &["local_bias"], "cells_list", &[("start", BodyValue::Int(1)), ("end", BodyValue::Int(2))]);
    let end = b.ints(&[i64::MAX], "end");
    let local = b.node("Slice", &[&weights, &first, &cells, &cell_axis], "local_weights");
    let pooled = b.node("Slice", &[&weights, &cells, &end, &cell_axis], "pooled_weights");

    let tokens = b.cast_f32("learnable_tokens", "learnable_tokens_f32");
    let learnt = b.node("MatMul", &[&qn, &tokens], "learnt_products");
    let bias = b.cast_f32("learnable_bias", "learnable_bias_f32");
    let bias = b.node("Unsqueeze", &[&bias, &row_axis], "learnable_bias_row");
    let learnt = b.node("Add", &[&learnt, &bias], "learnt");
    let local = b.node("Add", &[&local, &learnt], "local_learnt");
    let zero = b.float(0.0, "zero");
    let local = b.node("Where", &[&inside, &local, &zero], "local_inside");

    // (B, H, N, D): the weighted sums of the values.
    let v = heads(&mut b, "value", &split);
    let v = b.with("Gather", &[&v, &index], "value_window", &[("axis", BodyValue::Int(2))]);
    let local = b.node("Unsqueeze", &[&local, &last], "local_column");
    let local = b.node("Mul", &[&v, &local], "local_values");
    let local = b.with("ReduceSum", &[&local, &cell_axis], "local_sum", &[("keepdims", BodyValue::Int(0))]);
    let pooled_value = heads(&mut b, "pooled_value", &split);
    let pooled = b.node("MatMul", &[&pooled, &pooled_value], "pooled_sum");
    let out = b.node("Add", &[&local, &pooled], "out_heads");

    let gates = b.with("Transpose", &["head_gates"], "gates_heads", &[("perm", BodyValue::Ints(vec![0, 2, 1]))]);
    let gates = b.node("Unsqueeze", &[&gates, &last], "gates_column");
    let off = b.node("Equal", &[&gates, &zero], "off");
    let out = b.node("Mul", &[&out, &gates], "out_gated");
    let out = b.node("Where", &[&off, &zero, &out], "out_routed");
    let out = b.transpose(&out, [0, 2, 1, 3], "out_tokens");
    let join = b.ints(&[0, 0, -1], "join_heads");
    let out = b.node("Reshape", &[&out, &join], "out_f32");
    b.node("CastLike", &[&out, "query"], "output");
    b.finish()
}

/// (N, W) token indices of the windows' cells, and whether each cell is inside the grid. The index of a cell outside
/// is the window's own token, so that a NaN in an unrelated token cannot spread.
fn window_cells(b: &mut Builder) -> (String, String) {
    let scalar =
        |b: &mut Builder, value, name: &str| b.with("Constant", &[], name, &[("value_int", BodyValue::Int(value))]);
    let (zero, one, two) = (scalar(b, 0, "zero_int"), scalar(b, 1, "one_int"), scalar(b, 2, "two_int"));
    let height = b.int_attribute(name_of!(Attributes.height), "height_int");
    let width = b.int_attribute(name_of!(Attributes.width), "width_int");
    let window = b.int_attribute(name_of!(Attributes.window), "window_int");
    let tokens = b.node("Mul", &[&height, &width], "tokens_int");
    let cells = b.node("Mul", &[&window, &window], "cells_int");
    let reach = b.node("Div", &[&window, &two], "reach");

    let token = b.node("Range", &[&zero, &tokens, &one], "token_index");
    let token = b.node("Unsqueeze", &[&token, "last_axis"], "token_column");
    let (y, x) = divide(b, &token, &width, "token");
    let cell = b.node("Range", &[&zero, &cells, &one], "cell_index");
    let (dy, dx) = divide(b, &cell, &window, "cell");
    let (row, row_inside) = place(b, [&y, &dy, &height, &reach], "row");
    let (column, column_inside) = place(b, [&x, &dx, &width, &reach], "column");
    let inside = b.node("And", &[&row_inside, &column_inside], "inside");
    let start = b.node("Mul", &[&row, &width], "row_start");
    let index = b.node("Add", &[&start, &column], "cell_token");
    (b.node("Where", &[&inside, &index, &token], "window_index"), inside)
}

/// The coordinates on one axis of the cells at offset `step` from the start of the windows around tokens at `at`, and
/// whether they are inside the grid.
fn place(b: &mut Builder, [at, step, size, reach]: [&str; 4], axis: &str) -> (String, String) {
    let at = b.node("Add", &[at, step], &format!("{axis}_shifted"));
    let at = b.node("Sub", &[&at, reach], &format!("{axis}_of_cell"));
    let from = b.node("GreaterOrEqual", &[&at, "zero_int"], &format!("{axis}_from"));
    let to = b.node("Less", &[&at, size], &format!("{axis}_to"));
    let inside = b.node("And", &[&from, &to], &format!("{axis}_inside"));
    (at, inside)
}

/// Quotient and remainder of integers.
fn divide(b: &mut Builder, x: &str, by: &str, name: &str) -> (String, String) {
    let quotient = b.node("Div", &[x, by], &format!("{name}_row"));
    let whole = b.node("Mul", &[&quotient, by], &format!("{name}_row_start"));
    let rest = b.node("Sub", &[x, &whole], &format!("{name}_rest"));
    (quotient, rest)
}

/// (0, 0, num_heads, -1)
fn split_heads(b: &mut Builder) -> String {
    let (copy, rest, one) = (b.ints(&[0, 0], "copy"), b.ints(&[-1], "rest"), b.ints(&[1], "one"));
    let heads = b.int_attribute(name_of!(Attributes.num_heads), "num_heads_int");
    let heads = b.node("Reshape", &[&heads, &one], "num_heads_list");
    b.concat(&[&copy, &heads, &rest], "split_heads")
}

/// Input `x` (B, L, H * D) reshaped to (B, H, L, D) in f32.
fn heads(b: &mut Builder, x: &str, split: &str) -> String {
    let y = b.cast_f32(x, &format!("{x}_f32"));
    let y = b.node("Reshape", &[&y, split], &format!("{x}_split"));
    b.transpose(&y, [0, 2, 1, 3], &format!("{x}_heads"))
}

/// `z / max(|z|, 1e-12)` over the last axis.
fn unit(b: &mut Builder, z: &str, name: &str) -> String {
    let least = b.float(1e-12, &format!("{name}_least"));
    let squares = b.node("Mul", &[z, z], &format!("{name}_squares"));
    let sum = b.node("ReduceSum", &[&squares, "last_axis"], &format!("{name}_square"));
    let norm = b.node("Sqrt", &[&sum], &format!("{name}_norm"));
    let norm = b.node("Max", &[&norm, &least], &format!("{name}_divisor"));
    b.node("Div", &[z, &norm], &format!("{name}_unit"))
}
