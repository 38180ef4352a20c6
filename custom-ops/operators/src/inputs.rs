//! Operator inputs. Each operator declares a struct of them that is generic over what a field holds: a slice for a CPU
//! kernel, a device pointer for a GPU kernel, a shape for validation, a tensor for the reference. A [`Reader`] fills
//! it.

use crate::tensor::DType;
use std::convert::Infallible;

/// The element type of an input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// The operator's type parameter: one of [`DType::ALL`], the same for all of the node's T operands.
    T,
    /// Always float32.
    Float32,
    /// Always uint8.
    Uint8,
    /// Always int64.
    Int64,
}

impl ElementType {
    /// The element type if the type parameter T is `t`.
    pub fn dtype(self, t: DType) -> DType {
        self.fixed().unwrap_or(t)
    }

    /// The element type, unless it is the type parameter T.
    pub fn fixed(self) -> Option<DType> {
        match self {
            ElementType::T => None,
            ElementType::Float32 => Some(DType::F32),
            ElementType::Uint8 => Some(DType::U8),
            ElementType::Int64 => Some(DType::I64),
        }
    }
}

/// An input or output.
#[derive(Debug)]
pub struct Operand {
    /// Formal name.
    pub name: &'static str,
    /// Element type.
    pub ty: ElementType,
    /// Whether a node may omit it. Optional inputs come last, so that no node needs an empty input name.
    pub optional: bool,
    /// Shape, for the documentation.
    pub shape: &'static str,
    /// Description, for the documentation.
    pub doc: &'static str,
}

/// Provides a call's inputs by index. The associated types are what an input is represented by: a slice, a device
/// pointer, a shape.
pub trait Reader {
    /// An input of the operator's type parameter T.
    type T: Copy;
    /// A weight of type T, which a backend may hold packed.
    type Weight: Copy;
    /// An input that is float32 for every T.
    type F32: Copy;
    /// An input that is uint8 for every T.
    type U8: Copy;
    /// An input that is int64 for every T.
    type I64: Copy;
    /// Why an input cannot be read.
    type Error;

    /// Whether the input is present.
    fn present(&self, input: usize) -> bool;
    /// An input of type T.
    ///
    /// # Errors
    /// If the input is absent or has another type.
    fn t(&self, input: usize) -> Result<Self::T, Self::Error>;
    /// A weight.
    ///
    /// # Errors
    /// If the input is absent or has another type.
    fn weight(&self, input: usize) -> Result<Self::Weight, Self::Error>;
    /// A float32 input.
    ///
    /// # Errors
    /// If the input is absent or has another type.
    fn f32(&self, input: usize) -> Result<Self::F32, Self::Error>;
    /// A uint8 input.
    ///
    /// # Errors
    /// If the input is absent or has another type.
    fn u8(&self, input: usize) -> Result<Self::U8, Self::Error>;
    /// An int64 input.
    ///
    /// # Errors
    /// If the input is absent or has another type.
    fn i64(&self, input: usize) -> Result<Self::I64, Self::Error>;
}

/// A [`Reader`] that represents every input by the same type `V`: a shape, a device pointer, a tensor.
#[derive(Debug, Clone, Copy)]
pub struct List<'a, V> {
    /// The inputs in schema order. Absent ones at the end may be omitted.
    pub inputs: &'a [Option<V>],
    /// Returned for a required input that is absent; validation rejects such a call.
    pub absent: V,
}

impl<'a, V: Copy> List<'a, V> {
    fn get(&self, input: usize) -> Result<V, Infallible> {
        Ok(self.inputs.get(input).copied().flatten().unwrap_or(self.absent))
    }
}

impl<V: Copy> Reader for List<'_, V> {
    type T = V;
    type Weight = V;
    type F32 = V;
    type U8 = V;
    type I64 = V;
    type Error = Infallible;

    fn present(&self, input: usize) -> bool {
        self.inputs.get(input).is_some_and(Option::is_some)
    }

    fn t(&self, input: usize) -> Result<V, Infallible> {
        self.get(input)
    }

    fn weight(&self, input: usize) -> Result<V, Infallible> {
        self.get(input)
    }

    fn f32(&self, input: usize) -> Result<V, Infallible> {
        self.get(input)
    }

    fn u8(&self, input: usize) -> Result<V, Infallible> {
        self.get(input)
    }

    fn i64(&self, input: usize) -> Result<V, Infallible> {
        self.get(input)
    }
}

/// Declares an operator's inputs as a struct: one field per input, in order, with its shape and description.
///
/// A field is `T`, `Weight` (of type T as well), `F32`, `U8` or `I64`; `[optional]` ones come last.
macro_rules! inputs {
    ($(#[$meta:meta])* pub struct $name:ident {
        $($field:ident: $kind:ident $([$optional:ident])?, $shape:literal, $doc:literal;)+
    }) => {
        $(#[$meta])*
        pub struct $name<R: $crate::inputs::Reader> {
            $(#[doc = $doc] #[doc = ""] #[doc = concat!("Shape: ", $shape, ".")]
            pub $field: $crate::inputs::field_type!(R $kind $($optional)?),)+
        }

        // Not derived: `derive` would require `R: Clone`.
        impl<R: $crate::inputs::Reader> Clone for $name<R> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<R: $crate::inputs::Reader> Copy for $name<R> {}

        impl<R: $crate::inputs::Reader> $name<R> {
            pub(crate) const OPERANDS: &'static [$crate::inputs::Operand] = &[$($crate::inputs::Operand {
                name: stringify!($field),
                ty: $crate::inputs::element_type!($kind),
                optional: $crate::inputs::is_optional!($($optional)?),
                shape: $shape,
                doc: $doc,
            }),+];

            pub(crate) fn read(reader: &R) -> Result<Self, R::Error> {
                let mut position = 0..;
                $(let $field = {
                    let input = position.next().unwrap_or(usize::MAX);
                    $crate::inputs::read_field!(reader, input, $kind $($optional)?)
                };)+
                Ok($name { $($field),+ })
            }
        }

        impl<V: Copy> $name<$crate::inputs::List<'_, V>> {
            pub(crate) fn list(&self) -> Vec<Option<V>> {
                vec![$($crate::inputs::list_field!(self.$field $($optional)?)),+]
            }
        }
    };
}
pub(crate) use inputs;

macro_rules! field_type {
    ($r:ident T) => { $r::T };
    ($r:ident Weight) => { $r::Weight };
    ($r:ident F32) => { $r::F32 };
    ($r:ident U8) => { $r::U8 };
    ($r:ident I64) => { $r::I64 };
    ($r:ident $kind:ident optional) => { Option<$crate::inputs::field_type!($r $kind)> };
}
pub(crate) use field_type;

macro_rules! element_type {
    (F32) => {
        $crate::inputs::ElementType::Float32
    };
    (U8) => {
        $crate::inputs::ElementType::Uint8
    };
    (I64) => {
        $crate::inputs::ElementType::Int64
    };
    ($kind:ident) => {
        $crate::inputs::ElementType::T
    };
}
pub(crate) use element_type;

macro_rules! is_optional {
    () => {
        false
    };
    (optional) => {
        true
    };
}
pub(crate) use is_optional;

macro_rules! read_field {
    ($reader:ident, $input:ident, T) => {
        $reader.t($input)?
    };
    ($reader:ident, $input:ident, Weight) => {
        $reader.weight($input)?
    };
    ($reader:ident, $input:ident, F32) => {
        $reader.f32($input)?
    };
    ($reader:ident, $input:ident, U8) => {
        $reader.u8($input)?
    };
    ($reader:ident, $input:ident, I64) => {
        $reader.i64($input)?
    };
    ($reader:ident, $input:ident, $kind:ident optional) => {
        match $reader.present($input) {
            true => Some($crate::inputs::read_field!($reader, $input, $kind)),
            false => None,
        }
    };
}
pub(crate) use read_field;

macro_rules! list_field {
    ($inputs:ident.$field:ident) => {
        Some($inputs.$field)
    };
    ($inputs:ident.$field:ident optional) => {
        $inputs.$field
    };
}
pub(crate) use list_field;
