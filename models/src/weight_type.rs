//! Element types of tensors in checkpoints.

use std::fmt;

use half::f16;
use half::slice::HalfFloatSliceExt;

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

    /// Appends the elements, which are `bytes`, to `out`, each as the nearest f32.
    pub fn append_f32(self, bytes: &[u8], out: &mut Vec<f32>) {
        match self {
            WeightType::F32 => append(bytes, out, f32::from_le_bytes),
            WeightType::F16 => append_f16(bytes, out),
            WeightType::BF16 => append(bytes, out, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)),
            WeightType::F64 => append(bytes, out, |b| f64::from_le_bytes(b) as f32),
            WeightType::Bool => append(bytes, out, |[b]| f32::from(b != 0)),
            WeightType::U8 => append(bytes, out, |[b]| f32::from(b)),
            WeightType::I8 => append(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
            WeightType::U16 => append(bytes, out, |b| f32::from(u16::from_le_bytes(b))),
            WeightType::I16 => append(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
            WeightType::U32 => append(bytes, out, |b| u32::from_le_bytes(b) as f32),
            WeightType::I32 => append(bytes, out, |b| i32::from_le_bytes(b) as f32),
            WeightType::U64 => append(bytes, out, |b| u64::from_le_bytes(b) as f32),
            WeightType::I64 => append(bytes, out, |b| i64::from_le_bytes(b) as f32),
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

fn append<const N: usize>(bytes: &[u8], out: &mut Vec<f32>, convert: impl Fn([u8; N]) -> f32) {
    out.extend(bytes.as_chunks::<N>().0.iter().map(|&element| convert(element)));
}

/// In blocks, because the conversion of a slice uses the processor's instruction, and that of one element does not.
fn append_f16(bytes: &[u8], out: &mut Vec<f32>) {
    const BLOCK: usize = 512;
    let mut block = [f16::ZERO; BLOCK];
    for elements in bytes.as_chunks::<2>().0.chunks(BLOCK) {
        let block = &mut block[..elements.len()];
        for (value, &element) in block.iter_mut().zip(elements) {
            *value = f16::from_le_bytes(element);
        }
        let start = out.len();
        out.resize(start + elements.len(), 0.0);
        block.convert_to_f32_slice(&mut out[start..]);
    }
}
