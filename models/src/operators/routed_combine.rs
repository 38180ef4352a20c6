//! RoutedCombine: zeros in the blocks of the heads that are off, and then a linear layer.

use super::{Computed, ModelOperator, Trained};
use crate::algebra::{mask_heads, product};
use crate::error::Result;
use crate::fused;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::Tensor;
use moh_operators::List;
use moh_operators::routed_combine::{Attributes, Inputs, RoutedCombine, WeightLayout};

impl ModelOperator for RoutedCombine {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let Inputs { x, weight, head_gates, bias } = *inputs;
        let matrix = match attributes.weight_layout {
            WeightLayout::PerHead => weight.flatten_to(1)?,
            WeightLayout::OutIn => weight.t()?,
        };
        let y = product(&mask_heads(x, head_gates)?, &matrix)?;
        Ok(match bias {
            Some(bias) => y.broadcast_add(bias)?.into(),
            None => y.into(),
        })
    }

    fn train(
        attributes: &Attributes,
        inputs: &Inputs<List<'_, &Tensor>>,
        wants: &dyn Fn(&Tensor) -> bool,
    ) -> Result<Option<Trained>> {
        let Inputs { x, weight, head_gates, bias } = *inputs;
        let per_head = attributes.weight_layout == WeightLayout::PerHead;
        let matrix = match per_head {
            true => weight.flatten_to(1)?.t()?,
            false => weight.clone(),
        };
        let wants_x = wants(x);
        let x = fused::mask_heads(x, head_gates)?;
        let y = fused::linear(&x, &matrix, bias)?;
        let (gates, shape, has_bias) = (head_gates.clone(), weight.shape().clone(), bias.is_some());
        let back = move |gradient: &Tensor| {
            let [of_x, of_matrix, of_bias] = fused::linear_gradients(gradient, &x, &matrix, [wants_x, true, has_bias])?;
            let of_x = of_x.map(|of_x| fused::mask_heads(&of_x, &gates)).transpose()?;
            let of_weight = match (of_matrix, per_head) {
                (Some(matrix), true) => Some(matrix.t()?.contiguous()?.reshape(shape)?),
                (matrix, _) => matrix,
            };
            Ok(vec![of_x, of_weight, None, of_bias].into_iter().take(3 + usize::from(has_bias)).collect())
        };
        Ok(Some((y, Box::new(back))))
    }

    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let width = match *inputs.weight.dims() {
            [_, _, width] => width,
            [width, ..] => width,
            [] => 0,
        };
        Macs::of_heads(inputs.x.elements().saturating_mul(width), attributes.num_heads, inputs.head_gates)
    }
}
