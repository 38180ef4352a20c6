//! Constant inputs of a kernel.

use crate::facts;
use moh_cpu::{Input, Packed};
use moh_operators::{Attributes, DType, Data, Tensor as Borrowed};
use std::collections::HashMap;
use std::sync::Arc;
use tract_onnx::tract_hir::internal::*;

/// Weights that are already packed, by tensor, input index and operator.
pub(crate) type Made = HashMap<(*const Tensor, usize, String), Arc<Packed>>;

/// A constant tensor held by an operator, in the shape that its kernel reads.
#[derive(Debug, Clone)]
pub(crate) struct Constant {
    shape: TVec<usize>,
    elements: Elements,
}

#[derive(Debug, Clone)]
enum Elements {
    Tensor(Arc<Tensor>),
    Packed(Arc<Packed>),
}

impl PartialEq for Constant {
    fn eq(&self, other: &Constant) -> bool {
        let same = match (&self.elements, &other.elements) {
            (Elements::Tensor(a), Elements::Tensor(b)) => Arc::ptr_eq(a, b),
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

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn datum_type(&self) -> TractResult<DatumType> {
        match &self.elements {
            Elements::Tensor(tensor) => Ok(tensor.datum_type()),
            Elements::Packed(packed) => facts::datum_type(packed.dtype()),
        }
    }

    /// The tensor or packed weight, for a kernel.
    pub(crate) fn borrow(&self) -> TractResult<Input<'_>> {
        Ok(match &self.elements {
            Elements::Tensor(tensor) => Borrowed { shape: &self.shape, data: borrow(tensor)?.data }.into(),
            Elements::Packed(packed) => Input::Packed(packed),
        })
    }

    /// If the operator's kernel packs input `input`, packs the elements and drops the tensor. 16-bit elements are not
    /// packed, because that would double their memory.
    pub(crate) fn pack(&mut self, attributes: &Attributes, input: usize, made: &mut Made) -> TractResult<()> {
        let Elements::Tensor(tensor) = &self.elements else { return Ok(()) };
        if facts::dtype(tensor.datum_type()) != Some(DType::F32) {
            return Ok(());
        }
        let key = (Arc::as_ptr(tensor), input, format!("{:?}{attributes:?}", self.shape));
        let packed = match made.get(&key) {
            Some(packed) => packed.clone(),
            None => {
                let weight = Borrowed { shape: &self.shape, data: borrow(tensor)?.data };
                let Some(packed) = moh_cpu::pack(attributes, input, weight)? else { return Ok(()) };
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
        other => bail!("expected element type float32 or float16, found {other:?}"),
    };
    Ok(Borrowed { shape: tensor.shape(), data })
}
