//! A call of an operator on a GPU: validated once, then passed to the operator's launcher in its own types.

use crate::driver::{RawPtr, check_capability};
use crate::stream::{Properties, Stream};
use crate::workspace::{Arena, WORKSPACE_ALIGN, Workspace};
use moh_operators::{Attributes, DType, Definition, Error, List, Operator, problem_of};

/// Required alignment of tensors in bytes, for vector accesses and TMA.
const ALIGN: usize = 16;

/// A contiguous tensor in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor<'a> {
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Element type.
    pub dtype: DType,
    /// Pointer to `shape.iter().product()` elements, aligned to 16 bytes.
    pub ptr: RawPtr,
}

/// A validated call with a non-empty output.
pub struct Call<'c, O: Definition> {
    /// Sizes and attributes.
    pub problem: O::Problem,
    /// Pointers to the inputs.
    pub inputs: O::Inputs<List<'c, RawPtr>>,
    /// Pointer to the output, uninitialised.
    pub output: RawPtr,
    /// The element type T.
    pub dtype: DType,
    /// The stream on which kernels are launched.
    pub stream: &'c Stream<'c>,
    /// Device memory for intermediates.
    pub workspace: &'c dyn Workspace,
}

/// An operator with CUDA kernels.
pub trait CudaOperator: Definition {
    /// Launches kernels on the stream, which write every element of the output.
    ///
    /// Called twice for a node: first with a stream that launches nothing, to learn the size of the workspace.
    ///
    /// # Safety
    /// The call's tensors have the sizes of its problem, and stay valid until the kernels have run.
    ///
    /// # Errors
    /// A problem that no kernel supports; out of workspace memory; an error of the driver.
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error>;
}

type Launch = unsafe fn(
    &Attributes,
    &[Option<DeviceTensor<'_>>],
    RawPtr,
    DType,
    &Stream<'_>,
    &dyn Workspace,
) -> Result<(), Error>;

/// A type-erased [`CudaOperator`].
pub(crate) struct Launcher {
    pub(crate) operator: &'static Operator,
    launch: Launch,
}

/// The launcher of an operator.
pub(crate) const fn launcher<O: CudaOperator>() -> Launcher {
    Launcher { operator: O::OPERATOR, launch: launch::<O> }
}

impl Launcher {
    /// # Safety
    /// As [`crate::run_into`].
    pub(crate) unsafe fn run_into<E: From<Error>>(
        &self,
        attributes: &Attributes,
        inputs: &[Option<DeviceTensor<'_>>],
        stream: &Stream<'_>,
        workspace: &dyn Workspace,
        make: impl FnOnce(DType, &[usize]) -> Result<RawPtr, E>,
    ) -> Result<(), E> {
        let operator = self.operator;
        let Properties { capability, driver_version, .. } = stream.properties();
        check_capability(capability, driver_version)?;
        let described: Vec<_> = inputs.iter().map(|input| input.map(|input| (input.shape, input.dtype))).collect();
        let (dtype, shape) = operator.validate(attributes, &described)?;
        let output = make(operator.output_dtype(dtype), &shape)?;
        if shape.contains(&0) {
            return Ok(());
        }
        let named = operator.inputs.iter().zip(inputs).filter_map(|(operand, input)| Some((operand, input.as_ref()?)));
        let named = named.map(|(operand, input)| (operand.name, input.ptr));
        for (tensor, ptr) in named.chain([("the output", output)]) {
            let found = (ptr % ALIGN as u64) as usize;
            if found != 0 {
                return Err(Error::Alignment { operator: operator.name, tensor, expected: ALIGN, found }.into());
            }
        }
        let launch = |stream: &Stream<'_>, workspace: &Arena| {
            // SAFETY: the call is validated; the rest is the caller's contract.
            unsafe { (self.launch)(attributes, inputs, output, dtype, stream, workspace) }
        };
        let launched = || {
            // SAFETY: as nothing is launched, nothing uses the memory.
            let needed = unsafe { Arena::new(WORKSPACE_ALIGN as u64, usize::MAX / 2) };
            launch(&stream.without_launches(), &needed)?;
            let bytes = needed.used();
            let base = if bytes > 0 { workspace.allocate(bytes)? } else { 0 };
            // SAFETY: just allocated, or empty.
            launch(&stream.another_node(), &unsafe { Arena::new(base, bytes) })
        };
        launched().map_err(|error: Error| E::from(error))
    }
}

/// # Errors
/// [`Error::Type`] or [`Error::Shape`] if the output has another type or shape.
pub(crate) fn check_output(
    operator: &Operator,
    output: &DeviceTensor<'_>,
    dtype: DType,
    shape: &[usize],
) -> Result<(), Error> {
    let (operator, input) = (operator.name, operator.output.name);
    if output.dtype != dtype {
        return Err(Error::Type { operator, input, expected: dtype, found: output.dtype });
    }
    if output.shape != shape {
        let (expected, found) = (format!("{shape:?}"), format!("{:?}", output.shape));
        return Err(Error::Shape { operator, input, expected, found });
    }
    Ok(())
}

/// Converts a validated call to the operator's own types and launches it.
///
/// # Safety
/// As [`CudaOperator::launch`].
unsafe fn launch<O: CudaOperator>(
    attributes: &Attributes,
    inputs: &[Option<DeviceTensor<'_>>],
    output: RawPtr,
    dtype: DType,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<(), Error> {
    let problem = problem_of::<O>(attributes, inputs.iter().map(|input| input.map(|input| input.shape)))?;
    let pointers: Vec<Option<RawPtr>> = inputs.iter().map(|input| input.map(|input| input.ptr)).collect();
    let Ok(inputs) = O::inputs(&List { inputs: &pointers, absent: 0 });
    // SAFETY: the caller's contract.
    unsafe { O::launch(&Call { problem, inputs, output, dtype, stream, workspace }) }
}
