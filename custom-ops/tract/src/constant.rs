//! Inputs of a kernel that never change.

use crate::facts;
use moh_kernels::{Data, Tensor as Borrowed};
use std::sync::Arc;
use tract_onnx::tract_hir::internal::*;

/// A tensor that an operator holds, in the shape that its kernel wants.
#[derive(Debug, Clone)]
pub(crate) struct Constant {
    shape: TVec<usize>,
    tensor: Arc<Tensor>,
}

impl PartialEq for Constant {
    fn eq(&self, other: &Constant) -> bool {
        self.shape == other.shape && Arc::ptr_eq(&self.tensor, &other.tensor)
    }
}

impl Eq for Constant {}

impl Constant {
    /// `tensor`'s elements as a tensor of `shape`.
    pub(crate) fn new(tensor: Arc<Tensor>, shape: &[usize]) -> TractResult<Constant> {
        ensure!(
            tensor.len() == shape.iter().product::<usize>() && facts::dtype(tensor.datum_type()).is_some(),
            "{tensor:?} is no constant of shape {shape:?}"
        );
        Ok(Constant { shape: shape.into(), tensor })
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn datum_type(&self) -> DatumType {
        self.tensor.datum_type()
    }

    /// As the kernels see it.
    pub(crate) fn borrow(&self) -> TractResult<Borrowed<'_>> {
        Ok(Borrowed { shape: &self.shape, ..borrow(&self.tensor)? })
    }
}

/// A tract tensor as the kernels see it.
pub(crate) fn borrow(tensor: &Tensor) -> TractResult<Borrowed<'_>> {
    Ok(Borrowed { shape: tensor.shape(), data: data(tensor)? })
}

/// A tract tensor's elements; tract's are always contiguous and row-major.
pub(crate) fn data(tensor: &Tensor) -> TractResult<Data<'_>> {
    let view = tensor.try_as_plain_ram()?;
    match tensor.datum_type() {
        DatumType::F32 => Ok(Data::F32(view.as_slice::<f32>()?)),
        DatumType::F16 => Ok(Data::F16(view.as_slice::<f16>()?)),
        other => bail!("expected element type float32 or float16, found {other:?}"),
    }
}
