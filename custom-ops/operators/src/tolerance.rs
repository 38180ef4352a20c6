//! All tolerances of the tests, with their reasons.

use crate::operator::Attributes;
use crate::tensor::DType;

/// Maximum absolute error of f32 model outputs against the published code, on the golden models.
///
/// f32 rounding alone changes these outputs (magnitude up to 7) by 5e-6, measured against f64; another order of
/// summation changes them by a few times that.
pub const GOLDEN_F32: f32 = 5e-5;

/// The same for DiT. The timestep's angle `t * f` is rounded to f32, so a last-digit difference of `exp` in `f`
/// changes outputs by up to 1e-4 at t near 1000. Classifier-free guidance multiplies this by its scale.
pub const GOLDEN_DIT_F32: f32 = 2e-4;

/// Maximum error of a model's outputs in units of the largest one, where both sides do the same operations on the same numbers, and
/// rows of some matrices are in another order: the blocks of a matrix product round differently, by 6e-8 each.
pub const SAME_MODEL_F32: f32 = 1e-6;

/// Mean negative log-likelihood per token, in nats, in f32.
pub const LOSS_F32: f64 = 1e-4;

/// The same with f16 weights and activations, where a few rows in ten thousand are routed to other heads.
pub const LOSS_F16: f64 = 1e-3;

/// Maximum absolute error of one operator against the f64 reference, on standard normal inputs.
///
/// f32: a few hundred terms of magnitude 4, each rounded with a relative error of 6e-8, summed in another order. f16
/// and bf16: the output, of magnitude 4, is rounded with a relative error of 2^-11 and 2^-8.
pub fn operator_output(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 4e-6,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        DType::U8 | DType::I64 => 0.0,
    }
}

/// Maximum absolute error of a call's output, the largest element of which is `largest` in the f64 reference: as
/// [`operator_output`], and what its attributes allow.
pub fn call_output(attributes: &Attributes, t: DType, largest: f64) -> f64 {
    let operator = attributes.operator();
    operator_output(operator.output_dtype(t)) * (largest / 4.0).max(1.0) + operator.rounding(attributes) * largest
}

/// What the tolerance of a sum of so many products is multiplied by: [`operator_output`] is of a few hundred. Roundings of a longer sum
/// are independent, so they grow with the square root.
pub fn of_long_sums(terms: usize) -> f64 {
    (terms as f64 / 256.0).sqrt().max(1.0)
}

/// Error that 8-bit activations add to a matrix product, in units of the largest output.
///
/// Each is rounded by up to 1/254 of the largest one of its block: 0.4 % of an output's standard deviation for independent numbers,
/// of which a few outputs err by four times that. A kernel that rounds both factors to bfloat16 instead, by 2^-9 of each number, errs less. A mixture of experts multiplies three such products: two where SwiGLU multiplies
/// the halves of the first, and the second, in which the largest activations are further from the rest.
pub const INT8_ACTIVATIONS: f64 = 2e-2;

/// Error that the activation functions add to RoutedMLPNBits, in units of the largest output. Its examples have hidden numbers of a few
/// hundred, the sums of which nearly cancel, and a runtime's sigmoid or tanh errs by 1e-6.
pub const QUANTISED_MLP: f64 = 2e-6;

/// Maximum absolute error of an operator in tract in f32, against the f64 reference, on numbers below 1.
pub const TRACT_OPERATOR_F32: f64 = 1e-5;

/// The same in f16: two units in the last place for numbers up to 2.
pub const TRACT_OPERATOR_F16: f64 = 2e-3;

/// Maximum absolute error of a tract layer run by our kernels, against tract's own. A sum of up to 600 products of
/// numbers up to 1, in another order: magnitude 30, rounded with a relative error of 6e-8.
pub const TRACT_LAYER_F32: f32 = 1e-4;

/// Maximum relative error of a CUDA kernel's whole output against the f64 reference: `|found - expected| / |expected|`
/// in the Euclidean norm.
///
/// f32: as [`operator_output`]. f16 and bf16: softmax weights are rounded to 2^-11 and 2^-8 before the product with
/// the values, and so is the output; the errors of different elements are independent.
pub fn cuda_relative(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
        DType::U8 | DType::I64 => 0.0,
    }
}

/// Additional error of an attention kernel on a bf16 matrix unit, in units of (largest value) * gate. Softmax weights
/// are rounded to bf16 (relative error 2^-9) before the product with the values, and they sum to 1.
pub const MATRIX_UNIT_BF16: f64 = 0.001_953_125;

/// Maximum error of a model's outputs in `dtype` for given gates, in units of the largest output (at least 1).
///
/// f32: the DiT timestep effect above, and sums of a few thousand terms in another order. f16 and bf16: weights and
/// activations are rounded to 2^-11 and 2^-9 in every layer, and the errors of the layers add up.
pub fn model_output(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-4,
        DType::F16 => 2e-2,
        DType::BF16 => 1e-1,
        DType::U8 | DType::I64 => 0.0,
    }
}

/// The same for a model whose attention alone is computed in bf16: queries, keys, values and the heads' outputs are
/// rounded to 2^-9 in every layer; the residual stream is not.
pub const MODEL_BF16_ATTENTION: f32 = 5e-2;

/// The same for a model whose products with quantised weights round activations to 8-bit integers: each of them by up to 1/254 of
/// the largest of its block, in every layer; or both factors to bfloat16.
pub const MODEL_INT8_ACTIVATIONS: f32 = 1e-1;

/// If the relative gap between the last selected head's score and the first rejected one's is smaller than this, f32
/// cannot decide which is larger: scores are sums of hundreds of products, each rounded with a relative error of 6e-8.
pub const ROUTING_GAP_F32: f32 = 1e-5;

/// The same where more is rounded: weights and activations to float16, attention to bfloat16, or activations to 8-bit integers. The largest gap that
/// changed a selection in the reference cases and example checkpoints was 0.003; errors add up in deep models. A router with wrong weights has
/// rows with larger gaps.
pub const ROUTING_GAP_ROUNDED: f32 = 0.25;
