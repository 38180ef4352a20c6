//! RoutedProjection: a linear layer, and then zeros in the blocks of the heads that are off.

use super::{Computed, ModelOperator, Trained};
use crate::algebra::{mask_heads, product};
use crate::error::Result;
use crate::fused;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::{D, Tensor};
use moh_operators::List;
use moh_operators::routed_projection::{Attributes, Inputs, RoutedProjection, WeightLayout};

impl ModelOperator for RoutedProjection {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let Inputs { x, weight, head_gates, bias } = *inputs;
        let matrix = match attributes.weight_layout {
            WeightLayout::PerHead => weight.transpose(0, 1)?.flatten_from(1)?,
            WeightLayout::OutIn => weight.t()?,
        };
        let mut y = product(x, &matrix)?;
        if let Some(bias) = bias {
            y = y.broadcast_add(bias)?;
        }
        Ok(mask_heads(&y, head_gates)?.into())
    }

    fn train(
        attributes: &Attributes,
        inputs: &Inputs<List<'_, &Tensor>>,
        wants: &dyn Fn(&Tensor) -> bool,
    ) -> Result<Option<Trained>> {
        let Inputs { x, weight, head_gates, bias } = *inputs;
        let per_head = attributes.weight_layout == WeightLayout::PerHead;
        let matrix = match per_head {
            true => weight.transpose(1, 2)?.flatten_to(1)?,
            false => weight.clone(),
        };
        let y = fused::linear(x, &matrix, bias)?;
        let y = y.reshape((x.dim(0)?, x.dim(1)?, ()))?;
        fused::mask_in_place(&y, head_gates)?;
        let (x, gates, has_bias, wants_x) = (x.clone(), head_gates.clone(), bias.is_some(), wants(x));
        let (heads, width) = (attributes.num_heads, x.dim(D::Minus1)?);
        let back = move |gradient: &Tensor| {
            let gradient = fused::mask_heads(gradient, &gates)?;
            let [of_x, of_matrix, of_bias] =
                fused::linear_gradients(&gradient, &x, &matrix, [wants_x, true, has_bias])?;
            let of_weight = match (of_matrix, per_head) {
                (Some(matrix), true) => Some(matrix.reshape((heads, (), width))?.transpose(1, 2)?),
                (matrix, _) => matrix,
            };
            Ok(vec![of_x, of_weight, None, of_bias].into_iter().take(3 + usize::from(has_bias)).collect())
        };
        Ok(Some((y, Box::new(back))))
    }

    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let blocks = match *inputs.weight.dims() {
            [heads, _, dim] => heads * dim,
            [blocks, ..] => blocks,
            [] => 0,
        };
        Macs::of_heads(inputs.x.elements().saturating_mul(blocks), attributes.num_heads, inputs.head_gates)
    }
}
