//! A call of any operator, run by every kernel and held to the f64 reference.

use crate::data::{Buffer, kernels_of};
use moh_kernels::cpu::{Kernel, Packed, Work};
use moh_kernels::{Attributes, DType, Data, Error, Host, Tensor, Threads, tolerance};

/// Attributes and inputs. An input that is not there ends the list.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) attributes: Attributes,
    pub(crate) dtype: DType,
    pub(crate) inputs: Vec<(Vec<usize>, Buffer)>,
}

impl Call {
    /// Appends an input of the call's type.
    pub(crate) fn input(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(self.dtype, numbers)));
    }

    /// Appends an input that is float32 in every type.
    pub(crate) fn gates(&mut self, shape: &[usize], numbers: &[f32]) {
        self.inputs.push((shape.to_vec(), Buffer::new(DType::F32, numbers)));
    }

    /// The inputs.
    pub(crate) fn tensors(&self) -> Vec<Option<Tensor<'_>>> {
        self.inputs.iter().map(|(shape, buffer)| Some(Tensor { shape, data: buffer.data() })).collect()
    }

    /// What the reference makes of it.
    pub(crate) fn expected(&self) -> Vec<f64> {
        (self.attributes.operator().reference)(&self.attributes, &self.tensors())
    }

    /// What `kernel` makes of it, on an output of `len` elements that is full of NaN.
    pub(crate) fn run(&self, kernel: &Kernel, len: usize, host: &dyn Host) -> Result<(Vec<f64>, Work), Error> {
        self.run_on(kernel, &self.tensors(), len, host)
    }

    fn run_on(
        &self,
        kernel: &Kernel,
        inputs: &[Option<Tensor<'_>>],
        len: usize,
        host: &dyn Host,
    ) -> Result<(Vec<f64>, Work), Error> {
        let dtype = self.attributes.operator().output_dtype(self.dtype);
        let mut output = Buffer::new(dtype, &vec![f32::NAN; len]);
        let work = kernel.run(&self.attributes, inputs, output.data_mut(), host)?;
        Ok(((0..len).map(|i| output.data().at(i)).collect(), work))
    }

    /// What `kernel` packs of the inputs.
    pub(crate) fn pack(&self, kernel: &Kernel) -> Vec<Option<Packed>> {
        let one = |(i, tensor): (usize, &Option<Tensor<'_>>)| {
            tensor.and_then(|tensor| kernel.pack(&self.attributes, i, tensor).unwrap())
        };
        self.tensors().iter().enumerate().map(one).collect()
    }

    /// Runs every kernel that this processor supports with these numbers of threads, on inputs as they are and on packed ones,
    /// and panics where one differs from the reference, or from what it gave with another number of threads. `exact` tells which
    /// elements must be equal. The result is the work on inputs as they are.
    pub(crate) fn check(&self, threads: &[usize], exact: impl Fn(usize) -> bool) -> Vec<Work> {
        let expected = self.expected();
        // The operators' figure is for outputs up to 4.
        let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
        let dtype = self.attributes.operator().output_dtype(self.dtype);
        let tolerance = tolerance::operator_output(dtype) * (largest / 4.0).max(1.0);
        let mut works = Vec::new();
        for kernel in kernels_of(self.attributes.operator()) {
            let packed = self.pack(kernel);
            let inputs: Vec<_> = self
                .tensors()
                .into_iter()
                .zip(&packed)
                .map(|(tensor, packed)| in_place(tensor, packed.as_ref()))
                .collect();
            let mut ways = vec![("", self.tensors())];
            if packed.iter().any(Option::is_some) {
                ways.push((", packed", inputs));
            }
            for (i, (way, inputs)) in ways.iter().enumerate() {
                let mut first: Option<(Vec<f64>, Work)> = None;
                for &threads in threads {
                    let (found, work) = self
                        .run_on(kernel, inputs, expected.len(), &Threads::new(threads))
                        .unwrap_or_else(|error| panic!("{kernel:?}{way}: {error}"));
                    for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
                        let allowed = if exact(i) { 0.0 } else { tolerance };
                        assert!(
                            (found - expected).abs() <= allowed,
                            "{kernel:?}{way}, {threads} threads, element {i}: expected {expected}, found {found}"
                        );
                    }
                    match &first {
                        Some((other, _)) => {
                            assert!(*other == found, "{kernel:?}{way}: {threads} threads change the result")
                        }
                        None => first = Some((found, work)),
                    }
                }
                works.extend(first.filter(|_| i == 0).map(|(_, work)| work));
            }
        }
        works
    }
}

/// What was packed, in its tensor's place.
fn in_place<'a>(tensor: Option<Tensor<'a>>, packed: Option<&'a Packed>) -> Option<Tensor<'a>> {
    match (tensor, packed) {
        (Some(tensor), Some(packed)) => Some(Tensor { data: Data::Packed(packed), ..tensor }),
        (tensor, _) => tensor,
    }
}
