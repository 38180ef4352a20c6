//! How far a result may be from the truth, and why: the only place.

use crate::tensor::DType;

/// Largest absolute error of f32 model outputs against the published code's, on the golden models.
///
/// f32 rounding alone moves those outputs, of magnitude 7 and less, by 5e-6 (measured in f64); other orders of summation by
/// a few times that.
pub const GOLDEN_F32: f32 = 5e-5;

/// The same for DiT: the timestep's angle `t * f` is rounded to f32, so that a last-digit difference of `exp` in `f` moves
/// outputs by up to 1e-4 at t near 1000. Guidance multiplies this by its scale.
pub const GOLDEN_DIT_F32: f32 = 2e-4;

/// Mean negative log-likelihood per token, in nats: f32 paths.
pub const LOSS_F32: f64 = 1e-4;

/// The same with f16 weights and activations, where a few rows in ten thousand route differently.
pub const LOSS_F16: f64 = 1e-3;

/// Largest absolute error of one operator against the f64 reference, on standard normal inputs.
///
/// f32: some hundred terms of magnitude 4, each rounded to 6e-8, in another order. f16 and bf16: the output itself, of magnitude
/// 4, is rounded to 2^-11 and 2^-8 of it.
pub fn operator_output(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 4e-6,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
    }
}

/// Largest absolute error of an operator in tract against the f64 reference, on numbers below 1: in f32.
pub const TRACT_OPERATOR_F32: f64 = 1e-5;

/// The same in f16: two units in the last place of numbers up to 2.
pub const TRACT_OPERATOR_F16: f64 = 2e-3;

/// Largest absolute error of what our kernels make of a layer of tract's against tract itself: sums of at most 600 products of numbers up
/// to 1, in another order: of magnitude 30, each rounded to 6e-8 of it.
pub const TRACT_LAYER_F32: f32 = 1e-4;

/// Largest relative error of a CUDA kernel's whole output against the f64 reference: `|found - expected| / |expected|`, Euclidean.
///
/// f32: as [`operator_output`]. f16 and bf16: weights of the softmax are rounded to 2^-11 and 2^-8 before the second product, and
/// so is the output; both errors are independent from element to element.
pub fn cuda_relative(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 2e-3,
        DType::BF16 => 1e-2,
    }
}

/// Further error of an attention kernel on a matrix unit in bf16, in units of the largest value times the gate: there each
/// weight of the softmax is rounded to 2^-9 of it before it multiplies the values, and the weights sum to 1.
pub const MATRIX_UNIT_BF16: f64 = 0.001_953_125;

/// Largest error of a model's outputs in `dtype`, its gates given, in units of the largest output (or of 1).
///
/// f32: the timestep effect above, and sums of some thousand terms in another order. f16 and bf16: weights and activations are
/// rounded to 2^-11 and 2^-9 in every layer, and the errors of layers add up.
pub fn model_output(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-4,
        DType::F16 => 2e-2,
        DType::BF16 => 1e-1,
    }
}

/// The same, of a model whose attention alone is computed in bf16: queries, keys, values and the heads' outputs are rounded to 2^-9
/// in every layer, the residual stream between the layers is not.
pub const MODEL_BF16_ATTENTION: f32 = 5e-2;

/// Relative distance between the last head kept and the first one dropped below which f32 arithmetic does not decide:
/// the scores come from sums of hundreds of products, each rounded to 6e-8.
pub const ROUTING_GAP_F32: f32 = 1e-5;
