//! The types of tensors' elements, and elements in row-major order.

use half::{bf16, f16};
use std::ops::Range;

/// A Rust type that tensors hold.
pub trait Element: Copy + Send + Sync + 'static {
    /// The type's tag.
    const TYPE: ElementType;
    /// Wraps elements of this type.
    fn wrap(data: Vec<Self>) -> TensorData;
    /// The elements, if they are of this type.
    fn slice<'a>(data: &Data<'a>) -> Option<&'a [Self]>;
    /// The elements to be changed, if they are of this type.
    fn slice_mut(data: &mut TensorData) -> Option<&mut [Self]>;
}

macro_rules! element_types {
    ($(($variant:ident, $rust:ty, $name:literal)),+ $(,)?) => {
        /// An element type of a tensor.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum ElementType { $($variant),+ }

        impl ElementType {
            /// Every type.
            pub const ALL: &'static [ElementType] = &[$(ElementType::$variant),+];

            /// ONNX's name of the type.
            pub fn name(self) -> &'static str {
                match self { $(ElementType::$variant => $name),+ }
            }

            /// Bytes of one element.
            pub fn size(self) -> usize {
                match self { $(ElementType::$variant => size_of::<$rust>()),+ }
            }
        }

        /// A tensor's elements in row-major order.
        #[derive(Debug, Clone, PartialEq)]
        #[allow(missing_docs)]
        pub enum TensorData { $($variant(Vec<$rust>)),+ }

        impl TensorData {
            /// `len` zeros.
            pub fn zeros(ty: ElementType, len: usize) -> TensorData {
                match ty { $(ElementType::$variant => TensorData::$variant(vec![<$rust>::default(); len])),+ }
            }

            /// The elements, borrowed.
            pub fn as_data(&self) -> Data<'_> {
                match self { $(TensorData::$variant(x) => Data::$variant(x)),+ }
            }
        }

        /// Borrowed elements in row-major order.
        #[derive(Debug, Clone, Copy, PartialEq)]
        #[allow(missing_docs)]
        pub enum Data<'a> { $($variant(&'a [$rust])),+ }

        impl Data<'_> {
            /// The element type.
            pub fn element_type(&self) -> ElementType {
                match self { $(Data::$variant(_) => ElementType::$variant),+ }
            }

            /// Number of elements.
            pub fn len(&self) -> usize {
                match self { $(Data::$variant(x) => x.len()),+ }
            }

            /// Whether there are no elements.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Some of the elements; `None` where there are not that many.
            pub fn range(&self, range: Range<usize>) -> Option<Data<'_>> {
                match self { $(Data::$variant(x) => x.get(range).map(Data::$variant)),+ }
            }

            /// A copy of the elements.
            pub fn to_owned(&self) -> TensorData {
                match self { $(Data::$variant(x) => TensorData::$variant(x.to_vec())),+ }
            }
        }

        $(impl Element for $rust {
            const TYPE: ElementType = ElementType::$variant;

            fn wrap(data: Vec<$rust>) -> TensorData {
                TensorData::$variant(data)
            }

            fn slice<'a>(data: &Data<'a>) -> Option<&'a [$rust]> {
                match data {
                    Data::$variant(x) => Some(x),
                    _ => None,
                }
            }

            fn slice_mut(data: &mut TensorData) -> Option<&mut [$rust]> {
                match data {
                    TensorData::$variant(x) => Some(x),
                    _ => None,
                }
            }
        })+
    };
}

element_types! {
    (F32, f32, "float32"),
    (F16, f16, "float16"),
    (BF16, bf16, "bfloat16"),
    (F64, f64, "float64"),
    (I64, i64, "int64"),
    (I32, i32, "int32"),
    (U8, u8, "uint8"),
    (Bool, bool, "bool"),
}

impl std::fmt::Display for ElementType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Data<'_> {
    /// Floating-point elements as f32 (f64 rounded); `None` for integers and booleans.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        match self {
            Data::F32(x) => Some(x.to_vec()),
            Data::F16(x) => Some(x.iter().map(|x| x.to_f32()).collect()),
            Data::BF16(x) => Some(x.iter().map(|x| x.to_f32()).collect()),
            Data::F64(x) => Some(x.iter().map(|&x| x as f32).collect()),
            Data::I64(_) | Data::I32(_) | Data::U8(_) | Data::Bool(_) => None,
        }
    }
}
