//! Why an operator refuses its inputs.

use crate::tensor::DType;

/// What is wrong with an operator's attributes, inputs or host.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An attribute is absent or holds a value that the operator does not accept.
    #[error("{operator}: attribute {attribute}: expected {expected}, found {found}")]
    Attribute {
        /// Operator name.
        operator: &'static str,
        /// Attribute name.
        attribute: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was there.
        found: String,
    },
    /// Attributes of one operator were used for another.
    #[error("{expected}: expected its own attributes, found those of {found}")]
    Operator {
        /// The operator that was called.
        expected: &'static str,
        /// The operator that the attributes belong to.
        found: &'static str,
    },
    /// A required input is absent, or there are too many of them.
    #[error("{operator}: expected {expected}, found {found} inputs")]
    InputCount {
        /// Operator name.
        operator: &'static str,
        /// The accepted numbers of inputs.
        expected: String,
        /// The number found.
        found: usize,
    },
    /// An input's element type differs from what the operator accepts.
    #[error("{operator}: input {input}: expected element type {expected}, found {found}")]
    Type {
        /// Operator name.
        operator: &'static str,
        /// Input name.
        input: &'static str,
        /// Accepted type.
        expected: DType,
        /// Type found.
        found: DType,
    },
    /// An input's shape does not fit the attributes or the other inputs.
    #[error("{operator}: input {input}: expected shape {expected}, found {found}")]
    Shape {
        /// Operator name.
        operator: &'static str,
        /// Input name.
        input: &'static str,
        /// Accepted shape.
        expected: String,
        /// Shape found; `?` stands for a dimension that is not known yet.
        found: String,
    },
    /// A buffer's length is not the product of its shape.
    #[error("{operator}: {tensor} holds {found} elements, its shape needs {expected}")]
    Length {
        /// Operator name.
        operator: &'static str,
        /// Input or output name.
        tensor: &'static str,
        /// Product of the dimensions.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// This processor has no such kernel.
    #[error("{operator}: expected a kernel that this processor supports ({}), found {found}", .expected.join(", "))]
    Kernel {
        /// Operator name.
        operator: &'static str,
        /// The instruction sets of the operator's kernels that are supported.
        expected: Vec<&'static str>,
        /// The one asked for.
        found: String,
    },
    /// An environment variable names an instruction set that this processor does not have, or that there is not.
    #[error(
        "environment variable {variable}: expected one that this processor has ({}), found {found:?}",
        .expected.join(", ")
    )]
    InstructionSet {
        /// The variable.
        variable: &'static str,
        /// Instruction sets of kernels that this processor can run, best first.
        expected: Vec<&'static str>,
        /// The one asked for.
        found: String,
    },
    /// An environment variable has a value that there is not.
    #[error("environment variable {variable}: {reason}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// What was expected and found.
        reason: String,
    },
    /// A weight was packed for another use.
    #[error(
        "{operator}: input {input}: expected a weight packed for these attributes and this instruction set, found another"
    )]
    Packed {
        /// Operator name.
        operator: &'static str,
        /// Input name.
        input: &'static str,
    },
    /// The host could not provide working memory.
    #[error("no memory for {bytes} bytes of scratch")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// A tensor in device memory starts where the kernels' vector accesses cannot.
    #[error("{operator}: {tensor} starts {found} bytes beyond a multiple of {expected} bytes")]
    Alignment {
        /// Operator name.
        operator: &'static str,
        /// Input or output name.
        tensor: &'static str,
        /// Bytes that the address must be a multiple of.
        expected: usize,
        /// Its remainder.
        found: usize,
    },
    /// A function of the CUDA driver failed.
    #[error("CUDA: {what}: {error}")]
    Cuda {
        /// The driver's function, and what it was called for.
        what: String,
        /// The driver's name and number of the error.
        error: String,
    },
    /// There is no CUDA here.
    #[error("no CUDA: {reason}")]
    NoCuda {
        /// Why not.
        reason: String,
    },
}
