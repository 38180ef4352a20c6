//! The `ai.moh` operators as models use them: computed in candle, and counted. One file and one line an operator.
//!
//! candle computes them densely in tensor algebra, sharing nothing with the kernels and their reference: it is the other
//! opinion.

use crate::checkpoint::Weight;
use crate::error::{Error, Result};
use crate::macs::Macs;
use crate::ops::Ops;
use crate::routing::Choice;
use crate::shape::Shape;
use candle_core::Tensor;
use moh_operators::{Attributes, Definition, List};

/// An operator that models use.
pub trait ModelOperator: Definition {
    /// The output in float32.
    ///
    /// # Errors
    /// What candle fails with.
    fn compute(attributes: &Self::Attributes, inputs: &Self::Inputs<List<'_, &Tensor>>) -> Result<Computed>;

    /// The same output in a training on the CPU, and what gives from its gradient those of the inputs that there are, in order; `wants` says
    /// which are needed. Nothing where candle differentiates [`ModelOperator::compute`].
    ///
    /// # Errors
    /// As [`ModelOperator::compute`].
    fn train(
        _: &Self::Attributes,
        _: &Self::Inputs<List<'_, &Tensor>>,
        _wants: &dyn Fn(&Tensor) -> bool,
    ) -> Result<Option<Trained>> {
        Ok(None)
    }

    /// Multiply-accumulates of a call.
    fn macs(attributes: &Self::Attributes, inputs: &Self::Inputs<List<'_, &Shape>>) -> Macs;
}

/// An output, and the gradients of what it was computed from.
pub type Trained = (Tensor, crate::graph::Back);

/// What an operator's computation gives.
pub struct Computed {
    /// The output.
    pub output: Tensor,
    /// Of a selection: for every token the distance from the last head kept to the first one dropped, relative to the former.
    pub margins: Option<Tensor>,
    /// Of a selection: what it was made from.
    pub choice: Option<Choice>,
}

impl From<Tensor> for Computed {
    fn from(output: Tensor) -> Computed {
        Computed { output, margins: None, choice: None }
    }
}

/// An operator's input in a model.
#[derive(Debug)]
pub enum Argument<'a, V> {
    /// A computed value.
    Value(&'a V),
    /// A tensor of the checkpoint, in the type that the operator declares: its type parameter, or float32.
    Weight(&'a Weight),
}

// Not derived: that would ask for values that can be copied.
impl<V> Clone for Argument<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Argument<'_, V> {}

/// The inputs of a call as operator `O` declares them, from those in their order.
pub(crate) fn inputs<'a, O: Definition, V>(list: &'a [Option<&'a V>]) -> Result<O::Inputs<List<'a, &'a V>>> {
    let Some(absent) = list.iter().copied().flatten().next() else {
        return Err(Error::Internal("an operator without inputs"));
    };
    let Ok(inputs) = O::inputs(&List { inputs: list, absent });
    Ok(inputs)
}

macro_rules! operators {
    ($($module:ident::$operator:ident),+ $(,)?) => {
        $(mod $module;)+

        /// The names of the operators that models may use.
        pub const NAMES: &[&str] = &[$(<moh_operators::$operator as Definition>::NAME),+];

        /// What an operator that is known only at run time makes of these inputs, in their order.
        ///
        /// # Errors
        /// An operator that models do not use; what candle fails with.
        pub fn compute(attributes: &Attributes, list: &[Option<&Tensor>]) -> Result<Computed> {
            $(
                if let Ok(attributes) = attributes.get::<moh_operators::$operator>() {
                    return moh_operators::$operator::compute(
                        attributes,
                        &inputs::<moh_operators::$operator, _>(list)?,
                    );
                }
            )+
            Err(Error::Internal("an operator that models do not use"))
        }

        /// Calls an operator that is known only at run time; `list` are its inputs, in their order.
        ///
        /// # Errors
        /// An operator that models do not use, or without inputs; what the interpreter fails with.
        pub(crate) fn play<P: Ops>(
            ops: &mut P,
            attributes: &Attributes,
            list: &[Option<Argument<'_, P::Value>>],
        ) -> Result<P::Value> {
            let Some(absent) = list.iter().copied().flatten().next() else {
                return Err(Error::Internal("an operator without inputs"));
            };
            let reader = List { inputs: list, absent };
            $(
                if let Ok(attributes) = attributes.get::<moh_operators::$operator>() {
                    let Ok(inputs) = <moh_operators::$operator as Definition>::inputs(&reader);
                    return ops.operator::<moh_operators::$operator>(attributes.clone(), &inputs);
                }
            )+
            Err(Error::Internal("an operator that models do not use"))
        }

        // Every one of them is counted too.
        const _: fn() = || {
            fn is_used<O: ModelOperator>() {}
            $(is_used::<moh_operators::$operator>();)+
        };
    };
}

operators! {
    aggregated_attention::RoutedAggregatedAttention,
    cache_update::CacheUpdate,
    routed_attention::RoutedAttention,
    routed_cached_attention::RoutedCachedAttention,
    routed_combine::RoutedCombine,
    routed_mlp::RoutedMlp,
    routed_projection::RoutedProjection,
    top_k_router::TopKRouter,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sample::Rng;
    use candle_core::{Device, Var};
    use moh_operators::routed_projection::WeightLayout;
    use moh_operators::{
        RoutedAggregatedAttention, RoutedAttention, RoutedCombine, RoutedProjection, aggregated_attention,
        routed_attention, routed_combine, routed_projection,
    };

    fn random(seed: u64, shape: &[usize]) -> Var {
        let mut rng = Rng::new(seed);
        Var::from_vec((0..shape.iter().product()).map(|_| rng.normal()).collect(), shape, &Device::Cpu).unwrap()
    }

    /// Output and gradients of the variables among the inputs are those that candle finds. Gives the output.
    fn agree<O: ModelOperator>(
        attributes: &O::Attributes,
        vars: &[&Var],
        inputs: &O::Inputs<List<'_, &Tensor>>,
    ) -> Vec<f32> {
        let flat = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let y = O::compute(attributes, inputs).unwrap().output;
        let gradient = random(9, y.dims()).as_detached_tensor();
        let expected = (&y * &gradient).unwrap().sum_all().unwrap().backward().unwrap();
        let (found_y, back) = O::train(attributes, inputs, &|_| true).unwrap().unwrap();
        let near = |found: &Tensor, expected: &Tensor, what: &str| {
            let (found, expected) = (flat(found), flat(expected));
            let size = expected.iter().fold(1f32, |size, x| size.max(x.abs()));
            assert_eq!(found.len(), expected.len(), "{what}");
            let worst = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!(worst <= 2e-5 * size, "{what} differs by {worst} of {size}");
        };
        near(&found_y, &y, "the output");
        let found = back(&gradient).unwrap();
        let given: Vec<&Tensor> = O::list(inputs).into_iter().flatten().collect();
        assert_eq!(found.len(), given.len());
        for var in vars {
            let at = given.iter().position(|input| input.id() == var.id()).unwrap();
            near(found[at].as_ref().unwrap(), expected.get(var).unwrap(), &format!("gradient {at}"));
        }
        flat(&found_y)
    }

    fn gates() -> Tensor {
        Tensor::new(&[[[1f32, 0.0, 0.5], [0.0, 0.0, 2.0]]], &Device::Cpu).unwrap()
    }

    /// In a family of another crate, nothing else may make the blocks of heads that are off zeros.
    #[test]
    fn projections() {
        for layout in [WeightLayout::OutIn, WeightLayout::PerHead] {
            let shape: &[usize] = if layout == WeightLayout::OutIn { &[12, 5] } else { &[3, 5, 4] };
            let (x, weight, bias, gates) = (random(1, &[1, 2, 5]), random(2, shape), random(3, &[12]), gates());
            let attributes = routed_projection::Attributes { num_heads: 3, weight_layout: layout };
            let inputs = routed_projection::Inputs { x: &*x, weight: &*weight, head_gates: &gates, bias: Some(&*bias) };
            let y = agree::<RoutedProjection>(&attributes, &[&x, &weight, &bias], &inputs);
            assert_eq!(y[4..8], [0.0; 4]);
            let inputs = routed_projection::Inputs { bias: None, ..inputs };
            agree::<RoutedProjection>(&attributes, &[&x, &weight], &inputs);
        }
    }

    #[test]
    fn combinations() {
        for layout in [WeightLayout::OutIn, WeightLayout::PerHead] {
            let shape: &[usize] = if layout == WeightLayout::OutIn { &[5, 12] } else { &[3, 4, 5] };
            let (x, weight, bias, gates) = (random(1, &[1, 2, 12]), random(2, shape), random(3, &[5]), gates());
            let attributes = routed_combine::Attributes { num_heads: 3, weight_layout: layout };
            let inputs = routed_combine::Inputs { x: &*x, weight: &*weight, head_gates: &gates, bias: Some(&*bias) };
            agree::<RoutedCombine>(&attributes, &[&x, &weight, &bias], &inputs);
            let inputs = routed_combine::Inputs { bias: None, ..inputs };
            agree::<RoutedCombine>(&attributes, &[&x, &weight], &inputs);
        }
    }

    #[test]
    fn aggregated_attention() {
        let (batch, heads, dim, tokens, cells, pooled) = (2, 3, 4, 6, 9, 5);
        let gates =
            Tensor::from_iter((0..36).map(|i| if i % 4 == 1 { 0f32 } else { 0.5 + i as f32 / 20.0 }), &Device::Cpu);
        let gates = Var::from_tensor(&gates.unwrap().reshape((batch, tokens, heads)).unwrap()).unwrap();
        let shapes: [&[usize]; 12] = [
            &[batch, tokens, heads * dim],
            &[batch, tokens, heads * dim],
            &[batch, tokens, heads * dim],
            &[batch, pooled, heads * dim],
            &[batch, pooled, heads * dim],
            &[batch, tokens, heads],
            &[heads, dim],
            &[tokens, heads],
            &[heads, cells],
            &[heads, tokens, pooled],
            &[heads, dim, cells],
            &[heads, cells],
        ];
        let mut vars: Vec<Var> = shapes.iter().zip(1..).map(|(shape, seed)| random(seed, shape)).collect();
        vars[5] = gates;
        let attributes = aggregated_attention::Attributes { num_heads: heads, height: 2, width: 3, window: 3 };
        let list: Vec<Option<&Tensor>> = vars.iter().map(|var| Some(var.as_tensor())).collect();
        let inputs = inputs::<RoutedAggregatedAttention, _>(&list).unwrap();
        agree::<RoutedAggregatedAttention>(&attributes, &vars.iter().collect::<Vec<_>>(), &inputs);
    }

    #[test]
    fn attention() {
        let gates = random(4, &[2, 5, 4]);
        // Some heads are off.
        let zeros = Tensor::from_iter((0..40).map(|i| if i % 3 == 0 { 0f32 } else { 1.0 }), &Device::Cpu).unwrap();
        let gates = Var::from_tensor(&(gates.as_tensor() * zeros.reshape((2, 5, 4)).unwrap()).unwrap()).unwrap();
        let (query, bias) = (random(1, &[2, 5, 24]), random(5, &[2, 1, 5, 7]));
        let flat = [random(2, &[2, 7, 12]), random(3, &[2, 7, 10])];
        let cached = [random(2, &[2, 2, 7, 6]), random(3, &[2, 2, 7, 5])];
        for is_causal in [false, true] {
            let attributes = routed_attention::Attributes { num_heads: 4, kv_num_heads: 2, scale: 0.4, is_causal };
            for [key, value] in [&flat, &cached] {
                let inputs = routed_attention::Inputs {
                    query: &*query,
                    key: &**key,
                    value: &**value,
                    head_gates: &*gates,
                    attn_bias: Some(&*bias),
                };
                agree::<RoutedAttention>(&attributes, &[&query, key, value, &gates, &bias], &inputs);
                let inputs = routed_attention::Inputs { attn_bias: None, ..inputs };
                agree::<RoutedAttention>(&attributes, &[&query, key, value, &gates], &inputs);
            }
        }
    }
}
