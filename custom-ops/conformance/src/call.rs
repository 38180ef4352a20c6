//! A call of any operator, and what the f64 reference makes of it.

use crate::data::Buffer;
use moh_operators::{Attributes, DType, Operator, Tensor, tolerance};

/// Attributes and inputs. An input that is not there ends the list.
#[derive(Debug, Clone)]
pub struct Call {
    /// The attributes.
    pub attributes: Attributes,
    /// The type T of the operator.
    pub dtype: DType,
    /// Shapes and elements.
    pub inputs: Vec<(Vec<usize>, Buffer)>,
}

impl Call {
    /// A call without inputs.
    pub fn new(attributes: Attributes, dtype: DType) -> Call {
        Call { attributes, dtype, inputs: Vec::new() }
    }

    /// The operator that is called.
    pub fn operator(&self) -> &'static Operator {
        self.attributes.operator()
    }

    /// Appends an input of the call's type.
    pub fn input(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(self.dtype, numbers)));
    }

    /// Appends an input that is float32 in every type.
    pub fn gates(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(DType::F32, numbers)));
    }

    /// The inputs.
    pub fn tensors(&self) -> Vec<Option<Tensor<'_>>> {
        self.inputs.iter().map(|(shape, buffer)| Some(Tensor { shape, data: buffer.data() })).collect()
    }

    /// The output's type.
    pub fn output_dtype(&self) -> DType {
        self.operator().output_dtype(self.dtype)
    }

    /// What the reference makes of it. Panics where the operator refuses it.
    pub fn expected(&self) -> Vec<f64> {
        self.operator().reference(&self.attributes, &self.tensors()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Panics where what `kernel` found is further from `expected` than an operator may be. `exact` tells which elements must be
    /// equal.
    pub fn compare(
        &self,
        kernel: &dyn std::fmt::Display,
        found: &[f64],
        expected: &[f64],
        exact: impl Fn(usize) -> bool,
    ) {
        assert_eq!(found.len(), expected.len(), "{kernel}");
        // The operators' figure is for outputs up to 4.
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let tolerance = tolerance::operator_output(self.output_dtype()) * (largest / 4.0).max(1.0);
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let allowed = if exact(i) { 0.0 } else { tolerance };
            assert!((found - expected).abs() <= allowed, "{kernel}, element {i}: expected {expected}, found {found}");
        }
    }
}
