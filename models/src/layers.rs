//! Layers between tokens and heads or experts, with their weights.

use crate::checkpoint::Weight;
use crate::error::Result;
use crate::operators::Argument;
use crate::ops::{Linear, Ops};
use moh_operators::routed_mlp::{self, Activation, RoutedMlp};
use moh_operators::{RoutedCombine, RoutedProjection, WeightLayout, routed_combine, routed_projection};

/// A linear layer whose output (of a projection) or input (of a combination) is split into heads.
#[derive(Debug, Clone)]
pub struct HeadLinear {
    /// As nn.Linear stores it, (out, in); or one matrix a head, (num_heads, in, out).
    pub weight: Weight,
    /// (out).
    pub bias: Option<Weight>,
    /// Heads.
    pub num_heads: usize,
}

impl Linear {
    /// The same layer between tokens and `num_heads` heads.
    pub fn over_heads(self, num_heads: usize) -> HeadLinear {
        HeadLinear { weight: self.weight, bias: self.bias, num_heads }
    }
}

impl HeadLinear {
    fn weight_layout(&self) -> WeightLayout {
        if self.weight.shape().len() == 3 { WeightLayout::PerHead } else { WeightLayout::OutIn }
    }

    /// The heads' blocks, (batch, q_len, num_heads * head_dim), of the tokens `x`: RoutedProjection.
    ///
    /// # Errors
    /// What the interpreter fails with.
    pub fn project<O: Ops>(&self, ops: &mut O, x: &O::Value, gates: &O::Value) -> Result<O::Value> {
        let attributes =
            routed_projection::Attributes { num_heads: self.num_heads, weight_layout: self.weight_layout() };
        let inputs = routed_projection::Inputs {
            x: Argument::Value(x),
            weight: Argument::Weight(&self.weight),
            head_gates: Argument::Value(gates),
            bias: self.bias.as_ref().map(Argument::Weight),
        };
        ops.operator::<RoutedProjection>(attributes, &inputs)
    }

    /// The tokens, (batch, q_len, width), that the heads' blocks `x` make: RoutedCombine.
    ///
    /// # Errors
    /// What the interpreter fails with.
    pub fn combine<O: Ops>(&self, ops: &mut O, x: &O::Value, gates: &O::Value) -> Result<O::Value> {
        let attributes = routed_combine::Attributes { num_heads: self.num_heads, weight_layout: self.weight_layout() };
        let inputs = routed_combine::Inputs {
            x: Argument::Value(x),
            weight: Argument::Weight(&self.weight),
            head_gates: Argument::Value(gates),
            bias: self.bias.as_ref().map(Argument::Weight),
        };
        ops.operator::<RoutedCombine>(attributes, &inputs)
    }
}

/// A mixture of feed-forward experts.
#[derive(Debug, Clone)]
pub struct Experts {
    /// (num_experts, width, hidden), twice as many columns for SwiGLU.
    pub fc1: Weight,
    /// (num_experts, hidden, out).
    pub fc2: Weight,
    /// (num_experts, columns of fc1) and (num_experts, out).
    pub biases: Option<(Weight, Weight)>,
    /// What happens between them.
    pub activation: Activation,
}

impl Experts {
    /// The experts' outputs for the tokens `x`, (batch, q_len, width), weighted with the gates (batch, q_len, num_experts):
    /// RoutedMLP.
    ///
    /// # Errors
    /// What the interpreter fails with.
    pub fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value, gates: &O::Value) -> Result<O::Value> {
        let attributes = routed_mlp::Attributes { num_experts: self.fc1.shape()[0], activation: self.activation };
        let inputs = routed_mlp::Inputs {
            x: Argument::Value(x),
            fc1_weight: Argument::Weight(&self.fc1),
            fc2_weight: Argument::Weight(&self.fc2),
            expert_gates: Argument::Value(gates),
            fc1_bias: self.biases.as_ref().map(|(bias, _)| Argument::Weight(bias)),
            fc2_bias: self.biases.as_ref().map(|(_, bias)| Argument::Weight(bias)),
        };
        ops.operator::<RoutedMlp>(attributes, &inputs)
    }
}
