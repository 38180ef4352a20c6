//! CUDA kernels, and the one way in: validate, choose, launch. Only with feature `cuda`; needs no CUDA library to link or load.
//!
//! Kernels are in `cuda/*.cu`; each becomes a [`Module`] of [`modules`], loaded at its first use in a context. Everything
//! here is asynchronous: a call puts its launches on the host's [`Stream`] and returns.

mod aggregated_attention;
pub mod driver;
pub mod module;
pub mod params;
pub mod plan;
mod routed_attention;
mod routed_linear;
mod routed_mlp;
pub mod stream;
mod tensor_map;
mod top_k_router;
pub mod workspace;

pub use driver::{Driver, RawPtr, RawStream};
pub use module::{Kernel, Module};
pub use params::{Params, TensorMap};
pub use stream::{Properties, Stream};
pub use workspace::{Arena, Workspace};

use crate::error::Error;
use crate::schema::{
    Attributes, OPERATORS, Operator, ROUTED_AGGREGATED_ATTENTION, ROUTED_ATTENTION, ROUTED_COMBINE, ROUTED_MLP,
    ROUTED_PROJECTION, TOP_K_ROUTER,
};
use crate::shape;
use crate::tensor::DType;

/// One [`Module`] a file of `cuda/`.
pub mod modules {
    use super::Module;

    /// The driver reads images in place.
    #[repr(align(64))]
    struct Aligned<B: ?Sized>(B);

    include!(concat!(env!("OUT_DIR"), "/modules.rs"));
}

/// The oldest compute capability that there is machine code for.
const OLDEST: (u32, u32) = (8, 0);

/// Alignment of tensors in bytes: vector accesses and TMA need it.
const ALIGN: usize = 16;

/// A contiguous tensor in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor<'a> {
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// Element type.
    pub dtype: DType,
    /// `shape.iter().product()` elements, aligned to 16 bytes.
    pub ptr: RawPtr,
}

/// A call's validated tensors, and what it runs on.
pub struct Call<'c> {
    /// The attributes.
    pub attributes: &'c Attributes,
    /// The inputs, as the schema lists them; optional ones may be absent.
    pub inputs: &'c [Option<DeviceTensor<'c>>],
    /// The output, of the shape that follows from the inputs.
    pub output: DeviceTensor<'c>,
    /// The element type T.
    pub dtype: DType,
    /// Where kernels are launched.
    pub stream: &'c Stream<'c>,
    /// Where they work.
    pub workspace: &'c dyn Workspace,
}

impl Call<'_> {
    /// An input's memory; null where it is absent.
    fn input(&self, i: usize) -> RawPtr {
        self.inputs.get(i).copied().flatten().map_or(0, |tensor| tensor.ptr)
    }
}

/// Puts an operator's kernels on the stream. They write every element of the output, which starts out undefined.
///
/// # Safety
/// The call's tensors are what they say they are, until the kernels have run.
type Launch = unsafe fn(&Call<'_>) -> Result<(), Error>;

/// The operators that have CUDA kernels.
static LAUNCHERS: &[(&Operator, Launch)] = &[
    (&ROUTED_ATTENTION, routed_attention::launch),
    (&ROUTED_PROJECTION, routed_linear::project),
    (&ROUTED_COMBINE, routed_linear::combine),
    (&ROUTED_MLP, routed_mlp::launch),
    (&ROUTED_AGGREGATED_ATTENTION, aggregated_attention::launch),
    (&TOP_K_ROUTER, top_k_router::launch),
];

/// Whether an operator has CUDA kernels.
pub fn supports(operator: &Operator) -> bool {
    launcher(operator).is_some()
}

/// The operators that have CUDA kernels, for every element type.
pub fn operators() -> impl Iterator<Item = &'static Operator> {
    OPERATORS.iter().copied().filter(|operator| supports(operator))
}

fn launcher(operator: &Operator) -> Option<Launch> {
    LAUNCHERS.iter().find(|(of, _)| *of == operator).map(|(_, launch)| *launch)
}

/// Validates a call, and puts its kernels on the stream.
///
/// # Safety
/// The tensors are device memory of the stream's context with as many elements as their shapes say; the output shares no
/// memory with an input; nothing writes to the inputs or uses the output until the stream has come past the call.
///
/// # Errors
/// [`Error`] naming the input, what was expected and what was found; no workspace; or what the driver refuses.
pub unsafe fn run(
    attributes: &Attributes,
    inputs: &[Option<DeviceTensor<'_>>],
    output: DeviceTensor<'_>,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<(), Error> {
    let operator = attributes.operator();
    let launch = launcher(operator).ok_or_else(|| Error::Kernel {
        operator: operator.name,
        expected: operators().map(|operator| operator.name).collect(),
        found: "no CUDA kernel".to_owned(),
    })?;
    let (major, minor) = stream.properties().capability;
    if (major, minor) < OLDEST {
        let reason =
            format!("the GPU has compute capability {major}.{minor}, the kernels need {}.{}", OLDEST.0, OLDEST.1);
        return Err(Error::NoCuda { reason });
    }
    let described: Vec<_> = inputs.iter().map(|input| input.map(|input| (input.shape, input.dtype))).collect();
    let (dtype, shape) = shape::validate_described(operator, attributes, &described)?;
    let expected = operator.output_dtype(dtype);
    if output.dtype != expected {
        let found = output.dtype;
        return Err(Error::Type { operator: operator.name, input: operator.output.name, expected, found });
    }
    if output.shape != shape {
        let (expected, found) = (format!("{shape:?}"), format!("{:?}", output.shape));
        return Err(Error::Shape { operator: operator.name, input: operator.output.name, expected, found });
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let named = operator.inputs.iter().zip(inputs).filter_map(|(operand, input)| Some((operand, input.as_ref()?)));
    for (name, tensor) in named.map(|(operand, input)| (operand.name, input)).chain([("the output", &output)]) {
        let found = (tensor.ptr % ALIGN as u64) as usize;
        if found != 0 {
            let tensor = name;
            return Err(Error::Alignment { operator: operator.name, tensor, expected: ALIGN, found });
        }
    }
    // SAFETY: validated; for the rest, as the caller promises.
    unsafe { launch(&Call { attributes, inputs, output, dtype, stream, workspace }) }
}
