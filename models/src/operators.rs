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

    /// The same in a training on the CPU: the output may come about in another way, with the same gradients.
    ///
    /// # Errors
    /// As [`ModelOperator::compute`].
    fn train(attributes: &Self::Attributes, inputs: &Self::Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        Self::compute(attributes, inputs)
    }

    /// Multiply-accumulates of a call.
    fn macs(attributes: &Self::Attributes, inputs: &Self::Inputs<List<'_, &Shape>>) -> Macs;
}

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
