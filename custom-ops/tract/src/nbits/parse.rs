//! Nodes that read matrices in blocks.

use super::blocks::{Blocks, Sizes};
use super::convert::{self, Integers};
use super::gather::BlockGather;
use super::linear::BlockLinear;
use crate::bytes::{self, Bytes};
use crate::prepare::hold;
use moh_cpu::nbits::Level;
use tract_onnx::model::ParsingContext;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::pb::{NodeProto, TensorProto};
use tract_onnx::tract_hir::internal::*;

type Parsed = TractResult<(Box<dyn InferenceOp>, Vec<String>)>;

/// com.microsoft's MatMulNBits: x, values, scales[, zero points][, order of the values][, bias].
pub(crate) fn mat_mul_nbits(context: &ParsingContext, node: &NodeProto) -> Parsed {
    microsoft(node)?;
    let number = |name: &str, default: Option<i64>| number(node, name, default);
    let (columns, width) = (number("N", None)?, number("K", None)?);
    let sizes = Sizes::checked(number("bits", Some(4))?, number("block_size", None)?, columns, width)?;
    ensure!(node.input.get(4).is_none_or(String::is_empty), "input g_idx: tract takes values in their order only");
    let level = number("accuracy_level", Some(0))?;
    ensure!((0..=4).contains(&level), "accuracy_level: expected 0 to 4, found {level}");
    let weight = unsigned(
        context,
        sizes,
        constant(context, node, 1)?,
        [constant(context, node, 2)?],
        operand(context, node, 3)?,
    )?;
    linear(context, weight, operand(context, node, 5)?, Level::of(level))
}

/// com.microsoft's GatherBlockQuantized: values, indices, scales[, zero points].
pub(crate) fn gather_block_quantized(context: &ParsingContext, node: &NodeProto) -> Parsed {
    microsoft(node)?;
    let axis = |name: &str, default: i64| number(node, name, Some(default));
    let (gathered, blocked) = (axis("gather_axis", 0)?, axis("quantize_axis", 1)?);
    ensure!(
        gathered == 0 && matches!(blocked, 1 | -1),
        "expected gather_axis 0 and quantize_axis 1, found {gathered} and {blocked}"
    );
    let (values, scales, zeros) =
        (constant(context, node, 0)?, constant(context, node, 2)?, operand(context, node, 3)?);
    let [rows, stored] = matrix(values)?;
    let block = number(node, "block_size", Some(128))?;
    let integers = Integers::of(values.data_type)?;
    let table = match values.data_type == DataType::Uint8 as i32 {
        true => {
            let bits = number(node, "bits", Some(4))?;
            ensure!(matches!(bits, 4 | 8), "bits: expected 4 or 8, found {bits}");
            unsigned(context, Sizes::checked(bits, block, rows, stored * (8 / bits))?, values, [scales], zeros)?
        }
        false => dequantized(
            context,
            Sizes::checked(integers.bits as i64, block, rows, stored)?,
            false,
            [values, scales],
            zeros,
        )?,
    };
    Ok((expand(BlockGather { table }), vec![]))
}

/// A product with the result of a DequantizeLinear: x, values, scales, zero points or none, bias or none.
pub(crate) fn dequantized_product(context: &ParsingContext, node: &NodeProto) -> Parsed {
    let (values, scales) = (constant(context, node, 1)?, constant(context, node, 2)?);
    let (dims, axis) = (matrix(values)?, number(node, "axis", None)?);
    let transposed = axis == 0;
    let [rows, width] = if transposed { [dims[1], dims[0]] } else { dims };
    let bits = Integers::of(values.data_type)?.bits as i64;
    let sizes = Sizes::checked(bits, number(node, "block_size", None)?, rows, width)?;
    let weight = dequantized(context, sizes, transposed, [values, scales], operand(context, node, 3)?)?;
    linear(context, weight, operand(context, node, 4)?, Level::Float)
}

/// Rows of the result of a DequantizeLinear: indices, values, scales, zero points or none.
pub(crate) fn dequantized_rows(context: &ParsingContext, node: &NodeProto) -> Parsed {
    let (values, scales) = (constant(context, node, 1)?, constant(context, node, 2)?);
    let [rows, width] = matrix(values)?;
    let bits = Integers::of(values.data_type)?.bits as i64;
    let sizes = Sizes::checked(bits, number(node, "block_size", None)?, rows, width)?;
    let table = dequantized(context, sizes, false, [values, scales], operand(context, node, 3)?)?;
    Ok((expand(BlockGather { table }), vec![]))
}

fn linear(context: &ParsingContext, weight: Blocks, bias: Option<&TensorProto>, level: Level) -> Parsed {
    let bias = match bias {
        Some(bias) => {
            let found = float(bias)?;
            ensure!(found == weight.datum_type, "{}: expected {:?}, found {found:?}", bias.name, weight.datum_type);
            Some(bytes::read(context, bias, &[weight.sizes.rows])?)
        }
        None => None,
    };
    Ok((expand(BlockLinear { weight, bias, level }), vec![]))
}

/// A matrix in MatMulNBits's own form.
fn unsigned(
    context: &ParsingContext,
    sizes: Sizes,
    values: &TensorProto,
    [scales]: [&TensorProto; 1],
    zeros: Option<&TensorProto>,
) -> TractResult<Blocks> {
    for tensor in [values].into_iter().chain(zeros) {
        let found = DataType::try_from(tensor.data_type);
        ensure!(found == Ok(DataType::Uint8), "{}: expected uint8, found {found:?}", tensor.name);
    }
    let zero_points = |zeros| bytes::read(context, zeros, &[sizes.rows, sizes.zero_bytes()]);
    Ok(Blocks {
        sizes,
        values: bytes::read(context, values, &[sizes.rows, sizes.row_bytes()])?,
        scales: bytes::read(context, scales, &[sizes.rows, sizes.blocks()])?,
        datum_type: float(scales)?,
        zero_points: zeros.map(zero_points).transpose()?,
    })
}

/// A matrix as DequantizeLinear has it: (width, rows) if `transposed`, else (rows, width).
fn dequantized(
    context: &ParsingContext,
    sizes: Sizes,
    transposed: bool,
    [values, scales]: [&TensorProto; 2],
    zeros: Option<&TensorProto>,
) -> TractResult<Blocks> {
    let integers = Integers::of(values.data_type)?;
    let turned = |[rows, columns]: [usize; 2]| if transposed { [columns, rows] } else { [rows, columns] };
    let per_block = turned([sizes.rows, sizes.blocks()]);
    ensure!(
        matrix(scales)? == per_block.map(|n| n as i64),
        "{}: expected shape {per_block:?}, found {:?}",
        scales.name,
        scales.dims
    );
    let read = |tensor: &TensorProto, shape| bytes::read(context, tensor, &turned(shape));
    let zero_points = match zeros {
        Some(zeros) => {
            ensure!(zeros.data_type == values.data_type, "{}: expected the type of {}", zeros.name, values.name);
            Some(read(zeros, [sizes.rows, sizes.blocks()])?)
        }
        None => None,
    };
    let datum_type = float(scales)?;
    let stored: Bytes = read(values, [sizes.rows, sizes.width])?;
    Ok(Blocks {
        sizes,
        values: convert::values(&stored, integers, sizes, transposed),
        scales: convert::scales(read(scales, [sizes.rows, sizes.blocks()])?, datum_type.size_of(), sizes, transposed),
        datum_type,
        zero_points: convert::zero_points(zero_points.as_ref(), integers, sizes, transposed),
    })
}

/// Dimensions of a matrix.
fn matrix(tensor: &TensorProto) -> TractResult<[i64; 2]> {
    match tensor.dims[..] {
        [rows, columns] if rows > 0 && columns > 0 && rows.checked_mul(columns).is_some() => Ok([rows, columns]),
        _ => bail!("{}: expected a matrix, found shape {:?}", tensor.name, tensor.dims),
    }
}

fn float(tensor: &TensorProto) -> TractResult<DatumType> {
    match DataType::try_from(tensor.data_type) {
        Ok(DataType::Float) => Ok(DatumType::F32),
        Ok(DataType::Float16) => Ok(DatumType::F16),
        found => bail!("{}: expected float32 or float16, found {found:?}", tensor.name),
    }
}

/// Others' operators of the same names mean something else.
fn microsoft(node: &NodeProto) -> TractResult<()> {
    ensure!(
        node.domain == "com.microsoft",
        "{}: expected an operator of domain com.microsoft, found one of domain {:?}",
        node.op_type,
        node.domain
    );
    Ok(())
}

fn number(node: &NodeProto, name: &str, default: Option<i64>) -> TractResult<i64> {
    match node.get_attr_opt::<i64>(name)?.or(default) {
        Some(number) => Ok(number),
        None => bail!("attribute {name} is missing"),
    }
}

fn constant<'a>(context: &ParsingContext<'a>, node: &'a NodeProto, input: usize) -> TractResult<&'a TensorProto> {
    operand(context, node, input)?.with_context(|| format!("input {input}: expected an initializer, found nothing"))
}

/// Input `input`, which the node holds in a prepared model, and else an initializer; nothing if it is absent.
///
/// # Errors
/// An input that is no constant: without it the results would be others.
fn operand<'a>(
    context: &ParsingContext<'a>,
    node: &'a NodeProto,
    input: usize,
) -> TractResult<Option<&'a TensorProto>> {
    if let Some(tensor) = hold::held(node, input) {
        return Ok(Some(tensor));
    }
    let Some(name) = node.input.get(input).filter(|name| !name.is_empty()) else { return Ok(None) };
    let mut known = context.parent_graphs.iter().rev().flat_map(|graph| &graph.initializer);
    let found = known.find(|tensor| tensor.name == *name);
    found.map(Some).with_context(|| format!("input {input}: expected an initializer, found {name}, which is none"))
}
