//! Borrowed tensors: contiguous and row-major, as the hosts provide them.

use half::{bf16, f16};

/// An element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// Unsigned 8-bit integer: quantised weights.
    U8,
    /// Signed 64-bit integer: positions and lengths.
    I64,
}

impl DType {
    /// Every type that the operators' type parameter T can be.
    pub const ALL: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    /// Whether the type parameter T can be this type.
    pub fn is_float(self) -> bool {
        DType::ALL.contains(&self)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::U8 => "uint8",
            DType::I64 => "int64",
        })
    }
}

/// A Rust type of tensor elements.
pub trait Scalar: Copy + Send + Sync + 'static {
    /// The corresponding [`DType`].
    const DTYPE: DType;
    /// The elements, if `data` has this type.
    fn slice(data: Data<'_>) -> Option<&[Self]>;
    /// The elements, if `data` has this type.
    fn slice_mut(data: DataMut<'_>) -> Option<&mut [Self]>;
}

/// The types of [`DType::ALL`], for code that tells them apart at compile time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Float {
    F32,
    F16,
    BF16,
}

/// A Rust type that the operators' type parameter T can be. Kernels are generic over it and compute in f32.
pub trait Element: Scalar {
    /// Which one it is.
    const FLOAT: Float;
    /// The value as f32, exactly.
    fn to_f32(self) -> f32;
    /// The nearest representable value.
    fn from_f32(x: f32) -> Self;
}

macro_rules! scalars {
    ($($scalar:ty: $variant:ident),+ $(,)?) => {$(
        impl Scalar for $scalar {
            const DTYPE: DType = DType::$variant;
            #[inline(always)]
            fn slice(data: Data<'_>) -> Option<&[$scalar]> {
                if let Data::$variant(x) = data { Some(x) } else { None }
            }
            #[inline(always)]
            fn slice_mut(data: DataMut<'_>) -> Option<&mut [$scalar]> {
                if let DataMut::$variant(x) = data { Some(x) } else { None }
            }
        }
    )+};
}

scalars!(f32: F32, f16: F16, bf16: BF16, u8: U8, i64: I64);

impl Element for f32 {
    const FLOAT: Float = Float::F32;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Element for f16 {
    const FLOAT: Float = Float::F16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32_const(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f16 {
        f16::from_f32_const(x)
    }
}

impl Element for bf16 {
    const FLOAT: Float = Float::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

/// Elements of an input tensor.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub enum Data<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    U8(&'a [u8]),
    I64(&'a [i64]),
}

impl Data<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::BF16(_) => DType::BF16,
            Data::U8(_) => DType::U8,
            Data::I64(_) => DType::I64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F32(x) => x.len(),
            Data::F16(x) => x.len(),
            Data::BF16(x) => x.len(),
            Data::U8(x) => x.len(),
            Data::I64(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `i` as f64, for the reference. Panics if out of bounds.
    pub fn at(&self, i: usize) -> f64 {
        match self {
            Data::F32(x) => x[i].into(),
            Data::F16(x) => x[i].into(),
            Data::BF16(x) => x[i].into(),
            Data::U8(x) => x[i].into(),
            Data::I64(x) => x[i] as f64,
        }
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
    U8(&'a mut [u8]),
    I64(&'a mut [i64]),
}

impl DataMut<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            DataMut::F32(_) => DType::F32,
            DataMut::F16(_) => DType::F16,
            DataMut::BF16(_) => DType::BF16,
            DataMut::U8(_) => DType::U8,
            DataMut::I64(_) => DType::I64,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            DataMut::F32(x) => x.len(),
            DataMut::F16(x) => x.len(),
            DataMut::BF16(x) => x.len(),
            DataMut::U8(x) => x.len(),
            DataMut::I64(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
