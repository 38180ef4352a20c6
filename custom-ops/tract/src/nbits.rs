//! Matrices in blocks of 4 or 8 bits, in the form of com.microsoft's MatMulNBits.
//!
//! Their nodes hold them as attributes ([`crate::prepare()`]), so that tract neither copies nor folds them.

mod blocks;
mod convert;
mod gather;
mod linear;
mod parse;

pub(crate) use linear::BlockLinear;

use crate::prepare::join;
use tract_onnx::Onnx;

/// Makes `onnx` parse the nodes that read such matrices.
pub(crate) fn register(onnx: &mut Onnx) {
    onnx.op_register.insert("MatMulNBits", parse::mat_mul_nbits);
    onnx.op_register.insert("GatherBlockQuantized", parse::gather_block_quantized);
    onnx.op_register.insert(join::PRODUCT, parse::dequantized_product);
    onnx.op_register.insert(join::ROWS, parse::dequantized_rows);
}
