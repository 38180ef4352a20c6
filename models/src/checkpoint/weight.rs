//! One tensor of a checkpoint.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::map::Map;
use crate::error::Error;
use crate::weight_type::WeightType;

/// A tensor: name, shape, type, and bytes in row-major order, little-endian. Cloning it copies none of them.
#[derive(Clone)]
pub struct Weight(Arc<Inner>);

struct Inner {
    name: String,
    shape: Vec<usize>,
    dtype: WeightType,
    data: Data,
}

#[derive(Clone)]
enum Data {
    Mapped {
        map: Arc<Map>,
        range: Range<usize>,
    },
    Memory {
        /// Where the elements come from; empty where they were computed.
        file: PathBuf,
        bytes: Vec<u8>,
    },
    /// Of a tensor that is only planned: zeros, of which none is stored.
    Absent,
}

impl Weight {
    /// `range` of the file holds `shape` elements of `dtype`.
    pub(super) fn mapped(
        name: String,
        shape: Vec<usize>,
        dtype: WeightType,
        map: Arc<Map>,
        range: Range<usize>,
    ) -> Weight {
        Weight(Arc::new(Inner { name, shape, dtype, data: Data::Mapped { map, range } }))
    }

    /// `bytes` hold `shape` elements of `dtype`, which `file` has in another order.
    pub(super) fn copied(name: String, shape: Vec<usize>, dtype: WeightType, file: &Path, bytes: Vec<u8>) -> Weight {
        let data = Data::Memory { file: file.to_owned(), bytes };
        Weight(Arc::new(Inner { name, shape, dtype, data }))
    }

    /// The same tensor by another name.
    pub(super) fn renamed(&self, name: &str) -> Weight {
        let Inner { shape, dtype, data, .. } = &*self.0;
        Weight(Arc::new(Inner { name: name.to_owned(), shape: shape.clone(), dtype: *dtype, data: data.clone() }))
    }

    /// A tensor that no file holds: a computed constant.
    ///
    /// # Panics
    /// If the number of values is not the product of the shape.
    pub fn from_f32(name: impl Into<String>, shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Weight {
        let (name, shape) = (name.into(), shape.into());
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values of {name:?} for shape {shape:?}");
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Weight(Arc::new(Inner {
            name,
            shape,
            dtype: WeightType::F32,
            data: Data::Memory { file: PathBuf::new(), bytes },
        }))
    }

    /// Stands for a tensor that is not there: it reads as zeros and has no bytes, whatever its shape says.
    pub(super) fn absent(name: &str, shape: &[usize]) -> Weight {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        Weight(Arc::new(Inner { name, shape, dtype: WeightType::F32, data: Data::Absent }))
    }

    /// Rows `range` of the first axis as a tensor of their own, named `name[start:end]`. Copies nothing of a mapped file.
    ///
    /// # Panics
    /// If the range goes beyond the first axis.
    pub fn rows(&self, range: Range<usize>) -> Weight {
        let mut shape = self.0.shape.clone();
        let rows = shape.first_mut().filter(|rows| range.start <= range.end && range.end <= **rows);
        assert!(rows.is_some(), "rows {range:?} of {:?} with shape {:?}", self.0.name, self.0.shape);
        if let Some(rows) = rows {
            *rows = range.len();
        }
        let name = format!("{}[{}:{}]", self.0.name, range.start, range.end);
        let row = self.0.shape[1..].iter().product::<usize>() * self.dtype().bytes();
        let bytes = range.start * row..range.end * row;
        let data = match &self.0.data {
            Data::Mapped { map, range } => {
                Data::Mapped { map: map.clone(), range: range.start + bytes.start..range.start + bytes.end }
            }
            Data::Memory { file, bytes: all } => Data::Memory { file: file.clone(), bytes: all[bytes].to_vec() },
            Data::Absent => Data::Absent,
        };
        Weight(Arc::new(Inner { name, shape, dtype: self.dtype(), data }))
    }

    /// Matrices of one width, one below the other, copied as f32 under a new name.
    pub(crate) fn stacked(name: String, parts: &[Weight]) -> Weight {
        let rows = parts.iter().map(|part| part.shape()[0]).sum();
        let shape = [rows, parts.first().map_or(0, |part| part.shape()[1])];
        // What is only planned, or missing, may be of any size.
        if parts.iter().any(|part| matches!(part.0.data, Data::Absent)) {
            return Weight::absent(&name, &shape);
        }
        Weight::from_f32(name, shape, parts.iter().flat_map(Weight::to_f32).collect())
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the shape holds another number of elements.
    pub fn reshaped(&self, shape: impl Into<Vec<usize>>) -> Weight {
        let (name, shape) = (self.0.name.clone(), shape.into());
        let elements: usize = shape.iter().product();
        assert_eq!(elements, self.elements(), "{name:?} with shape {:?} as {shape:?}", self.0.shape);
        Weight(Arc::new(Inner { name, shape, dtype: self.dtype(), data: self.0.data.clone() }))
    }

    /// The name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The shape; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// The element type.
    pub fn dtype(&self) -> WeightType {
        self.0.dtype
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        // The shape of an absent tensor comes from the configuration alone, and may be anything.
        self.0.shape.iter().fold(1, |n, &dim| n.saturating_mul(dim))
    }

    /// The elements in row-major order, little-endian, at any alignment.
    pub fn bytes(&self) -> &[u8] {
        match &self.0.data {
            Data::Mapped { map, range } => &map.bytes()[range.clone()],
            Data::Memory { bytes, .. } => bytes,
            Data::Absent => &[],
        }
    }

    /// The file that the elements come from; empty for a tensor that was computed.
    pub fn file(&self) -> &Path {
        match &self.0.data {
            Data::Mapped { map, .. } => map.path(),
            Data::Memory { file, .. } => file,
            Data::Absent => Path::new(""),
        }
    }

    /// Where in the file the bytes begin; 0 for a tensor that was computed, or whose order in the file is another.
    pub fn offset(&self) -> u64 {
        match &self.0.data {
            Data::Mapped { range, .. } => range.start as u64,
            Data::Memory { .. } | Data::Absent => 0,
        }
    }

    /// Appends elements `range` to `out`, each as the nearest f32.
    ///
    /// # Panics
    /// If the range goes beyond the elements.
    pub fn read_f32(&self, range: Range<usize>, out: &mut Vec<f32>) {
        let size = self.dtype().bytes();
        if matches!(self.0.data, Data::Absent) {
            out.resize(out.len() + range.len(), 0.0);
            return;
        }
        let bytes = &self.bytes()[range.start * size..range.end * size];
        match self.dtype() {
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

    /// All elements, each as the nearest f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.elements());
        self.read_f32(0..self.elements(), &mut values);
        values
    }

    /// Checks that no element is infinite or NaN.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for the first one that is.
    pub fn check_finite(&self) -> Result<(), Error> {
        let bytes = self.bytes();
        let index = match self.dtype() {
            WeightType::F32 => find(bytes, |b| !f32::from_le_bytes(b).is_finite()),
            WeightType::F64 => find(bytes, |b| !f64::from_le_bytes(b).is_finite()),
            WeightType::F16 => find(bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
            WeightType::BF16 => find(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            _ => None,
        };
        let Some(index) = index else { return Ok(()) };
        let mut value = Vec::new();
        self.read_f32(index..index + 1, &mut value);
        Err(Error::NotFinite {
            file: self.file().to_owned(),
            tensor: self.name().to_owned(),
            index,
            value: value.first().copied().map_or(f64::NAN, f64::from),
        })
    }
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name(), self.dtype(), self.shape())
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

/// Index of the first element that `wrong` says so of. Whole blocks first: without an exit inside, they are vectorised.
fn find<const N: usize>(bytes: &[u8], wrong: impl Fn([u8; N]) -> bool) -> Option<usize> {
    const BLOCK: usize = 1024;
    let elements = bytes.as_chunks::<N>().0;
    let block = elements.chunks(BLOCK).position(|block| block.iter().fold(false, |any, &b| any | wrong(b)))?;
    let start = block * BLOCK;
    elements[start..].iter().position(|&b| wrong(b)).map(|i| start + i)
}
