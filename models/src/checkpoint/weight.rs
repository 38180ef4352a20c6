//! One tensor of a checkpoint.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;

use super::map::Source;
use crate::error::Error;
use crate::weight_type::WeightType;

/// Elements that are read at a time where all of them are wanted.
const STEP: usize = 1 << 18;

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
    /// Of a constant that was computed from other tensors: how.
    derivation: Option<Derivation>,
}

/// A constant's formula in candle, through which gradients reach the tensors that it is computed from: their values in, the constant out.
pub type Formula = Arc<dyn Fn(&[Tensor]) -> Result<Tensor, Error> + Send + Sync>;

/// What a constant is computed from, and how.
#[derive(Clone)]
pub(crate) struct Derivation {
    pub(crate) inputs: Vec<Weight>,
    pub(crate) formula: Formula,
}

/// Elements of a tensor in a file.
#[derive(Debug, Clone)]
struct Origin {
    file: PathBuf,
    /// The name in the model.
    name: String,
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

/// Elements of a tensor of the model, by its name there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) tensor: String,
    /// Index of the first element in that tensor.
    pub(crate) at: usize,
    pub(crate) elements: usize,
}

#[derive(Clone)]
enum Data {
    /// In a file, from that byte on.
    Stored { source: Arc<Source>, offset: u64 },
    Memory {
        /// Where the elements come from; empty where they were computed.
        file: PathBuf,
        bytes: Vec<u8>,
    },
    /// The elements of others, one after the other, as f32.
    Joined(Vec<Weight>),
    /// Of a tensor that is only planned: zeros, of which none is stored.
    Absent,
}

impl Weight {
    fn new(name: String, shape: Vec<usize>, dtype: WeightType, data: Data, origins: Option<Arc<[Origin]>>) -> Weight {
        Weight(Arc::new(Inner { name, shape, dtype, data, origins, derivation: None }))
    }

    /// The file holds `shape` elements of `dtype` from byte `offset` on.
    pub(super) fn stored(
        name: String,
        shape: Vec<usize>,
        dtype: WeightType,
        source: Arc<Source>,
        offset: u64,
    ) -> Weight {
        Weight::new(name, shape, dtype, Data::Stored { source, offset }, None)
    }

    /// `bytes` hold `shape` elements of `dtype`, which `file` has in another order.
    pub(super) fn copied(name: String, shape: Vec<usize>, dtype: WeightType, file: &Path, bytes: Vec<u8>) -> Weight {
        Weight::new(name, shape, dtype, Data::Memory { file: file.to_owned(), bytes }, None)
    }

    /// The same tensor by another name.
    pub(super) fn renamed(&self, name: &str) -> Weight {
        let Inner { shape, dtype, data, .. } = &*self.0;
        let origin = |origin: &Origin| Origin { name: name.to_owned(), ..origin.clone() };
        let origins = self.origins().iter().map(origin).collect();
        Weight::new(name.to_owned(), shape.clone(), *dtype, data.clone(), Some(origins))
    }

    /// The same constant, which `formula` computes from `inputs`: [`crate::ops::Ops::computed`] reads it. In a training the formula gives it
    /// its shape; otherwise its elements are used.
    pub fn derived(self, inputs: Vec<Weight>, formula: Formula) -> Weight {
        let Inner { name, shape, dtype, data, origins, .. } = &*self.0;
        Weight(Arc::new(Inner {
            name: name.clone(),
            shape: shape.clone(),
            dtype: *dtype,
            data: data.clone(),
            origins: origins.clone(),
            derivation: Some(Derivation { inputs, formula }),
        }))
    }

    /// How the elements are computed from other tensors, if they are.
    pub(crate) fn derivation(&self) -> Option<&Derivation> {
        self.0.derivation.as_ref()
    }

    /// The tensors of the model that the elements are of, in order; one that no model has for a computed constant.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let origins = self.origins();
        let end = |i: usize| origins.get(i + 1).map_or(self.elements(), |next| next.start.min(self.elements()));
        let part = |(i, origin): (usize, &Origin)| Part {
            tensor: origin.name.clone(),
            at: origin.at,
            elements: end(i).saturating_sub(origin.start),
        };
        origins.iter().enumerate().map(part).filter(|part| part.elements > 0).collect()
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

    /// Rows `range` of the first axis as a tensor of their own, named `name[start:end]`. Reads nothing of a file.
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
            Data::Stored { source, offset } => {
                Data::Stored { source: source.clone(), offset: offset + bytes.start as u64 }
            }
            Data::Memory { file, bytes: all } => Data::Memory { file: file.clone(), bytes: all[bytes].to_vec() },
            Data::Joined(parts) => Data::Joined(rows_of(parts, range.clone())),
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

    /// Matrices of one width, one below the other, as f32 under a new name. They are read when this one is.
    pub(crate) fn stacked(name: String, parts: &[Weight]) -> Weight {
        let rows = parts.iter().map(|part| part.shape()[0]).sum();
        let shape = [rows, parts.first().map_or(0, |part| part.shape()[1])];
        let (mut origins, mut start) = (Vec::new(), 0usize);
        for part in parts {
            origins.extend(
                part.origins()
                    .iter()
                    .cloned()
                    .map(|origin| Origin { start: start.saturating_add(origin.start), ..origin }),
            );
            // What is only planned, or missing, may be of any size.
            start = start.saturating_add(part.elements());
        }
        let data = match parts.iter().any(Weight::is_absent) {
            true => Data::Absent,
            false => Data::Joined(parts.to_vec()),
        };
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
        let own = || Origin {
            file: self.file().to_owned(),
            name: self.name().to_owned(),
            tensor: self.name().to_owned(),
            start: 0,
            at: 0,
        };
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

    /// Puts elements `range` into `out`, in row-major order and little-endian; what was there is gone.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Changed`] where the file cannot be read any more.
    ///
    /// # Panics
    /// If the range goes beyond the elements.
    pub fn read(&self, range: Range<usize>, out: &mut Vec<u8>) -> Result<(), Error> {
        assert!(range.end <= self.elements(), "elements {range:?} of {:?}", self.0.name);
        let size = self.dtype().bytes();
        let (start, length) = (range.start * size, range.len() * size);
        match &self.0.data {
            Data::Stored { source, offset } => {
                out.resize(length, 0);
                source.read(offset + start as u64, out)
            }
            Data::Memory { bytes, .. } => {
                out.clear();
                out.extend_from_slice(&bytes[start..start + length]);
                Ok(())
            }
            Data::Joined(parts) => {
                out.clear();
                let mut first = 0;
                for part in parts {
                    let end = first + part.elements();
                    let wanted = range.start.max(first)..range.end.min(end);
                    if !wanted.is_empty() {
                        let mut values = Vec::new();
                        part.read_f32(wanted.start - first..wanted.end - first, &mut values)?;
                        out.extend(values.into_iter().flat_map(f32::to_le_bytes));
                    }
                    first = end;
                }
                Ok(())
            }
            Data::Absent => {
                out.clear();
                out.resize(length, 0);
                Ok(())
            }
        }
    }

    /// The file that the elements come from; empty for a tensor that was computed.
    pub fn file(&self) -> &Path {
        match &self.0.data {
            Data::Stored { source, .. } => source.path(),
            Data::Memory { file, .. } => file,
            Data::Joined(_) | Data::Absent => Path::new(""),
        }
    }

    /// Where in the file the bytes begin; 0 for a tensor that was computed, or whose order in the file is another.
    pub fn offset(&self) -> u64 {
        match &self.0.data {
            Data::Stored { offset, .. } => *offset,
            Data::Memory { .. } | Data::Joined(_) | Data::Absent => 0,
        }
    }

    /// Whether the elements lie in the file in this order, from [`Weight::offset`] on.
    pub fn is_stored(&self) -> bool {
        matches!(self.0.data, Data::Stored { .. })
    }

    /// Appends elements `range` to `out`, each as the nearest f32.
    ///
    /// # Errors
    /// As [`Weight::read`].
    ///
    /// # Panics
    /// If the range goes beyond the elements.
    pub fn read_f32(&self, range: Range<usize>, out: &mut Vec<f32>) -> Result<(), Error> {
        let mut bytes = Vec::new();
        for start in range.clone().step_by(STEP) {
            self.read(start..range.end.min(start + STEP), &mut bytes)?;
            self.dtype().append_f32(&bytes, out);
        }
        Ok(())
    }

    /// All elements, each as the nearest f32.
    ///
    /// # Errors
    /// As [`Weight::read`].
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        let mut values = Vec::with_capacity(self.elements());
        self.read_f32(0..self.elements(), &mut values)?;
        Ok(values)
    }

    /// Whether it has the shape and, each as the nearest f32, the elements of another.
    ///
    /// # Errors
    /// As [`Weight::read`].
    pub fn equals(&self, other: &Weight) -> Result<bool, Error> {
        if self.shape() != other.shape() {
            return Ok(false);
        }
        let [mut own, mut others] = [Vec::new(), Vec::new()];
        for start in (0..self.elements()).step_by(STEP) {
            let range = start..self.elements().min(start + STEP);
            own.clear();
            others.clear();
            self.read_f32(range.clone(), &mut own)?;
            other.read_f32(range, &mut others)?;
            if own != others {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that no element is infinite or NaN.
    ///
    /// # Errors
    /// [`Error::NotFinite`] for the first one that is; those of [`Weight::read`].
    pub fn check_finite(&self) -> Result<(), Error> {
        let elements = if self.is_absent() { 0 } else { self.elements() };
        let mut bytes = Vec::new();
        for start in (0..elements).step_by(STEP) {
            self.read(start..elements.min(start + STEP), &mut bytes)?;
            let found = match self.dtype() {
                WeightType::F32 => position(&bytes, |b| !f32::from_le_bytes(b).is_finite()),
                WeightType::F64 => position(&bytes, |b| !f64::from_le_bytes(b).is_finite()),
                WeightType::F16 => position(&bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
                WeightType::BF16 => position(&bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
                _ => None,
            };
            if let Some(index) = found.map(|index| start + index) {
                let mut value = Vec::new();
                self.read_f32(index..index + 1, &mut value)?;
                return Err(self.not_finite(index, value.first().copied().map_or(f64::NAN, f64::from)));
            }
        }
        Ok(())
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

/// Index of the first element that `wrong` says so of.
fn position<const N: usize>(bytes: &[u8], wrong: impl Fn([u8; N]) -> bool) -> Option<usize> {
    bytes.as_chunks::<N>().0.iter().position(|&element| wrong(element))
}

/// Rows `range` of matrices one below the other.
fn rows_of(parts: &[Weight], range: Range<usize>) -> Vec<Weight> {
    let mut first = 0;
    let cut = |part: &Weight| {
        let end = first + part.shape()[0];
        let rows = range.start.max(first)..range.end.min(end);
        let cut = (!rows.is_empty()).then(|| part.rows(rows.start - first..rows.end - first));
        first = end;
        cut
    };
    parts.iter().filter_map(cut).collect()
}
