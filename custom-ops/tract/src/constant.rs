//! Constant inputs of a kernel.

use crate::bytes::{self, Bytes};
use crate::facts;
use moh_cpu::{Input, Packed, Packing};
use moh_operators::{Attributes, DType, Data, Tensor as Borrowed};
use std::collections::HashMap;
use std::sync::Arc;
use tract_onnx::model::ParsingContext;
use tract_onnx::pb::TensorProto;
use tract_onnx::pb::tensor_proto::DataType;
use tract_onnx::tract_hir::internal::*;

/// Weights that are already packed, by their elements' place, input index and operator.
pub(crate) type Made = HashMap<(*const u8, usize, String), Arc<Packed>>;

/// A constant tensor held by an operator, in the shape that its kernel reads.
#[derive(Debug, Clone)]
pub(crate) struct Constant {
    shape: TVec<usize>,
    elements: Elements,
}

#[derive(Debug, Clone)]
enum Elements {
    Tensor(Arc<Tensor>),
    /// Elements that tract never had.
    Held(Bytes, DType),
    Packed(Arc<Packed>),
}

impl PartialEq for Constant {
    fn eq(&self, other: &Constant) -> bool {
        let same = match (&self.elements, &other.elements) {
            (Elements::Tensor(a), Elements::Tensor(b)) => Arc::ptr_eq(a, b),
            (Elements::Held(a, of_a), Elements::Held(b, of_b)) => a == b && of_a == of_b,
            (Elements::Packed(a), Elements::Packed(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        same && self.shape == other.shape
    }
}

impl Eq for Constant {}

impl Constant {
    /// Holds the elements of `tensor` as a tensor of `shape`.
    pub(crate) fn new(tensor: Arc<Tensor>, shape: &[usize]) -> TractResult<Constant> {
        ensure!(
            tensor.len() == shape.iter().product::<usize>() && facts::dtype(tensor.datum_type()).is_some(),
            "{tensor:?} is not a constant of shape {shape:?}"
        );
        Ok(Constant { shape: shape.into(), elements: Elements::Tensor(tensor) })
    }

    /// Holds an initializer of the model, in its own shape, without a copy of what another file keeps.
    pub(crate) fn held(context: &ParsingContext, tensor: &TensorProto) -> TractResult<Constant> {
        let dtype = match DataType::try_from(tensor.data_type) {
            Ok(DataType::Float) => DType::F32,
            Ok(DataType::Float16) => DType::F16,
            Ok(DataType::Uint8) => DType::U8,
            found => bail!("{}: expected float32, float16 or uint8, found {found:?}", tensor.name),
        };
        let shape: Result<TVec<usize>, _> = tensor.dims.iter().map(|&dim| usize::try_from(dim)).collect();
        let shape = shape.map_err(|_| format_err!("{}: expected lengths, found {:?}", tensor.name, tensor.dims))?;
        let elements = Elements::Held(bytes::read(context, tensor, &shape)?, dtype);
        Ok(Constant { shape, elements })
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn datum_type(&self) -> TractResult<DatumType> {
        match &self.elements {
            Elements::Tensor(tensor) => Ok(tensor.datum_type()),
            Elements::Held(_, dtype) => facts::datum_type(*dtype),
            Elements::Packed(packed) => facts::datum_type(packed.dtype()),
        }
    }

    /// The tensor or packed weight, for a kernel.
    pub(crate) fn borrow(&self) -> TractResult<Input<'_>> {
        match &self.elements {
            Elements::Packed(packed) => Ok(Input::Packed(packed)),
            _ => Ok(self.plain()?.into()),
        }
    }

    /// The elements; an error if they are packed.
    fn plain(&self) -> TractResult<Borrowed<'_>> {
        let data = match &self.elements {
            Elements::Tensor(tensor) => borrow(tensor)?.data,
            Elements::Held(bytes, DType::F16) => Data::F16(bytes.cast()?),
            Elements::Held(bytes, DType::U8) => Data::U8(bytes.as_slice()),
            Elements::Held(bytes, _) => Data::F32(bytes.cast()?),
            Elements::Packed(_) => bail!("a packed weight has no elements"),
        };
        Ok(Borrowed { shape: &self.shape, data })
    }

    /// If the operator's kernel packs input `input`, packs the elements and drops the tensor. 16-bit elements are not
    /// packed, because that would double their memory.
    pub(crate) fn pack(&mut self, attributes: &Attributes, input: usize, made: &mut Made) -> TractResult<()> {
        if matches!(self.elements, Elements::Packed(_)) || self.datum_type()? != DatumType::F32 {
            return Ok(());
        }
        let place = match &self.elements {
            Elements::Held(bytes, _) => bytes.as_slice().as_ptr(),
            Elements::Tensor(tensor) => Arc::as_ptr(tensor).cast(),
            Elements::Packed(_) => return Ok(()),
        };
        let key = (place, input, format!("{:?}{attributes:?}", self.shape));
        let packed = match made.get(&key) {
            Some(packed) => packed.clone(),
            None => {
                let Some(packed) = moh_cpu::pack(attributes, input, self.plain()?, Packing::default())? else {
                    return Ok(());
                };
                made.entry(key).or_insert(Arc::new(packed)).clone()
            }
        };
        self.elements = Elements::Packed(packed);
        Ok(())
    }
}

/// Borrows a tract tensor for a kernel; tract's tensors are contiguous and row-major.
pub(crate) fn borrow(tensor: &Tensor) -> TractResult<Borrowed<'_>> {
    let view = tensor.try_as_plain_ram()?;
    let data = match tensor.datum_type() {
        DatumType::F32 => Data::F32(view.as_slice::<f32>()?),
        DatumType::F16 => Data::F16(view.as_slice::<f16>()?),
        DatumType::U8 => Data::U8(view.as_slice::<u8>()?),
        DatumType::I64 => Data::I64(view.as_slice::<i64>()?),
        other => bail!("expected element type float32, float16, uint8 or int64, found {other:?}"),
    };
    Ok(Borrowed { shape: tensor.shape(), data })
}
