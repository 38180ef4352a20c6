//! RoutedAttention's function body: computes every head, then replaces the outputs of heads that are off by 0.

use super::{Attributes, RoutedAttention};
use crate::attributes::name_of;
use crate::operator::{Body, BodyValue, Builder, Variant};

/// Shapes in the comments: B, H heads, G = kv_num_heads, R = H/G, Tq, S, D, Dv.
pub(super) fn body(variant: Variant) -> Body {
    let mut builder = Builder::new::<RoutedAttention>(variant);
    let b = &mut builder;
    let layout = Layout::new(b);
    let k = b.cast_f32("key", "key_f32");
    let v = b.cast_f32("value", "value_f32");
    let (k, v) = if variant.per_head {
        (b.transpose(&k, [0, 1, 3, 2], "key_heads"), v)
    } else {
        let split = b.concat(&["copy", "copy", &layout.groups, "rest"], "split_kv_heads");
        let k = b.node("Reshape", &[&k, &split], "key_split");
        let v = b.node("Reshape", &[&v, &split], "value_split");
        (b.transpose(&k, [0, 2, 3, 1], "key_heads"), b.transpose(&v, [0, 2, 1, 3], "value_heads"))
    };
    attend(b, &layout, [&k, &v], variant.portable, |b, mut scores| {
        if variant.optional_inputs > 0 {
            let bias = b.cast_f32("attn_bias", "attn_bias_f32");
            scores = b.node("Add", &[&scores, &bias], "scores_biased");
        }
        let minus_inf = b.float(f32::NEG_INFINITY, "minus_inf");
        if variant.causal {
            let allowed = causal_mask(b, &scores);
            scores = b.node("Where", &[&allowed, &scores, &minus_inf], "scores_masked");
        }
        scores
    });
    builder.finish()
}

/// Queries and the shapes that stack and split heads, as int64 lists. Also defines the values `copy`, `rest` and `q_len_list`.
pub(crate) struct Layout {
    groups: String,
    stack: String,
    unstack: String,
    /// (B, G, R*Tq, D)
    query: String,
}

impl Layout {
    /// Of the operator's `query`, `num_heads`, `kv_num_heads` and `scale`.
    pub(crate) fn new(b: &mut Builder) -> Layout {
        let one = b.ints(&[1], "one");
        let copy = b.ints(&[0], "copy");
        let rest = b.ints(&[-1], "rest");
        let heads = b.int_attribute(name_of!(Attributes.num_heads), "num_heads_scalar");
        let heads = b.node("Reshape", &[&heads, &one], "num_heads_list");
        let groups = b.int_attribute(name_of!(Attributes.kv_num_heads), "kv_num_heads_scalar");
        let groups = b.node("Reshape", &[&groups, &one], "kv_num_heads_list");
        let scale = b.float_attribute(name_of!(Attributes.scale), "scale_scalar");

        // Queries of the heads that share a KV head are stacked: (B, G, R*Tq, D), so that keys are not copied. R*Tq is
        // computed explicitly: not every runtime can resolve a -1 in Reshape with symbolic dimensions.
        let bounds = [("start", BodyValue::Int(1)), ("end", BodyValue::Int(2))];
        let q_len = b.with("Shape", &["query"], "q_len_list", &bounds);
        let group_size = b.node("Div", &[&heads, &groups], "group_size");
        let rows = b.node("Mul", &[&group_size, &q_len], "stacked_rows");
        let split_heads = b.concat(&[&copy, &copy, &heads, &rest], "split_heads");
        let stack = b.concat(&[&copy, &groups, &rows, &copy], "stack_group");
        let unstack = b.concat(&[&copy, &heads, &q_len, &copy], "unstack_group");
        let q = b.cast_f32("query", "query_f32");
        let q = b.node("Mul", &[&q, &scale], "query_scaled");
        let q = b.node("Reshape", &[&q, &split_heads], "query_split");
        let q = b.transpose(&q, [0, 2, 1, 3], "query_heads");
        let query = b.node("Reshape", &[&q, &stack], "query_stacked");
        Layout { groups, stack, unstack, query }
    }
}

/// Attention to keys (B, G, D, S) and values (B, G, S, Dv), and the gates. `mask` changes the scores (B, H, Tq, S) and
/// defines the value `minus_inf`.
pub(crate) fn attend(
    b: &mut Builder,
    layout: &Layout,
    [k, v]: [&str; 2],
    portable: bool,
    mask: impl FnOnce(&mut Builder, String) -> String,
) {
    let Layout { stack, unstack, query, .. } = layout;
    let scores = b.node("MatMul", &[query, k], "scores_stacked");
    let scores = b.node("Reshape", &[&scores, unstack], "scores");
    let scores = mask(b, scores);

    let zero = b.float(0.0, "zero");
    let keep = [("keepdims", BodyValue::Int(1))];
    let row_max = b.with("ReduceMax", &[&scores, "rest"], "row_max", &keep);
    let (weights, dead, sum) = if portable {
        // Runtimes differ in ReduceMax and Softmax of a row of -inf, so the maximum is clamped; the sum of
        // exponentials is then 0 in all of them.
        let lowest = b.float(f32::MIN, "lowest");
        let row_max = b.node("Max", &[&row_max, &lowest], "row_max_finite");
        let weights = b.node("Sub", &[&scores, &row_max], "scores_shifted");
        let weights = b.node("Exp", &[&weights], "weights");
        let sum = b.with("ReduceSum", &[&weights, "rest"], "row_sum", &keep);
        let dead = b.node("Equal", &[&sum, &zero], "dead");
        (weights, dead, Some(sum))
    } else {
        // Softmax of a fully masked row is NaN. It is replaced after the product with the values, where the tensor is
        // smaller.
        let dead = b.node("Equal", &[&row_max, "minus_inf"], "dead");
        (b.with("Softmax", &[&scores], "weights", &[("axis", BodyValue::Int(-1))]), dead, None)
    };
    let weights = b.node("Reshape", &[&weights, stack], "weights_stacked");
    let out = b.node("MatMul", &[&weights, v], "out_stacked");
    let mut out = b.node("Reshape", &[&out, unstack], "out_heads");
    if let Some(sum) = sum {
        out = b.node("Div", &[&out, &sum], "out_mean");
    }

    let gates = b.with("Transpose", &["head_gates"], "gates_heads", &[("perm", BodyValue::Ints(vec![0, 2, 1]))]);
    let gates = b.node("Unsqueeze", &[&gates, "rest"], "gates_column");
    let off = b.node("Equal", &[&gates, &zero], "off");
    let off = b.node("Or", &[&off, &dead], "off_or_dead");
    let out = b.node("Mul", &[&out, &gates], "out_gated");
    let out = b.node("Where", &[&off, &zero, &out], "out_routed");
    let out = b.transpose(&out, [0, 2, 1, 3], "out_tokens");
    let join = b.ints(&[0, 0, -1], "join_heads");
    let out = b.node("Reshape", &[&out, &join], "out_f32");
    b.node("CastLike", &[&out, "query"], "output");
}

/// (Tq, S) booleans: whether the query may see the key. All true if the node's `is_causal` is 0.
fn causal_mask(b: &mut Builder, scores: &str) -> String {
    let zero = b.with("Constant", &[], "zero_int", &[("value_int", BodyValue::Int(0))]);
    let one = b.with("Constant", &[], "one_int", &[("value_int", BodyValue::Int(1))]);
    let shape = b.with("Shape", &[scores], "scores_shape", &[("start", BodyValue::Int(2))]);
    let q_len = b.with("Gather", &[&shape, &zero], "q_len", &[("axis", BodyValue::Int(0))]);
    let kv_len = b.with("Gather", &[&shape, &one], "kv_len", &[("axis", BodyValue::Int(0))]);
    let newest = b.node("Range", &[&zero, &q_len, &one], "query_index");
    let shift = b.node("Sub", &[&kv_len, &q_len], "causal_shift");
    let newest = b.node("Add", &[&newest, &shift], "newest_key");
    let newest = b.node("Unsqueeze", &[&newest, "rest"], "newest_key_column");
    let keys = b.node("Range", &[&zero, &kv_len, &one], "key_index");
    let visible = b.node("LessOrEqual", &[&keys, &newest], "visible");
    let causal = b.int_attribute(name_of!(Attributes.is_causal), "is_causal_scalar");
    let full = b.node("Equal", &[&causal, &zero], "is_full");
    b.node("Or", &[&visible, &full], "allowed")
}
