//! Changing parts of a value where it lies.

use super::{Repr, Value, mismatch};
use crate::element::{Data, Element, ElementType};
use crate::error::{Error, Result};
use half::{bf16, f16};
use ort::value::{DynTensor, PrimitiveTensorElementType};
use std::sync::Arc;
use tract_onnx::prelude::{Datum, IntoTensor, Tensor as TractTensor};

/// Elements, and the number of the element in row-major order that the first of them replaces.
type Part<'a> = (usize, Data<'a>);

impl Value {
    /// Replaces elements by those of `parts`, each with the number of its first element in row-major order. The value stays where it is, unless
    /// somebody else holds a clone of it, or it is not in ordinary memory: it is copied then.
    ///
    /// # Errors
    /// [`Error::ElementType`] for elements of another type, [`Error::Length`] for a part that does not lie within the value; nothing has
    /// changed then.
    pub fn write(&mut self, parts: &[(usize, Data<'_>)]) -> Result<()> {
        let there = self.shape.iter().product::<usize>();
        for (at, data) in parts {
            if data.element_type() != self.element_type {
                return Err(mismatch(self.element_type, data.element_type().name()));
            }
            if at.checked_add(data.len()).is_none_or(|end| end > there) {
                return Err(Error::Length { shape: self.shape.clone(), expected: there, found: data.len() });
            }
        }
        if !self.is_writable() {
            self.repr = Repr::Host(Arc::new(self.to_tensor()?));
        }
        match self.element_type {
            ElementType::F32 => self.fill::<f32>(parts),
            ElementType::F16 => self.fill::<f16>(parts),
            ElementType::F64 => self.fill::<f64>(parts),
            ElementType::I64 => self.fill::<i64>(parts),
            ElementType::I32 => self.fill::<i32>(parts),
            ElementType::U8 => self.fill::<u8>(parts),
            ElementType::Bool => self.fill::<bool>(parts),
            // tract has no such type, so the value is not there.
            ElementType::BF16 => match &mut self.repr {
                Repr::Ort(value) => fill_ort::<bf16>(value_of(value)?, parts),
                repr => fill_host::<bf16>(repr, parts),
            },
        }
    }

    /// Whether this is the only holder of the value, in ordinary memory.
    fn is_writable(&mut self) -> bool {
        match &mut self.repr {
            Repr::Host(tensor) => Arc::get_mut(tensor).is_some(),
            Repr::Ort(value) => Arc::get_mut(value).is_some_and(|value| value.value.memory_info().is_cpu_accessible()),
            Repr::Tract(value) => value.is_exclusive() && value.is_plain_ram(),
        }
    }

    fn fill<T: Element + PrimitiveTensorElementType + Datum>(&mut self, parts: &[Part<'_>]) -> Result<()> {
        match &mut self.repr {
            Repr::Ort(value) => fill_ort::<T>(value_of(value)?, parts),
            Repr::Tract(value) => {
                // Taken out and put back: a value of tract lends its tensor for reading only.
                let mut tensor = std::mem::replace(value, TractTensor::default().into()).into_tensor();
                let bad = |e| mismatch(T::TYPE, &format!("{e:#}"));
                tensor
                    .try_as_plain_ram_mut()
                    .and_then(|mut view| {
                        fill_slice(view.as_slice_mut::<T>()?, parts);
                        Ok(())
                    })
                    .map_err(bad)?;
                *value = tensor.into();
                Ok(())
            }
            repr => fill_host::<T>(repr, parts),
        }
    }
}

fn value_of(value: &mut Arc<super::OrtValue>) -> Result<&mut DynTensor> {
    let value = Arc::get_mut(value).ok_or_else(|| not_alone(ElementType::F32))?;
    // A copy that was made before is not the value any more.
    value.host.take();
    Ok(&mut value.value)
}

fn fill_ort<T: Element + PrimitiveTensorElementType>(value: &mut DynTensor, parts: &[Part<'_>]) -> Result<()> {
    let (_, elements) = value.try_extract_tensor_mut::<T>().map_err(|e| mismatch(T::TYPE, e.message()))?;
    fill_slice(elements, parts);
    Ok(())
}

fn fill_host<T: Element>(repr: &mut Repr, parts: &[Part<'_>]) -> Result<()> {
    let Repr::Host(tensor) = repr else { return Err(not_alone(T::TYPE)) };
    let elements = Arc::get_mut(tensor).and_then(|tensor| tensor.as_slice_mut::<T>());
    fill_slice(elements.ok_or_else(|| not_alone(T::TYPE))?, parts);
    Ok(())
}

/// Puts the parts in, whose types and places were checked.
fn fill_slice<T: Element>(elements: &mut [T], parts: &[Part<'_>]) {
    for (at, data) in parts {
        if let (Some(from), Some(to)) = (T::slice(data), elements.get_mut(*at..*at + data.len())) {
            to.copy_from_slice(from);
        }
    }
}

/// What [`Value::is_writable`] excludes.
fn not_alone(expected: ElementType) -> Error {
    mismatch(expected, "a value that others hold")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tensor::Tensor;
    use tract_onnx::prelude::IntoTValue;

    fn values() -> Vec<Value> {
        let tract = TractTensor::from_shape(&[2, 2], &[1f32, 2.0, 3.0, 4.0]).unwrap().into_tvalue();
        vec![Tensor::new([2, 2], vec![1f32, 2.0, 3.0, 4.0]).unwrap().into(), Value::from_tract("x", tract).unwrap()]
    }

    #[test]
    fn parts_are_replaced_and_clones_keep_their_elements() {
        for mut value in values() {
            value.write(&[(1, Data::F32(&[7.0])), (2, Data::F32(&[8.0, 9.0]))]).unwrap();
            assert_eq!(value.as_slice::<f32>().unwrap(), [1.0, 7.0, 8.0, 9.0]);
            let clone = value.clone();
            value.write(&[(0, Data::F32(&[5.0]))]).unwrap();
            assert_eq!(clone.as_slice::<f32>().unwrap(), [1.0, 7.0, 8.0, 9.0]);
            assert_eq!(value.as_slice::<f32>().unwrap(), [5.0, 7.0, 8.0, 9.0]);
        }
    }

    #[test]
    fn a_value_stays_where_it_is() {
        for mut value in values() {
            let before = value.as_slice::<f32>().unwrap().as_ptr();
            value.write(&[(3, Data::F32(&[0.0]))]).unwrap();
            assert_eq!(value.as_slice::<f32>().unwrap().as_ptr(), before);
        }
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        for mut value in values() {
            let beyond: [(usize, Data<'_>); 2] = [(0, Data::F32(&[9.0])), (3, Data::F32(&[9.0, 9.0]))];
            assert!(matches!(value.write(&beyond), Err(Error::Length { .. })));
            assert!(matches!(value.write(&[(usize::MAX, Data::F32(&[9.0]))]), Err(Error::Length { .. })));
            assert!(matches!(value.write(&[(0, Data::I64(&[9]))]), Err(Error::ElementType { .. })));
            assert_eq!(value.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
        }
    }
}
