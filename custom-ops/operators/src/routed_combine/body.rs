//! RoutedCombine's function body: sets the blocks of heads that are off to 0 before the product.

use super::RoutedCombine;
use crate::head_linear::{masked, transposed};
use crate::operator::{Body, BodyValue, Builder, Variant};

pub(super) fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<RoutedCombine>(variant);
    let x = masked(&mut b, "x", "x_routed");
    let weight = match variant.per_head {
        // (H, Dv, C) -> (H * Dv, C)
        true => {
            let width = b.with("Shape", &["weight"], "width", &[("start", BodyValue::Int(2))]);
            let rest = b.ints(&[-1], "rest_list");
            let shape = b.concat(&[&rest, &width], "weight_shape");
            b.node("Reshape", &["weight", &shape], "weight_matrix")
        }
        false => transposed(&mut b, &[1, 0], "weight_matrix"),
    };
    match variant.optional_inputs > 0 {
        true => {
            let y = b.node("MatMul", &[&x, &weight], "sum");
            b.node("Add", &[&y, "bias"], "output")
        }
        false => b.node("MatMul", &[&x, &weight], "output"),
    };
    b.finish()
}
