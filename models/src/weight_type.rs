//! Element types of tensors in checkpoints.

use std::fmt;

/// Element type of a tensor in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum WeightType {
    Bool,
    U8,
    I8,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
}

impl WeightType {
    const ALL: [WeightType; 13] = {
        use WeightType::*;
        [Bool, U8, I8, U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64]
    };

    /// The name that safetensors files use.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::Bool => "BOOL",
            WeightType::U8 => "U8",
            WeightType::I8 => "I8",
            WeightType::U16 => "U16",
            WeightType::I16 => "I16",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::U32 => "U32",
            WeightType::I32 => "I32",
            WeightType::F32 => "F32",
            WeightType::U64 => "U64",
            WeightType::I64 => "I64",
            WeightType::F64 => "F64",
        }
    }

    pub(crate) fn parse(name: &str) -> Option<WeightType> {
        WeightType::ALL.into_iter().find(|ty| ty.name() == name)
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            WeightType::Bool | WeightType::U8 | WeightType::I8 => 1,
            WeightType::U16 | WeightType::I16 | WeightType::F16 | WeightType::BF16 => 2,
            WeightType::U32 | WeightType::I32 | WeightType::F32 => 4,
            WeightType::U64 | WeightType::I64 | WeightType::F64 => 8,
        }
    }

    /// Whether a model's floating-point weights may have this type.
    pub fn is_model_float(self) -> bool {
        matches!(self, WeightType::F64 | WeightType::F32 | WeightType::F16 | WeightType::BF16)
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
