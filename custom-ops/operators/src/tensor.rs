//! Borrowed tensors: contiguous and row-major, as the hosts provide them.

use half::{bf16, f16};

/// An element type of the operators' type parameter T.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
}

impl DType {
    /// Every type that T can be.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
        })
    }
}

/// A Rust element type. Kernels are generic over it and compute in f32.
pub trait Element: Copy + Send + Sync + 'static {
    /// The corresponding [`DType`].
    const DTYPE: DType;
    /// The value as f32, exactly.
    fn to_f32(self) -> f32;
    /// The nearest representable value.
    fn from_f32(x: f32) -> Self;
    /// The elements, if `data` has this type.
    fn slice(data: Data<'_>) -> Option<&[Self]>;
    /// The elements, if `data` has this type.
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [Self]>;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn slice(data: Data<'_>) -> Option<&[f32]> {
        if let Data::F32(x) = data { Some(x) } else { None }
    }
    #[inline(always)]
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [f32]> {
        if let DataMut::F32(x) = data { Some(x) } else { None }
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32_const(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32_const(x)
    }
    #[inline(always)]
    fn slice(data: Data<'_>) -> Option<&[f16]> {
        if let Data::F16(x) = data { Some(x) } else { None }
    }
    #[inline(always)]
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [f16]> {
        if let DataMut::F16(x) = data { Some(x) } else { None }
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    #[inline(always)]
    fn slice(data: Data<'_>) -> Option<&[bf16]> {
        if let Data::BF16(x) = data { Some(x) } else { None }
    }
    #[inline(always)]
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [bf16]> {
        if let DataMut::BF16(x) = data { Some(x) } else { None }
    }
}

/// Elements of an input tensor.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Data<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl Data<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::BF16(_) => DType::BF16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(x) => x.len(),
            Data::F16(x) => x.len(),
            Data::BF16(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` as f64, for the reference. Panics if out of bounds.
    pub fn at(&self, i: usize) -> f64 {
        f64::from(match self {
            Data::F32(x) => x[i],
            Data::F16(x) => x[i].to_f32(),
            Data::BF16(x) => x[i].to_f32(),
        })
    }
}

/// An input tensor.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// `shape.iter().product()` elements.
    pub data: Data<'a>,
}

/// Elements of the output. Kernels treat them as uninitialised and write every one.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum DataMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

impl DataMut<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            DataMut::F32(_) => DType::F32,
            DataMut::F16(_) => DType::F16,
            DataMut::BF16(_) => DType::BF16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            DataMut::F32(x) => x.len(),
            DataMut::F16(x) => x.len(),
            DataMut::BF16(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
