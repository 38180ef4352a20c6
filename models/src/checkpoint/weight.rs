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
    /// Where the elements come from, in order; `None`: from the tensor of this name.
    origins: Option<Arc<[Origin]>>,
}

/// Elements of a tensor in a file.
#[derive(Debug, Clone)]
struct Origin {
    file: PathBuf,
    /// The name in the file.
    tensor: String,
    /// Index of the first of them in the weight, and in the file's tensor.
    start: usize,
    at: usize,
}

/// Where an element is in the checkpoint's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<'a> {
    /// The file; empty for an element that was computed.
    pub file: &'a Path,
    /// The tensor's name in the file.
    pub tensor: &'a str,
    /// Index of the element in row-major order.
    pub index: usize,
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
    fn new(name: String, shape: Vec<usize>, dtype: WeightType, data: Data, origins: Option<Arc<[Origin]>>) -> Weight {
        Weight(Arc::new(Inner { name, shape, dtype, data, origins }))
    }

    /// `range` of the file holds `shape` elements of `dtype`.
    pub(super) fn mapped(
        name: String,
        shape: Vec<usize>,
        dtype: WeightType,
        map: Arc<Map>,
        range: Range<usize>,
    ) -> Weight {
        Weight::new(name, shape, dtype, Data::Mapped { map, range }, None)
    }

    /// `bytes` hold `shape` elements of `dtype`, which `file` has in another order.
    pub(super) fn copied(name: String, shape: Vec<usize>, dtype: WeightType, file: &Path, bytes: Vec<u8>) -> Weight {
        Weight::new(name, shape, dtype, Data::Memory { file: file.to_owned(), bytes }, None)
    }

    /// The same tensor by another name.
    pub(super) fn renamed(&self, name: &str) -> Weight {
        let Inner { shape, dtype, data, .. } = &*self.0;
        Weight::new(name.to_owned(), shape.clone(), *dtype, data.clone(), Some(self.origins()))
    }

    /// A tensor that no file holds: a computed constant.
    ///
    /// # Panics
    /// If the number of values is not the product of the shape.
    pub fn from_f32(name: impl Into<String>, shape: impl Into<Vec<usize>>, values: Vec<f32>) -> Weight {
        let (name, shape) = (name.into(), shape.into());
        assert_eq!(shape.iter().product::<usize>(), values.len(), "values of {name:?} for shape {shape:?}");
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Weight::new(name, shape, WeightType::F32, Data::Memory { file: PathBuf::new(), bytes }, None)
    }

    /// Stands for a tensor that is not there: it reads as zeros and has no bytes, whatever its shape says.
    pub(crate) fn absent(name: &str, shape: &[usize]) -> Weight {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        Weight::new(name, shape, WeightType::F32, Data::Absent, None)
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
        let first = range.start * self.0.shape[1..].iter().product::<usize>();
        let mut origins = self.origins().to_vec();
        for origin in &mut origins {
            origin.at += first.saturating_sub(origin.start);
            origin.start = origin.start.saturating_sub(first);
        }
        Weight::new(name, shape, self.dtype(), data, Some(origins.into()))
    }

    /// Matrices of one width, one below the other, copied as f32 under a new name.
    pub(crate) fn stacked(name: String, parts: &[Weight]) -> Weight {
        let rows = parts.iter().map(|part| part.shape()[0]).sum();
        let shape = [rows, parts.first().map_or(0, |part| part.shape()[1])];
        // What is only planned, or missing, may be of any size.
        if parts.iter().any(Weight::is_absent) {
            return Weight::absent(&name, &shape);
        }
        let (mut origins, mut start) = (Vec::new(), 0);
        for part in parts {
            origins
                .extend(part.origins().iter().cloned().map(|origin| Origin { start: start + origin.start, ..origin }));
            start += part.elements();
        }
        let bytes = parts.iter().flat_map(Weight::to_f32).flat_map(f32::to_le_bytes).collect();
        let data = Data::Memory { file: PathBuf::new(), bytes };
        Weight::new(name, shape.to_vec(), WeightType::F32, data, Some(origins.into()))
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the shape holds another number of elements.
    pub fn reshaped(&self, shape: impl Into<Vec<usize>>) -> Weight {
        let (name, shape) = (self.0.name.clone(), shape.into());
        let elements: usize = shape.iter().product();
        assert_eq!(elements, self.elements(), "{name:?} with shape {:?} as {shape:?}", self.0.shape);
        Weight::new(name, shape, self.dtype(), self.0.data.clone(), Some(self.origins()))
    }

    /// Whether the tensor is only planned, or missing.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self.0.data, Data::Absent)
    }

    fn origins(&self) -> Arc<[Origin]> {
        let own = || Origin { file: self.file().to_owned(), tensor: self.name().to_owned(), start: 0, at: 0 };
        self.0.origins.clone().unwrap_or_else(|| Arc::new([own()]))
    }

    /// Where element `index` is in the checkpoint's files: also of a tensor that was renamed, cut or merged from others.
    pub fn place(&self, index: usize) -> Place<'_> {
        let origins = self.0.origins.as_deref().unwrap_or_default();
        match origins.iter().rev().find(|origin| origin.start <= index) {
            Some(origin) => {
                Place { file: &origin.file, tensor: &origin.tensor, index: origin.at + (index - origin.start) }
            }
            None => Place { file: self.file(), tensor: self.name(), index },
        }
    }

    /// The name in the model. It is another than in the file where a prefix was removed.
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
        Err(self.not_finite(index, value.first().copied().map_or(f64::NAN, f64::from)))
    }

    /// The error that element `index` is `value`.
    pub fn not_finite(&self, index: usize, value: f64) -> Error {
        let Place { file, tensor, index } = self.place(index);
        Error::NotFinite { file: file.to_owned(), tensor: tensor.to_owned(), index, value }
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
