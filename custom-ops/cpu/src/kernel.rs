//! Kernels: implementations of operators. A call is validated once; from there on its data are typed.

use crate::gemm::{Matrix, Panels, Source, Weight};
use crate::host::Host;
use crate::isa::{Isa, MatrixUnit, Target};
use crate::matrix::Parts;
use crate::packed::{Input, Packed, Packing};
use crate::settings::Precision;
use moh_operators::{
    Attributes, DType, Data, DataMut, Definition, Element, Error, Operator, Reader, Scalar, Tensor, problem_of,
    shape::check_length,
};

/// Counters of a call, for tests and profiles: the work must depend on the gates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiply-accumulate operations of the matrix products, including padding of register tiles.
    pub macs: u64,
}

/// Reads a call's inputs as slices of element type T.
pub(crate) struct Slices<'a, T> {
    operator: &'static Operator,
    inputs: &'a [Option<Input<'a>>],
    element: std::marker::PhantomData<T>,
}

/// A weight: the tensor, its packed form, or both.
#[derive(Clone, Copy)]
pub(crate) enum WeightData<'a, T> {
    Plain(&'a [T]),
    Packed(&'a Packed),
    Both(&'a [T], &'a Packed),
}

impl<'a, T: Element> WeightData<'a, T> {
    /// The tensor's elements.
    pub(crate) fn plain(self) -> Option<&'a [T]> {
        match self {
            WeightData::Plain(data) | WeightData::Both(data, _) => Some(data),
            WeightData::Packed(_) => None,
        }
    }

    /// The elements, unless panels are to be read in their place.
    pub(crate) fn without_panels(self) -> Option<&'a [T]> {
        match self {
            WeightData::Both(_, packed) if packed.is_panels() => None,
            _ => self.plain(),
        }
    }

    /// A matrix of (inner indices, columns) as blocks in parts `P`, if it is packed so.
    pub(crate) fn blocks<P: Parts>(self, size: [usize; 2]) -> Option<*const f32> {
        match self {
            WeightData::Packed(packed) | WeightData::Both(_, packed) => packed.blocks::<P>(size),
            WeightData::Plain(_) => None,
        }
    }

    /// The weight as `panels`; `matrix` is its layout if it is not packed.
    ///
    /// # Errors
    /// [`Error::Packed`], with `operator` and `input`, if the weight was packed for another use.
    pub(crate) fn panels(
        self,
        operator: &'static str,
        input: &'static str,
        panels: Panels,
        matrix: impl FnOnce(&[T]) -> Matrix<T>,
    ) -> Result<Weight<'a, T>, Error> {
        let source = match self {
            WeightData::Packed(packed) => Source::Packed(packed.panels(operator, input, &panels)?),
            WeightData::Both(_, packed) if packed.is_panels() => {
                Source::Packed(packed.panels(operator, input, &panels)?)
            }
            WeightData::Plain(data) | WeightData::Both(data, _) => Source::Matrix(matrix(data)),
        };
        Ok(Weight { panels, source })
    }
}

impl<'a, T: Element> Slices<'a, T> {
    fn get(&self, input: usize) -> Result<Input<'a>, Error> {
        let found = || self.inputs.iter().flatten().count();
        let required = self.operator.required_inputs().to_string();
        self.inputs.get(input).copied().flatten().ok_or_else(|| Error::InputCount {
            operator: self.operator.name,
            expected: required,
            found: found(),
        })
    }

    fn slice<E: Scalar>(&self, input: usize) -> Result<&'a [E], Error> {
        let given = self.get(input)?;
        let data = match given {
            Input::Tensor(tensor) | Input::Both(tensor, _) => E::slice(tensor.data),
            Input::Packed(_) => None,
            // The kernel does not read it.
            Input::InPlace(..) => Some(&[][..]),
        };
        data.ok_or_else(|| match given {
            Input::Packed(_) => Error::Packed { operator: self.operator.name, input: self.name(input) },
            _ => Error::Type {
                operator: self.operator.name,
                input: self.name(input),
                expected: E::DTYPE,
                found: given.dtype(),
            },
        })
    }

    fn name(&self, input: usize) -> &'static str {
        self.operator.inputs.get(input).map_or("beyond the last", |operand| operand.name)
    }
}

impl<'a, T: Element> Reader for Slices<'a, T> {
    type T = &'a [T];
    type Weight = WeightData<'a, T>;
    type F32 = &'a [f32];
    type U8 = &'a [u8];
    type I64 = &'a [i64];
    type Error = Error;

    fn present(&self, input: usize) -> bool {
        self.inputs.get(input).is_some_and(Option::is_some)
    }

    fn t(&self, input: usize) -> Result<&'a [T], Error> {
        self.slice(input)
    }

    fn weight(&self, input: usize) -> Result<WeightData<'a, T>, Error> {
        match self.get(input)? {
            Input::Packed(packed) => Ok(WeightData::Packed(packed)),
            Input::Both(_, packed) => self.slice(input).map(|data| WeightData::Both(data, packed)),
            Input::Tensor(_) | Input::InPlace(..) => self.slice(input).map(WeightData::Plain),
        }
    }

    fn f32(&self, input: usize) -> Result<&'a [f32], Error> {
        self.slice(input)
    }

    fn u8(&self, input: usize) -> Result<&'a [u8], Error> {
        self.slice(input)
    }

    fn i64(&self, input: usize) -> Result<&'a [i64], Error> {
        self.slice(input)
    }
}

/// A validated call. Slice lengths match `problem`.
pub(crate) struct Call<'a, O: CpuOperator, I, T: Element> {
    pub(crate) isa: I,
    /// The matrix unit, for kernels that use one.
    pub(crate) unit: Option<MatrixUnit>,
    pub(crate) problem: &'a O::Problem,
    pub(crate) inputs: O::Inputs<Slices<'a, T>>,
    /// Uninitialised; every element must be written.
    pub(crate) output: &'a mut [O::Output<T>],
    pub(crate) host: &'a dyn Host,
}

/// A weight to pack. Its length matches its shape.
pub(crate) struct ToPack<'a, O: CpuOperator, T> {
    pub(crate) unit: Option<MatrixUnit>,
    pub(crate) attributes: &'a O::Attributes,
    /// Its number among the inputs.
    pub(crate) input: usize,
    pub(crate) shape: &'a [usize],
    pub(crate) weight: &'a [T],
    pub(crate) packing: Packing,
}

/// The CPU kernel of an operator: one generic implementation, compiled for every instruction set and element type.
pub(crate) trait CpuOperator: Definition {
    /// The output's element type.
    type Output<T: Element>: Element;

    /// Whether the kernel uses a matrix unit. If not, it runs under the vector instruction set's name only.
    fn uses(_unit: MatrixUnit) -> bool {
        false
    }

    /// Computes the output.
    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error>;

    /// Whether hosts that run bodies should be left to run this one's: their own operators are as fast. `packs`: whether the host packs weights.
    fn is_left_to_body<I: Isa>(_unit: Option<MatrixUnit>, _precision: Precision, _packs: bool) -> bool {
        false
    }

    /// Packs a weight; `None` for an input that is not packed.
    fn pack<I: Isa, T: Element>(_isa: I, _of: &ToPack<'_, Self, T>) -> Result<Option<Packed>, Error> {
        Ok(None)
    }
}

/// Allocates a call's output once its type and shape are known.
pub(crate) type MakeOutput<'m, 'o> = dyn FnMut(DType, &[usize]) -> Result<DataMut<'o>, Error> + 'm;

type Run = for<'o> fn(&Attributes, &[Option<Input<'_>>], &mut MakeOutput<'_, 'o>, &dyn Host) -> Result<Work, Error>;
type Pack = fn(&Attributes, usize, Tensor<'_>, Packing) -> Result<Option<Packed>, Error>;

/// An operator's kernel for one instruction set; runs every [`DType`].
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The operator.
    pub operator: &'static Operator,
    /// The instruction set, a value of [`crate::ISA_VARIABLE`].
    pub isa: &'static str,
    /// Whether this processor can run it.
    pub supported: fn() -> bool,
    /// Whether automatic selection may pick it.
    pub automatic: fn() -> bool,
    /// Whether a host that runs the operator's body is as fast.
    pub(crate) left_to_body: fn(Precision, bool) -> bool,
    run: Run,
    pack: Pack,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.operator.name, self.isa)
    }
}

impl Kernel {
    pub(crate) const fn new<O: CpuOperator, G: Target>() -> Kernel {
        Kernel {
            operator: O::OPERATOR,
            isa: G::NAME,
            // A kernel that does not use the matrix unit would only duplicate the vector instruction set's kernel.
            supported: || G::detect().is_some_and(|(_, unit)| unit.is_none_or(O::uses)),
            automatic: G::is_automatic,
            left_to_body: |precision, packs| {
                O::is_left_to_body::<G::Vectors>(G::detect().and_then(|(_, unit)| unit), precision, packs)
            },
            run: run::<O, G>,
            pack: pack::<O, G>,
        }
    }

    /// Validates the inputs, the output's type and its length, and runs this kernel.
    ///
    /// # Errors
    /// [`Error`] naming the input, the expected and the found value; or out of memory; or an unsupported instruction
    /// set.
    pub fn run(
        &self,
        attributes: &Attributes,
        inputs: &[Option<Input<'_>>],
        output: DataMut<'_>,
        host: &dyn Host,
    ) -> Result<Work, Error> {
        let mut output = Some(output);
        let mut take = |dtype, shape: &[usize]| {
            let output = output.take().unwrap_or(DataMut::F32(&mut []));
            check_output(self.operator, dtype, shape, &output)?;
            Ok(output)
        };
        (self.run)(attributes, inputs, &mut take, host)
    }

    /// As [`Kernel::run`], into the output that `make` returns for the output's type and shape.
    ///
    /// # Errors
    /// As [`Kernel::run`], and the errors of `make`.
    pub fn run_into<'o, E: From<Error>>(
        &self,
        attributes: &Attributes,
        inputs: &[Option<Input<'_>>],
        host: &dyn Host,
        make: impl FnOnce(DType, &[usize]) -> Result<DataMut<'o>, E>,
    ) -> Result<Work, E> {
        let (mut make, mut failure) = (Some(make), None);
        let mut take = |dtype, shape: &[usize]| {
            let made = make.take().map_or(Ok(DataMut::F32(&mut [])), |make| make(dtype, shape));
            // The caller's own error is returned unchanged; this one only ends the call.
            let output = made.map_err(|error| {
                failure = Some(error);
                Error::OutOfMemory { bytes: 0 }
            })?;
            check_output(self.operator, dtype, shape, &output)?;
            Ok(output)
        };
        let result = (self.run)(attributes, inputs, &mut take, host);
        match failure {
            Some(failure) => Err(failure),
            None => Ok(result?),
        }
    }

    /// As [`crate::pack`], for this kernel.
    ///
    /// # Errors
    /// As [`crate::pack`].
    pub fn pack(
        &self,
        attributes: &Attributes,
        input: usize,
        weight: Tensor<'_>,
        packing: Packing,
    ) -> Result<Option<Packed>, Error> {
        let name = self.operator.inputs.get(input).map_or("input", |operand| operand.name);
        check_length(self.operator.name, name, weight.shape, weight.data.len())?;
        (self.pack)(attributes, input, weight, packing)
    }
}

fn check_output(operator: &Operator, dtype: DType, shape: &[usize], output: &DataMut<'_>) -> Result<(), Error> {
    if output.dtype() != dtype {
        let (expected, found) = (dtype, output.dtype());
        return Err(Error::Type { operator: operator.name, input: operator.output.name, expected, found });
    }
    check_length(operator.name, operator.output.name, shape, output.len())
}

/// The entry point of every call: validates, makes the output, and dispatches on the inputs' element type.
fn run<'o, O: CpuOperator, G: Target>(
    attributes: &Attributes,
    inputs: &[Option<Input<'_>>],
    output: &mut MakeOutput<'_, 'o>,
    host: &dyn Host,
) -> Result<Work, Error> {
    let (isa, unit) = detect::<O, G>()?;
    attributes.get::<O>()?;
    let described: Vec<_> = inputs.iter().map(|input| input.as_ref().map(|i| (i.shape(), i.dtype()))).collect();
    let (dtype, shape) = O::OPERATOR.validate(attributes, &described)?;
    for (i, (operand, input)) in O::INPUTS.iter().zip(inputs).enumerate() {
        match input {
            Some(Input::Both(tensor, packed))
                if tensor.shape != packed.shape() || tensor.data.dtype() != packed.dtype() =>
            {
                return Err(Error::Packed { operator: O::NAME, input: operand.name });
            }
            Some(Input::Tensor(tensor) | Input::Both(tensor, _)) => {
                check_length(O::NAME, operand.name, tensor.shape, tensor.data.len())?
            }
            Some(Input::InPlace(found, _)) if O::IN_PLACE != Some(i) || *found != shape => {
                let (expected, found) = (format!("the output's, {shape:?}"), format!("{found:?}"));
                return Err(Error::Shape { operator: O::NAME, input: operand.name, expected, found });
            }
            _ => {}
        }
    }
    let problem = &problem_of::<O>(attributes, described.iter().map(|input| input.map(|(shape, _)| shape)))?;
    let output = output(O::OPERATOR.output_dtype(dtype), &shape)?;
    match dtype {
        DType::F16 => typed::<O, G, half::f16>(isa, unit, problem, inputs, output, host),
        DType::BF16 => typed::<O, G, half::bf16>(isa, unit, problem, inputs, output, host),
        // Validation has refused integers.
        DType::F32 | DType::U8 | DType::I64 => typed::<O, G, f32>(isa, unit, problem, inputs, output, host),
    }
}

fn typed<O: CpuOperator, G: Target, T: Element>(
    isa: G::Vectors,
    unit: Option<MatrixUnit>,
    problem: &O::Problem,
    inputs: &[Option<Input<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    let found = output.dtype();
    let wrong = Error::Type { operator: O::NAME, input: O::OUTPUT.name, expected: O::Output::<T>::DTYPE, found };
    let output = O::Output::<T>::slice_mut(output).ok_or(wrong)?;
    let inputs = O::inputs(&Slices { operator: O::OPERATOR, inputs, element: std::marker::PhantomData })?;
    O::run(Call { isa, unit, problem, inputs, output, host })
}

fn pack<O: CpuOperator, G: Target>(
    attributes: &Attributes,
    input: usize,
    weight: Tensor<'_>,
    packing: Packing,
) -> Result<Option<Packed>, Error> {
    match weight.data {
        Data::F32(data) => pack_typed::<O, G, f32>(attributes, input, weight.shape, data, packing),
        Data::F16(data) => pack_typed::<O, G, half::f16>(attributes, input, weight.shape, data, packing),
        Data::BF16(data) => pack_typed::<O, G, half::bf16>(attributes, input, weight.shape, data, packing),
        Data::U8(_) | Data::I64(_) => Ok(None),
    }
}

fn pack_typed<O: CpuOperator, G: Target, T: Element>(
    attributes: &Attributes,
    input: usize,
    shape: &[usize],
    weight: &[T],
    packing: Packing,
) -> Result<Option<Packed>, Error> {
    let (isa, unit) = detect::<O, G>()?;
    let attributes = attributes.get::<O>()?;
    O::pack(isa, &ToPack { unit, attributes, input, shape, weight, packing })
}

fn detect<O: CpuOperator, G: Target>() -> Result<(G::Vectors, Option<MatrixUnit>), Error> {
    let found = format!("{}/{}", O::NAME, G::NAME);
    G::detect().ok_or(Error::Kernel { operator: O::NAME, expected: Vec::new(), found })
}
