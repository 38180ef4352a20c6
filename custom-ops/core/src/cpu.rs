//! CPU kernels, and the one way in: validate, choose, run.

pub mod routed_attention;

use crate::error::Error;
use crate::host::Host;
use crate::schema::{Attributes, Operator, ROUTED_ATTENTION};
use crate::tensor::{DataMut, Tensor};

/// What a call computed, for tests and profiles: it must follow the gates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiply-accumulate operations of the matrix products.
    pub macs: u64,
}

/// A kernel's code, on validated inputs. It writes every element of the output, which starts out undefined.
pub type Run = fn(&Attributes, &[Option<Tensor<'_>>], DataMut<'_>, &dyn Host) -> Result<Work, Error>;

/// One implementation of one operator, for every [`crate::DType`].
pub struct Kernel {
    /// What it implements.
    pub operator: &'static Operator,
    /// Its name in tests and benchmarks.
    pub name: &'static str,
    /// Whether this processor can run it.
    pub supported: fn() -> bool,
    /// Its code.
    pub run: Run,
}

/// Every kernel; of one operator's, the first that is supported is used. Conformance tests iterate this list.
pub static KERNELS: &[Kernel] = &[Kernel {
    operator: &ROUTED_ATTENTION,
    name: "RoutedAttention/portable",
    supported: || true,
    run: routed_attention::run,
}];

/// Runs an operator: validates the inputs and the output's type and length, then calls the best kernel for this processor.
///
/// # Errors
/// [`Error`] naming the input, what was expected and what was found; or no memory.
pub fn run(
    attributes: &Attributes,
    inputs: &[Option<Tensor<'_>>],
    output: DataMut<'_>,
    host: &dyn Host,
) -> Result<Work, Error> {
    let operator = attributes.operator();
    let (dtype, shape) = operator.validate(attributes, inputs)?;
    if output.dtype() != dtype {
        let (expected, found) = (dtype, output.dtype());
        return Err(Error::Type { operator: operator.name, input: operator.output.name, expected, found });
    }
    let expected = shape.iter().product();
    if output.len() != expected {
        return Err(Error::Length {
            operator: operator.name,
            tensor: operator.output.name,
            expected,
            found: output.len(),
        });
    }
    let kernel = KERNELS.iter().find(|kernel| kernel.operator == operator && (kernel.supported)());
    match kernel {
        Some(kernel) => (kernel.run)(attributes, inputs, output, host),
        None => Err(Error::Attribute {
            operator: operator.name,
            attribute: "",
            expected: "an operator with a CPU kernel".to_owned(),
            found: "none".to_owned(),
        }),
    }
}
