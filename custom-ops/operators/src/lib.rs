//! The `ai.moh` operators: attributes, inputs, shape inference, a body in standard ONNX operators, and an f64
//! reference.
//!
//! An operator is one folder and one line here. Backends (`moh-cpu`, `moh-cuda`) implement operators. Runtime plugins
//! (`moh-ops` for onnxruntime, `moh-tract`), the exporter and the tools iterate [`OPERATORS`]; no operator is named in
//! their code.

mod attributes;
mod error;
mod head_linear;
mod head_linear_nbits;
mod inputs;
pub mod nbits;
mod operator;
mod page;
pub mod shape;
mod tensor;
pub mod tolerance;

pub use attributes::{AttributeDef, AttributeKind, AttributeSet, AttributeType, Source, Value};
pub use error::Error;
pub use head_linear::WeightLayout;
pub use inputs::{ElementType, List, Operand, Reader};
pub use operator::{Attributes, Body, BodyNode, BodyValue, Definition, Example, Operator, Part, Variant, problem_of};
pub use page::markdown;
pub use tensor::{DType, Data, DataMut, Element, Float, Scalar, Tensor};

/// The operators' ONNX domain.
pub const DOMAIN: &str = "ai.moh";

/// The version of [`DOMAIN`] that this library implements. Every version keeps the operators of those before it, so a file
/// imports the version that brought the last of the operators that it uses.
pub const VERSION: i64 = 2;

/// Prefix of the model outputs that hold gates: `gates.<module path>`.
pub const GATES: &str = "gates.";

/// Declares a module and a type for each operator.
macro_rules! operators {
    ($($module:ident::$operator:ident),+ $(,)?) => {
        $(pub mod $module;)+
        $(pub use $module::$operator;)+

        /// Every operator of [`DOMAIN`].
        pub static OPERATORS: &[&Operator] = &[$($operator::OPERATOR),+];
    };
}

operators! {
    routed_attention::RoutedAttention,
    routed_projection::RoutedProjection,
    routed_combine::RoutedCombine,
    routed_mlp::RoutedMlp,
    aggregated_attention::RoutedAggregatedAttention,
    top_k_router::TopKRouter,
    routed_projection_nbits::RoutedProjectionNBits,
    routed_combine_nbits::RoutedCombineNBits,
    routed_mlp_nbits::RoutedMlpNBits,
    linear_nbits::LinearNBits,
    linear::Linear,
    linear_activation::LinearActivation,
    linear_activation_nbits::LinearActivationNBits,
    layer_norm::LayerNorm,
    depthwise_conv::DepthwiseConv,
    cache_update::CacheUpdate,
    routed_cached_attention::RoutedCachedAttention,
}

/// Looks up an operator by name.
pub fn operator(name: &str) -> Option<&'static Operator> {
    OPERATORS.iter().copied().find(|operator| operator.name == name)
}
