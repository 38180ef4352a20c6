//! RoutedProjection: a linear layer, and then zeros in the blocks of the heads that are off.

use super::{Computed, ModelOperator};
use crate::algebra::{mask_heads, product};
use crate::error::Result;
use crate::fused;
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::Tensor;
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

    /// Without the zeros: what reads the blocks multiplies those of heads that are off by 0.
    fn train(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let matrix = match attributes.weight_layout {
            WeightLayout::PerHead => inputs.weight.transpose(0, 1)?.flatten_from(1)?,
            WeightLayout::OutIn => inputs.weight.t()?,
        };
        let y = product(inputs.x, &matrix)?;
        Ok(match inputs.bias {
            Some(bias) => fused::add_bias(&y, bias)?.into(),
            None => y.into(),
        })
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
