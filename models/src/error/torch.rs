//! What can be wrong with a file of torch.save.

/// What is wrong with a pickle. Positions are bytes of the pickle.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickleFault {
    /// It ends before its STOP opcode.
    #[error("it ends at byte {at} in the middle of an instruction (truncated?)")]
    Truncated {
        /// Where.
        at: usize,
    },
    /// An instruction of protocols 0 and 1, of out-of-band buffers or of none.
    #[error("byte {at}: instruction {opcode:#04x} is not one that torch.save or pickle (protocols 2 to 5) writes")]
    Opcode {
        /// Where.
        at: usize,
        /// The instruction.
        opcode: u8,
    },
    /// A protocol of the future.
    #[error("pickle protocol {found}, newer than the 5 known here")]
    Protocol {
        /// The protocol.
        found: u8,
    },
    /// An instruction on a stack that does not hold what it takes.
    #[error("byte {at}: instruction {opcode:#04x} finds no {expected}")]
    Operand {
        /// Where.
        at: usize,
        /// The instruction.
        opcode: u8,
        /// What it takes.
        expected: &'static str,
    },
    /// A text that is not UTF-8.
    #[error("byte {at}: a text is not UTF-8")]
    Text {
        /// Where.
        at: usize,
    },
    /// A value that is fetched but was never stored.
    #[error("byte {at}: memo {index} is fetched before it is stored")]
    Memo {
        /// Where.
        at: usize,
        /// Its number.
        index: usize,
    },
    /// More than a state dict can need.
    #[error("{what} {found}, more than the limit of {limit}")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// How much there is.
        found: usize,
        /// How much there may be.
        limit: usize,
    },
}

/// What is wrong with a tensor or array.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// A shape or strides that no tensor has.
    #[error("shape, strides and offset are not what torch.save writes")]
    Layout,
    /// More elements than can be counted.
    #[error("an impossible shape: {shape:?} with strides {strides:?}")]
    Overflow {
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides, in elements.
        strides: Vec<usize>,
    },
    /// A storage of another length than the pickle says.
    #[error("storage {key:?} should hold {elements} elements of {bytes} bytes, but has {found} bytes")]
    StorageLength {
        /// Name of the storage.
        key: String,
        /// Elements by the pickle.
        elements: i64,
        /// Bytes of an element.
        bytes: usize,
        /// Bytes in the file.
        found: usize,
    },
    /// A view that goes beyond its storage.
    #[error("its last element would be number {last} of storage {key:?}, which holds {elements}")]
    Beyond {
        /// Name of the storage.
        key: String,
        /// Index of the view's last element.
        last: usize,
        /// Elements of the storage.
        elements: usize,
    },
    /// An array of another length than its shape says.
    #[error("a numpy array of shape {shape:?} takes {expected:?} bytes, but has {found}")]
    ArrayLength {
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes by its shape; `None`: more than can be counted.
        expected: Option<usize>,
        /// Bytes in the file.
        found: usize,
    },
    /// A view that has to be copied, and is larger than its file.
    #[error(
        "a copy in row-major order would take {bytes} bytes, but for all tensors only {left} are left of the file's length"
    )]
    Copy {
        /// Length of the copy.
        bytes: usize,
        /// What copies may still take.
        left: usize,
    },
}

/// What is wrong with a zip file. Names are quoted, positions are bytes of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArchiveFault {
    /// The file does not end with a zip directory.
    #[error("the zip directory at the file's end is missing (truncated?)")]
    NoDirectory,
    /// A record that lies outside the file.
    #[error("{what} at byte {at} goes beyond the file's {length} bytes (truncated?)")]
    Truncated {
        /// The record.
        what: &'static str,
        /// Where it begins.
        at: u64,
        /// Length of the file.
        length: usize,
    },
    /// A record that is not where another one says.
    #[error("{what} should begin at byte {at}, but something else does")]
    Signature {
        /// The record.
        what: &'static str,
        /// Where it should begin.
        at: u64,
    },
    /// One part of an archive in several files.
    #[error("it is one part of several")]
    Parts,
    /// An entry whose name is not UTF-8.
    #[error("the name of the entry at byte {at} of the directory is not UTF-8")]
    Name {
        /// Where the entry begins.
        at: u64,
    },
    /// Two entries of one name.
    #[error("entry {name:?} occurs twice")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// No entry of that name.
    #[error("there is no entry {name:?}")]
    Missing {
        /// The name.
        name: String,
    },
    /// An entry that needs a password.
    #[error("entry {name:?} is encrypted")]
    Encrypted {
        /// The name.
        name: String,
    },
    /// An entry that is not stored as it is.
    #[error("entry {name:?} is compressed (method {method}); torch.save stores entries as they are")]
    Compressed {
        /// The name.
        name: String,
        /// The compression method.
        method: u16,
    },
    /// An entry stored as it is whose two lengths differ.
    #[error("entry {name:?} is {stored} bytes long, and {size} bytes uncompressed, although it is not compressed")]
    Lengths {
        /// The name.
        name: String,
        /// Length in the file.
        stored: u64,
        /// Length by the directory.
        size: u64,
    },
}
