//! CPU kernels of the `ai.moh` operators. They know no runtime: a [`Host`] lends them threads and memory.
//!
//! An operator is one file (or folder) and one row of [`kernels`]; an instruction set is one file and one row in `isa.rs`.

// Matrix units are x86-64's only.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports, unreachable_code))]

mod activation;
mod epilogue;
mod gather;
mod gemm;
mod head_linear;
mod head_linear_nbits;
mod host;
mod isa;
mod kernel;
pub mod layers;
mod matrix;
mod memory;
pub mod nbits;
mod packed;
pub mod peak;
mod product;
mod selection;
mod settings;
mod terms;
mod workers;

pub use host::{Host, Pod, SCRATCH_ALIGN, Scratch, Threads};
pub use kernel::{Kernel, Work};
pub use packed::{Input, Packed, Packing};
pub use settings::{ISA_VARIABLE, PRECISION_VARIABLE, Precision, checked_precision};

use isa::{Target, WithUnit, each_isa, each_unit};
use moh_operators::{Attributes, DType, DataMut, Error, Operator, Tensor};

/// Declares the operators' modules, and for every instruction set a table of their kernels.
macro_rules! operators {
    ($($module:ident::$operator:ident),+ $(,)?) => {
        $(mod $module;)+

        struct Table<G>(std::marker::PhantomData<G>);

        impl<G: Target> Table<G> {
            const KERNELS: &'static [Kernel] = &[$(Kernel::new::<moh_operators::$operator, G>()),+];
        }
    };
}

operators! {
    routed_attention::RoutedAttention,
    routed_projection::RoutedProjection,
    routed_combine::RoutedCombine,
    routed_mlp::RoutedMlp,
    aggregated_attention::RoutedAggregatedAttention,
    top_k_router::TopKRouter,
    routed_projection_nbits::RoutedProjectionNBits,
    routed_combine_nbits::RoutedCombineNBits,
    routed_mlp_nbits::RoutedMlpNBits,
    linear_nbits::LinearNBits,
    linear::Linear,
    linear_activation::LinearActivation,
    linear_activation_nbits::LinearActivationNBits,
    layer_norm::LayerNorm,
    depthwise_conv::DepthwiseConv,
    cache_update::CacheUpdate,
    routed_cached_attention::RoutedCachedAttention,
}

macro_rules! vectors {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
        &[$(#[$cfg] Table::<isa::$module::$token>::KERNELS,)*]
    };
}

macro_rules! units {
    ($(#[$cfg:meta] $module:ident::$token:ident,)*) => {
        &[$(#[$cfg] Table::<WithUnit<isa::$module::$token>>::KERNELS,)*]
    };
}

/// One table an instruction set, best first; matrix units before vectors.
static TABLES: [&[&[Kernel]]; 2] = [each_unit!(units), each_isa!(vectors)];

/// Every kernel, best first; of one operator's, the first that is supported is used. Conformance tests iterate them.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    TABLES.iter().flat_map(|tables| tables.iter()).flat_map(|kernels| kernels.iter())
}

/// Runs an operator with the best kernel for this processor, or the one that the environment variable [`ISA_VARIABLE`] names.
///
/// The inputs are validated first; `make` then gives the output, whose elements may be undefined, for its type and shape.
///
/// # Errors
/// [`Error`] naming the input, what was expected and what was found; or no memory; or an [`ISA_VARIABLE`] that this
/// processor does not support; or what `make` fails with.
pub fn run_into<'o, E: From<Error>>(
    attributes: &Attributes,
    inputs: &[Option<Input<'_>>],
    host: &dyn Host,
    make: impl FnOnce(DType, &[usize]) -> Result<DataMut<'o>, E>,
) -> Result<Work, E> {
    preferred(attributes.operator())?.run_into(attributes, inputs, host, make)
}

/// As [`run_into`], into an output of known size.
///
/// # Errors
/// As [`run_into`]; an output of another type or length.
pub fn run(
    attributes: &Attributes,
    inputs: &[Option<Input<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    preferred(attributes.operator())?.run(attributes, inputs, output, host)
}

/// Packs a weight for [`run`], which takes it as [`Input::Packed`] in the tensor's place, or as [`Input::Both`] if `packing` says so; `None` for
/// an input that is read as it is. For constants only, once: the products then need not pack at every call.
///
/// `input` is the weight's number in [`Operator::inputs`].
///
/// # Errors
/// [`Error`] naming the weight where its shape does not fit the attributes; or no memory; or as [`run`], no kernel.
pub fn pack(
    attributes: &Attributes,
    input: usize,
    weight: Tensor<'_>,
    packing: Packing,
) -> Result<Option<Packed>, Error> {
    preferred(attributes.operator())?.pack(attributes, input, weight, packing)
}

/// The kernel that [`run`] uses.
fn preferred(operator: &'static Operator) -> Result<&'static Kernel, Error> {
    let forced = settings::forced_isa();
    select(operator, forced)
        // An operator that has no use for a matrix unit uses the vectors beside it.
        .or_else(|| select(operator, Some(isa::vectors_beside(forced?)?)))
        .ok_or_else(|| no_kernel(operator, forced.unwrap_or("none").to_owned()))
}

/// The kernel that [`run`] would use for an operator, without regard to the environment: the best one, or that of `isa`.
pub fn select(operator: &Operator, isa: Option<&str>) -> Option<&'static Kernel> {
    let fits = |kernel: &&Kernel| {
        kernel.operator == operator
            && isa.map_or_else(|| (kernel.automatic)(), |isa| kernel.isa == isa)
            && (kernel.supported)()
    };
    kernels().find(fits)
}

/// Whether a host that runs the operator's body with products of its own is as fast as the kernel of this processor; `packs` says whether the host
/// packs constant weights, [`pack`]. Not where [`ISA_VARIABLE`] names one: who does so wants kernels.
pub fn is_left_to_body(operator: &'static Operator, precision: Precision, packs: bool) -> bool {
    settings::forced_isa().is_none() && preferred(operator).is_ok_and(|kernel| (kernel.left_to_body)(precision, packs))
}

/// The instruction sets that this processor has kernels for, best first: values of [`ISA_VARIABLE`].
pub fn instruction_sets() -> Vec<&'static str> {
    let mut sets = Vec::new();
    for kernel in kernels().filter(|kernel| (kernel.supported)()) {
        if !sets.contains(&kernel.isa) {
            sets.push(kernel.isa);
        }
    }
    sets
}

/// The instruction set that [`run`] uses for operators that have a kernel for it: the one that [`ISA_VARIABLE`] names, or the best one.
///
/// # Errors
/// [`Error::InstructionSet`] for an [`ISA_VARIABLE`] that names none of [`instruction_sets`]. Without this check the first call of an
/// operator would fail.
pub fn instruction_set() -> Result<&'static str, Error> {
    let forced = settings::forced_isa();
    let fits = |kernel: &&Kernel| {
        (kernel.supported)() && forced.map_or_else(|| (kernel.automatic)(), |forced| kernel.isa == forced)
    };
    kernels().find(fits).map(|kernel| kernel.isa).ok_or_else(|| Error::InstructionSet {
        variable: ISA_VARIABLE,
        expected: instruction_sets(),
        found: forced.unwrap_or("none").to_owned(),
    })
}

fn no_kernel(operator: &Operator, found: String) -> Error {
    let kernels = kernels().filter(|kernel| kernel.operator == operator && (kernel.supported)());
    Error::Kernel { operator: operator.name, expected: kernels.map(|kernel| kernel.isa).collect(), found }
}
