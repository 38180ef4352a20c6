//! RoutedCombine: zeros in the blocks of the heads that are off, and then a linear layer.

use super::{Computed, ModelOperator};
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

    /// Without the zeros: attention has them in the blocks of heads that are off.
    fn train(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let matrix = match attributes.weight_layout {
            WeightLayout::PerHead => inputs.weight.flatten_to(1)?,
            WeightLayout::OutIn => inputs.weight.t()?,
        };
        let y = product(inputs.x, &matrix)?;
        Ok(match inputs.bias {
            Some(bias) => fused::add_bias(&y, bias)?.into(),
            None => y.into(),
        })
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
