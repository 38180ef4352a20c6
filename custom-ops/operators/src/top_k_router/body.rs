//! TopKRouter's function body.

use super::{Attributes, Kind, TopKRouter};
use crate::attributes::name_of;
use crate::operator::{Body, BodyValue, Builder, Variant};

const LAST: [(&str, BodyValue); 1] = [("axis", BodyValue::Int(-1))];

/// Shapes in the comments: B, T tokens, H heads, S of them shared, R routed, K = top_k.
pub(super) fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<TopKRouter>(variant);
    let kind = |kind: Kind| variant.kind == kind as i64;
    if kind(Kind::QueryNorms) {
        query_norms(&mut b);
    } else if kind(Kind::Probabilities) || kind(Kind::Renormalized) {
        let counts = Counts::new(&mut b);
        let scores = b.cast_f32("scores", "scores_f32");
        select(&mut b, &scores, &counts.top_k, kind(Kind::Probabilities), "head_gates");
    } else {
        two_stage(&mut b);
    }
    b.finish()
}

/// Attributes as int64 tensors of one element.
struct Counts {
    zero: String,
    one: String,
    top_k: String,
}

impl Counts {
    fn new(b: &mut Builder) -> Counts {
        let (zero, one) = (b.ints(&[0], "zero_list"), b.ints(&[1], "one_list"));
        let top_k = b.int_attribute(name_of!(Attributes.top_k), "top_k_int");
        Counts { top_k: b.node("Reshape", &[&top_k, &one], "top_k_list"), zero, one }
    }
}

/// Softmax over the `k` largest scores, or over all, at the positions of the `k` largest; 0 elsewhere.
fn select(b: &mut Builder, scores: &str, k: &str, over_all: bool, output: &str) -> String {
    let (values, indices) = b.top_k(scores, k, "selected");
    let weights = match over_all {
        true => {
            let all = b.with("Softmax", &[scores], "probabilities", &LAST);
            b.with("GatherElements", &[&all, &indices], "weights", &LAST)
        }
        false => b.with("Softmax", &[&values], "weights", &LAST),
    };
    scatter(b, scores, &indices, &weights, output)
}

/// `values` at `indices` along the last axis of a tensor shaped like `x`; 0 elsewhere.
fn scatter(b: &mut Builder, x: &str, indices: &str, values: &str, output: &str) -> String {
    let shape = b.node("Shape", &[x], "routed_shape");
    // tract reads a ConstantOfShape without a value as float64, hence an explicit zero.
    let zero = b.float(0.0, "zero");
    let zeros = b.node("Expand", &[&zero, &shape], "off");
    b.with("ScatterElements", &[&zeros, indices, values], output, &LAST)
}

/// Kind 3. Shared heads get a score above every norm, and the K + S largest are selected.
fn query_norms(b: &mut Builder) {
    let counts = Counts::new(b);
    let is_shared = is_shared(b);
    let shared = b.node("Shape", &["shared_heads_list"], "num_shared");
    let places = b.node("Add", &[&counts.top_k, &shared], "places");
    let (copy, rest) = (b.ints(&[0, 0], "copy"), b.ints(&[-1], "rest"));
    let heads = b.node("Reshape", &["num_heads_int", &counts.one], "num_heads_list");
    let split = b.concat(&[&copy, &heads, &rest], "split_heads");
    // (B, T, H, D) -> (B, T, H).
    let query = b.node("Reshape", &["scores", &split], "queries");
    let query = b.cast_f32(&query, "queries_f32");
    let squares = b.node("Mul", &[&query, &query], "squares");
    let norms = b.with("ReduceSum", &[&squares, &rest], "norms", &[("keepdims", BodyValue::Int(0))]);
    let first = b.float(f32::INFINITY, "first");
    let norms = b.node("Where", &[&is_shared, &first, &norms], "places_by_norm");
    let (_, indices) = b.top_k(&norms, &places, "selected");
    let shape = b.node("Shape", &[&indices], "selected_shape");
    let on = b.float(1.0, "on");
    let ones = b.node("Expand", &[&on, &shape], "ones");
    scatter(b, &norms, &indices, &ones, "head_gates");
}

/// (H) booleans: which heads are shared. Also defines the values `num_heads_int`, `shared_heads_list` and
/// `head_index`.
fn is_shared(b: &mut Builder) -> String {
    let heads = b.int_attribute(name_of!(Attributes.num_heads), "num_heads_int");
    let (zero, one) = (b.int(0, "zero_int"), b.int(1, "one_int"));
    let index = b.node("Range", &[&zero, &heads, &one], "head_index");
    let shared = b.with(
        "Constant",
        &[],
        "shared_heads_list",
        &[("value_ints", BodyValue::Attribute(name_of!(Attributes.shared_heads)))],
    );
    // -1, which is no head, is prepended so that the reduced axis is never empty.
    let none = b.ints(&[-1], "no_head");
    let shared = b.concat(&[&none, &shared], "shared_heads_row");
    let column = b.node("Unsqueeze", &[&index, &none], "head_column");
    let equal = b.node("Equal", &[&column, &shared], "head_is_shared_head");
    let equal = b.cast_f32(&equal, "head_is_shared_head_f32");
    let any = b.with("ReduceMax", &[&equal, &none], "head_is_shared", &[("keepdims", BodyValue::Int(0))]);
    b.with("Cast", &[&any], "is_shared", &[("to", BodyValue::Int(ONNX_BOOL))])
}

/// `TensorProto.DataType.BOOL`.
const ONNX_BOOL: i64 = 9;

/// Kind 0. Branch-free: parts that do not exist are computed from zero columns or columns of other parts, and
/// discarded.
fn two_stage(b: &mut Builder) {
    let Counts { zero, one, top_k } = Counts::new(b);
    let is_shared = is_shared(b);
    let axis = b.ints(&[2], "last_axis");
    let heads = b.node("Reshape", &["num_heads_int", &one], "num_heads_list");
    let shared = b.node("Shape", &["shared_heads_list"], "num_shared");
    let routes = b.node("Min", &[&top_k, &one], "routes");
    let shares = b.node("Min", &[&shared, &one], "shares");
    // Start and end of the parts' columns.
    let routed = b.node("Sub", &[&heads, &shared], "num_routed");
    let balance = b.node("Mul", &[&routed, &routes], "balance_start");
    let has_balance = b.node("Mul", &[&routes, &shares], "has_balance");
    let two = b.ints(&[2], "two_list");
    let balance_columns = b.node("Mul", &[&has_balance, &two], "balance_columns");
    let shared_start = b.node("Add", &[&balance, &balance_columns], "shared_start");
    let shared_columns = b.node("Max", &[&shared, &one], "shared_columns");
    let shared_end = b.node("Add", &[&shared_start, &shared_columns], "shared_end");
    let balance_end = b.node("Add", &[&balance, &two], "balance_end");
    let routed_end = b.node("Max", &[&balance, &one], "routed_end");

    // A single shared head has no column; its score is 0.
    let scores = b.cast_f32("scores", "scores_f32");
    // In two steps: onnxruntime up to 1.20 misreads a list that is a constant of a function.
    let before = b.ints(&[0; 5], "no_pads");
    let pads = b.concat(&[&before, &two], "pads");
    let scores = b.node("Pad", &[&scores, &pads], "scores_padded");
    let k = b.node("Max", &[&top_k, &one], "selected_count");
    let routed = b.node("Slice", &[&scores, &zero, &routed_end, &axis], "routed_scores");
    let routed = select(b, &routed, &k, false, "routed_weights");
    let shared_scores = b.node("Slice", &[&scores, &shared_start, &shared_end, &axis], "shared_scores");
    let shared_weights = b.with("Softmax", &[&shared_scores], "shared_weights", &LAST);

    // (B, T, 2) or (2): the sum of each part's gates, shared part first.
    let sums = b.concat(&[&shared, &top_k], "active");
    let sums = b.cast_f32(&sums, "active_f32");
    let balance = b.node("Slice", &[&scores, &balance, &balance_end, &axis], "balance_scores");
    let balance = b.with("Softmax", &[&balance], "balance", &LAST);
    let twice = b.node("Add", &[&sums, &sums], "active_twice");
    let balanced = b.node("Mul", &[&balance, &twice], "balanced");
    let has_balance = b.with("Cast", &[&has_balance], "is_balanced", &[("to", BodyValue::Int(ONNX_BOOL))]);
    let factors = b.node("Where", &[&has_balance, &balanced, &sums], "factors");
    let of_shared = b.node("Slice", &[&factors, &zero, &one, &axis], "shared_factor");
    let of_routed = b.node("Slice", &[&factors, &one, &two, &axis], "routed_factor");
    let shared_gates = b.node("Mul", &[&shared_weights, &of_shared], "shared_gates");
    let routed_gates = b.node("Mul", &[&routed, &of_routed], "routed_gates");
    let gates = b.with("Concat", &[&shared_gates, &routed_gates], "part_gates", &LAST);

    // Permutation of heads into the order of the parts, and its inverse: the position of each head's gate. The sort is
    // stable.
    let shared_first = b.cast_f32(&is_shared, "shared_first");
    let (_, order) = b.top_k(&shared_first, &heads, "order");
    let ascending = [("axis", BodyValue::Int(-1)), ("largest", BodyValue::Int(0))];
    let place = b.with("TopK", &[&order, &heads], "place", &ascending);
    let place = format!("{place}_indices");
    // Without shared heads the shared part still has one column.
    let unused = b.node("Sub", &[&one, &shares], "unused");
    let place = b.node("Add", &[&place, &unused], "place_among_parts");
    b.with("Gather", &[&gates, &place], "head_gates", &[("axis", BodyValue::Int(2))]);
}
