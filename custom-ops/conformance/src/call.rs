//! A call of any operator, and its expected output from the f64 reference.

use crate::data::Buffer;
use moh_operators::{Attributes, DType, Operator, Tensor, tolerance};

/// Attributes and inputs. Optional inputs at the end may be missing.
#[derive(Debug, Clone)]
pub struct Call {
    /// The attributes.
    pub attributes: Attributes,
    /// The element type T.
    pub dtype: DType,
    /// Shape and elements of each input.
    pub inputs: Vec<(Vec<usize>, Buffer)>,
    /// Products that are summed in an output element, where they may be more than a few hundred.
    pub terms: usize,
}

impl Call {
    /// A call to which inputs are added.
    pub fn new(attributes: Attributes, dtype: DType) -> Call {
        Call { attributes, dtype, inputs: Vec::new(), terms: 0 }
    }

    /// The operator that is called.
    pub fn operator(&self) -> &'static Operator {
        self.attributes.operator()
    }

    /// Appends an input of type T.
    pub fn input(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(self.dtype, numbers)));
    }

    /// Appends a float32 input.
    pub fn gates(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(DType::F32, numbers)));
    }

    /// Appends a uint8 input.
    pub fn bytes(&mut self, shape: &[usize], numbers: &[u8]) {
        let numbers: Vec<f32> = numbers.iter().map(|&x| x.into()).collect();
        self.inputs.push((shape.to_vec(), Buffer::new(DType::U8, &numbers)));
    }

    /// Appends an int64 input; the numbers are below 2^24.
    pub fn integers(&mut self, shape: &[usize], numbers: &[i64]) {
        let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        self.inputs.push((shape.to_vec(), Buffer::new(DType::I64, &numbers)));
    }

    /// The inputs.
    pub fn tensors(&self) -> Vec<Option<Tensor<'_>>> {
        self.inputs.iter().map(|(shape, buffer)| Some(Tensor { shape, data: buffer.data() })).collect()
    }

    /// The element type of the output.
    pub fn output_dtype(&self) -> DType {
        self.operator().output_dtype(self.dtype)
    }

    /// The output of the f64 reference. Panics if the operator rejects the call.
    pub fn expected(&self) -> Vec<f64> {
        self.operator().reference(&self.attributes, &self.tensors()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Panics if `found`, the output of `kernel`, differs from `expected` by more than the operators' tolerance.
    /// `exact` selects the elements that must be equal.
    pub fn compare(
        &self,
        kernel: &dyn std::fmt::Display,
        found: &[f64],
        expected: &[f64],
        exact: impl Fn(usize) -> bool,
    ) {
        assert_eq!(found.len(), expected.len(), "{kernel}");
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let tolerance =
            tolerance::call_output(&self.attributes, self.dtype, largest) * tolerance::of_long_sums(self.terms);
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let allowed = if exact(i) { 0.0 } else { tolerance };
            assert!((found - expected).abs() <= allowed, "{kernel}, element {i}: expected {expected}, found {found}");
        }
    }
}
