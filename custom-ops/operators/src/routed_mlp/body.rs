//! RoutedMLP's function body: computes every expert, then replaces the outputs of experts that are off by 0.

use super::{Activation, RoutedMlp};
use crate::operator::{Body, BodyValue, Builder, Variant};

pub(super) fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<RoutedMlp>(variant);
    let biases = (variant.optional_inputs > 0).then_some(["fc1_bias", "fc2_bias"]);
    experts(&mut b, "x", ["fc1_weight", "fc2_weight"], biases, variant.kind);
    b.finish()
}

/// The sum over the experts of `x` with these matrices, as the operator's output. Shapes in the comments: B, T tokens, E experts, C, F hidden, Co.
pub(crate) fn experts(b: &mut Builder, x: &str, [fc1, fc2]: [&str; 2], biases: Option<[&str; 2]>, activation: i64) {
    let experts_axis = b.ints(&[1], "experts_axis");
    // (B, 1, T, C) x (E, C, F) -> (B, E, T, F)
    let x = b.node("Unsqueeze", &[x, &experts_axis], "x_experts");
    let mut h = b.node("MatMul", &[&x, fc1], "first");
    if let Some([bias, _]) = biases {
        let bias = b.node("Unsqueeze", &[bias, &experts_axis], "fc1_bias_row");
        h = b.node("Add", &[&h, &bias], "first_biased");
    }
    let h = activate(b, &h, fc2, activation);
    let mut y = b.node("MatMul", &[&h, fc2], "second");
    if let Some([_, bias]) = biases {
        let bias = b.node("Unsqueeze", &[bias, &experts_axis], "fc2_bias_row");
        y = b.node("Add", &[&y, &bias], "second_biased");
    }
    // Gates: (B, T, E) -> (B, E, T, 1)
    let gates = b.with("Transpose", &["expert_gates"], "gates_experts", &[("perm", BodyValue::Ints(vec![0, 2, 1]))]);
    let last = b.ints(&[-1], "last_axis");
    let gates = b.node("Unsqueeze", &[&gates, &last], "gates_column");
    let zero = b.float(0.0, "zero");
    let off = b.node("Equal", &[&gates, &zero], "off");
    let y = b.cast_f32(&y, "second_f32");
    let y = b.node("Mul", &[&y, &gates], "gated");
    let y = b.node("Where", &[&off, &zero, &y], "routed");
    let y = b.with("ReduceSum", &[&y, &experts_axis], "sum", &[("keepdims", BodyValue::Int(0))]);
    b.node("CastLike", &[&y, "x"], "output");
}

fn activate(b: &mut Builder, h: &str, fc2: &str, activation: i64) -> String {
    let silu = |b: &mut Builder, x: &str, output: &str| {
        let gate = b.node("Sigmoid", &[x], &format!("{output}_sigmoid"));
        b.node("Mul", &[x, &gate], output)
    };
    let kind = usize::try_from(activation).ok().and_then(|i| Activation::ALL.get(i).copied());
    match kind.unwrap_or(Activation::Relu) {
        Activation::Relu => b.node("Relu", &[h], "hidden"),
        Activation::Gelu => b.node("Gelu", &[h], "hidden"),
        Activation::GeluTanh => {
            // 0.5 x (1 + tanh(u)) = x sigmoid(2 u). Not ONNX's Gelu, whose `approximate` attribute is a string.
            let (a, c) = (b.float(0.044_715, "gelu_cubic"), b.float(1.595_769, "gelu_scale"));
            let (a, c) =
                (b.node("CastLike", &[&a, h], "gelu_cubic_like"), b.node("CastLike", &[&c, h], "gelu_scale_like"));
            let square = b.node("Mul", &[h, h], "gelu_square");
            let cube = b.node("Mul", &[&square, h], "gelu_cube");
            let cube = b.node("Mul", &[&cube, &a], "gelu_cube_scaled");
            let u = b.node("Add", &[h, &cube], "gelu_inner");
            let u = b.node("Mul", &[&u, &c], "gelu_inner_scaled");
            let gate = b.node("Sigmoid", &[&u], "gelu_sigmoid");
            b.node("Mul", &[h, &gate], "hidden")
        }
        Activation::Silu => silu(b, h, "hidden"),
        Activation::SwiGlu => {
            let shape =
                b.with("Shape", &[fc2], "fc2_rows", &[("start", BodyValue::Int(1)), ("end", BodyValue::Int(2))]);
            let (zero, last) = (b.ints(&[0], "gate_start"), b.ints(&[3], "column_axis"));
            let two = b.ints(&[2], "two");
            let end = b.node("Mul", &[&shape, &two], "fc1_columns");
            let gate = b.node("Slice", &[h, &zero, &shape, &last], "swiglu_gate");
            let other = b.node("Slice", &[h, &shape, &end, &last], "swiglu_other");
            let gate = silu(b, &gate, "swiglu_gate_silu");
            b.node("Mul", &[&gate, &other], "hidden")
        }
    }
}
