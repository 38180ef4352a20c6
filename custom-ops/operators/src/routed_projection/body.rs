//! RoutedProjection's function body: computes every head, then replaces the outputs of heads that are off by 0.

use super::RoutedProjection;
use crate::head_linear::{masked, transposed};
use crate::operator::{Body, Builder, Variant};

pub(super) fn body(variant: Variant) -> Body {
    let mut b = Builder::new::<RoutedProjection>(variant);
    let weight = match variant.per_head {
        // (H, C, D) -> (C, H * D)
        true => {
            let weight = transposed(&mut b, &[1, 0, 2], "weight_by_row");
            let shape = b.ints(&[0, -1], "weight_shape");
            b.node("Reshape", &[&weight, &shape], "weight_matrix")
        }
        false => transposed(&mut b, &[1, 0], "weight_matrix"),
    };
    let mut y = b.node("MatMul", &["x", &weight], "all_heads");
    if variant.optional_inputs > 0 {
        y = b.node("Add", &[&y, "bias"], "all_heads_biased");
    }
    masked(&mut b, &y, "output");
    b.finish()
}
