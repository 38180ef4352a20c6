//! CPU kernels, and the one way in: validate, choose, run.

mod aggregated_attention;
mod gemm;
mod isa;
pub mod layers;
mod memory;
mod packed;
mod routed_attention;
mod routed_linear;
mod routed_mlp;
mod selection;
mod top_k_router;
mod workers;

use crate::error::Error;
use crate::host::Host;
use crate::schema::{
    Attributes, Operator, ROUTED_AGGREGATED_ATTENTION, ROUTED_ATTENTION, ROUTED_COMBINE, ROUTED_MLP, ROUTED_PROJECTION,
    TOP_K_ROUTER,
};
use crate::tensor::{DataMut, Tensor};
use isa::Isa;
pub use packed::Packed;

/// What a call computed, for tests and profiles: it must follow the gates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiply-accumulate operations of the matrix products, with those that only fill up a register tile.
    pub macs: u64,
}

/// A kernel's code, on validated inputs. It writes every element of the output, which starts out undefined.
type Run = fn(&Attributes, &[Option<Tensor<'_>>], DataMut<'_>, &dyn Host) -> Result<Work, Error>;

/// A kernel's way to pack an input, whose length fits its shape; `None` for one that it reads as it is.
type Pack = fn(&Attributes, usize, Tensor<'_>) -> Result<Option<Packed>, Error>;

/// One implementation of one operator, for every [`crate::DType`].
pub struct Kernel {
    /// What it implements.
    pub operator: &'static Operator,
    /// The instruction set that it is written for: a value of [`ISA_VARIABLE`].
    pub isa: &'static str,
    /// Whether this processor can run it.
    pub supported: fn() -> bool,
    /// Whether it is to be preferred to the supported ones after it, unless another is named.
    pub chosen: fn() -> bool,
    run: Run,
    pack: Pack,
}

/// Name of the environment variable that chooses the kernels by [`Kernel::isa`] instead of the best ones.
pub const ISA_VARIABLE: &str = "MOH_CPU_ISA";

/// Instruction sets that some operators have kernels for, beside AVX-512's.
const MATRIX_UNITS: [&str; 2] = ["amx", "avx512bf16"];

/// A kernel for every instruction set, best first.
macro_rules! kernels {
    ($($operator:ident: $module:ident::$run:ident, $packing:ident::$pack:ident;)*) => {
        &[
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Kernel {
                supported: || isa::avx512::Avx512::detect().is_some() && isa::amx::Amx::detect().is_some(),
                ..kernel::<isa::avx512::Avx512>(&ROUTED_ATTENTION, "amx", routed_attention::run_amx, packed::nothing::<isa::avx512::Avx512>)
            },
            #[cfg(target_arch = "x86_64")]
            Kernel {
                supported: || isa::avx512::Avx512::detect().is_some() && isa::dot::Dot::detect().is_some(),
                chosen: isa::dot::Dot::fast,
                ..kernel::<isa::avx512::Avx512>(&ROUTED_ATTENTION, "avx512bf16", routed_attention::run_dot, packed::nothing::<isa::avx512::Avx512>)
            },
            $(
            #[cfg(target_arch = "x86_64")]
            kernel::<isa::avx512::Avx512>(&$operator, "avx512", $module::$run::<isa::avx512::Avx512>, $packing::$pack::<isa::avx512::Avx512>),
            #[cfg(target_arch = "x86_64")]
            kernel::<isa::avx2::Avx2>(&$operator, "avx2", $module::$run::<isa::avx2::Avx2>, $packing::$pack::<isa::avx2::Avx2>),
            #[cfg(target_arch = "aarch64")]
            kernel::<isa::neon::Neon>(&$operator, "neon", $module::$run::<isa::neon::Neon>, $packing::$pack::<isa::neon::Neon>),
            kernel::<isa::portable::Portable>(&$operator, "portable", $module::$run::<isa::portable::Portable>, $packing::$pack::<isa::portable::Portable>),
        )*]
    };
}

/// Every kernel; of one operator's, the first that is supported is used. Conformance tests iterate this list.
pub static KERNELS: &[Kernel] = kernels! {
    ROUTED_ATTENTION: routed_attention::run, packed::nothing;
    ROUTED_PROJECTION: routed_linear::project, routed_linear::pack_projection;
    ROUTED_COMBINE: routed_linear::combine, routed_linear::pack_combine;
    ROUTED_MLP: routed_mlp::run, routed_mlp::pack;
    ROUTED_AGGREGATED_ATTENTION: aggregated_attention::run, packed::nothing;
    TOP_K_ROUTER: top_k_router::run, packed::nothing;
};

const fn kernel<I: Isa>(operator: &'static Operator, isa: &'static str, run: Run, pack: Pack) -> Kernel {
    Kernel { operator, isa, supported: || I::detect().is_some(), chosen: || true, run, pack }
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.operator.name, self.isa)
    }
}

impl Kernel {
    /// Validates the inputs, the output's type and its length, and runs this kernel.
    ///
    /// # Errors
    /// [`Error`] naming the input, what was expected and what was found; or no memory; or a processor that lacks the
    /// instructions.
    pub fn run(
        &self,
        attributes: &Attributes,
        inputs: &[Option<Tensor<'_>>],
        output: DataMut<'_>,
        host: &dyn Host,
    ) -> Result<Work, Error> {
        let operator = self.operator;
        if attributes.operator() != operator || !(self.supported)() {
            return Err(no_kernel(attributes.operator(), format!("{self:?}")));
        }
        let (dtype, shape) = operator.validate(attributes, inputs)?;
        let expected = operator.output_dtype(dtype);
        if output.dtype() != expected {
            let found = output.dtype();
            return Err(Error::Type { operator: operator.name, input: operator.output.name, expected, found });
        }
        let (expected, found) = (shape.iter().product(), output.len());
        if found != expected {
            return Err(Error::Length { operator: operator.name, tensor: operator.output.name, expected, found });
        }
        (self.run)(attributes, inputs, output, host)
    }

    /// As [`pack`], for this kernel.
    ///
    /// # Errors
    /// As [`pack`].
    pub fn pack(&self, attributes: &Attributes, input: usize, weight: Tensor<'_>) -> Result<Option<Packed>, Error> {
        if attributes.operator() != self.operator || !(self.supported)() {
            return Err(no_kernel(attributes.operator(), format!("{self:?}")));
        }
        let (expected, found) = (weight.shape.iter().product(), weight.data.len());
        if expected != found {
            let tensor = self.operator.inputs.get(input).map_or("input", |operand| operand.name);
            return Err(Error::Length { operator: self.operator.name, tensor, expected, found });
        }
        (self.pack)(attributes, input, weight)
    }
}

/// Runs an operator: validates the inputs and the output's type and length, then calls the best kernel for this
/// processor, or the one that the environment variable [`ISA_VARIABLE`] names.
///
/// # Errors
/// [`Error`] naming the input, what was expected and what was found; or no memory; or an [`ISA_VARIABLE`] that this
/// processor does not support.
pub fn run(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    preferred(attributes.operator())?.run(attributes, inputs, output, host)
}

/// Packs a weight for [`run`], which takes it as [`crate::Data::Packed`] in the tensor's place; `None` for an input that is
/// read as it is. For constants only, once: the products then need not pack at every call. The tensor may be dropped.
///
/// `input` is the weight's number in [`Operator::inputs`].
///
/// # Errors
/// [`Error`] naming the weight where its shape does not fit the attributes; or no memory; or as [`run`], no kernel.
pub fn pack(attributes: &Attributes, input: usize, weight: Tensor<'_>) -> Result<Option<Packed>, Error> {
    preferred(attributes.operator())?.pack(attributes, input, weight)
}

/// The kernel that [`run`] uses.
fn preferred(operator: &'static Operator) -> Result<&'static Kernel, Error> {
    let forced = forced();
    select(operator, forced)
        // An operator that has nothing for a matrix unit uses the vectors beside it.
        .or_else(|| forced.filter(|isa| MATRIX_UNITS.contains(isa)).and_then(|_| select(operator, Some("avx512"))))
        .ok_or_else(|| no_kernel(operator, forced.unwrap_or("none").to_owned()))
}

/// The kernel that [`run`] would use for an operator, without regard to the environment: the best one, or that of `isa`.
pub fn select(operator: &Operator, isa: Option<&str>) -> Option<&'static Kernel> {
    let fits = |kernel: &&Kernel| {
        kernel.operator == operator
            && isa.map_or_else(|| (kernel.chosen)(), |isa| kernel.isa == isa)
            && (kernel.supported)()
    };
    KERNELS.iter().find(fits)
}

/// The environment is read once: its accessors take a lock, and changing it while kernels run would mean nothing.
fn forced() -> Option<&'static str> {
    static FORCED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let read = || std::env::var(ISA_VARIABLE).ok().filter(|isa| !isa.is_empty());
    FORCED.get_or_init(read).as_deref()
}

fn no_kernel(operator: &Operator, found: String) -> Error {
    let kernels = KERNELS.iter().filter(|kernel| kernel.operator == operator && (kernel.supported)());
    Error::Kernel { operator: operator.name, expected: kernels.map(|kernel| kernel.isa).collect(), found }
}
