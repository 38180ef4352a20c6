//! RoutedMLP: every expert's feed-forward layer, and then the sum with the gates.

use super::{Computed, ModelOperator};
use crate::algebra::{product, silu};
use crate::error::{Error, Result};
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::{D, Tensor};
use moh_operators::List;
use moh_operators::routed_mlp::{Activation, Attributes, Inputs, RoutedMlp};

impl ModelOperator for RoutedMlp {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let mut sum: Option<Tensor> = None;
        for e in 0..attributes.num_experts {
            let mut h = product(inputs.x, &inputs.fc1_weight.get(e)?)?;
            if let Some(bias) = inputs.fc1_bias {
                h = h.broadcast_add(&bias.get(e)?)?;
            }
            let h = match attributes.activation {
                Activation::Relu => h.relu()?,
                Activation::Gelu => h.gelu_erf()?,
                Activation::GeluTanh => h.gelu()?,
                Activation::Silu => silu(&h)?,
                Activation::SwiGlu => {
                    let hidden = h.dim(D::Minus1)? / 2;
                    (silu(&h.narrow(D::Minus1, 0, hidden)?)? * h.narrow(D::Minus1, hidden, hidden)?)?
                }
            };
            let mut y = product(&h, &inputs.fc2_weight.get(e)?)?;
            if let Some(bias) = inputs.fc2_bias {
                y = y.broadcast_add(&bias.get(e)?)?;
            }
            let y = y.broadcast_mul(&inputs.expert_gates.narrow(D::Minus1, e, 1)?)?;
            sum = Some(match sum {
                Some(sum) => (sum + y)?,
                None => y,
            });
        }
        Ok(sum.ok_or(Error::Internal("a mixture of no experts"))?.into())
    }

    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let tokens: usize = inputs.x.dims()[..2].iter().product();
        let numbers = inputs.fc1_weight.elements() + inputs.fc2_weight.elements();
        Macs::of_heads(tokens.saturating_mul(numbers), attributes.num_experts, inputs.expert_gates)
    }
}
