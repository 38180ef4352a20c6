//! Operator attributes. Each operator declares a struct; parsing, validation and documentation are derived from it.

use crate::error::Error;
use std::any::Any;

/// The type of an attribute in ONNX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeKind {
    /// A 64-bit integer.
    Int,
    /// A 32-bit float.
    Float,
    /// A list of 64-bit integers.
    Ints,
}

/// The definition of an operator's attribute. Every node must carry every attribute.
#[derive(Debug)]
pub struct AttributeDef {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: AttributeKind,
    /// Description, for the documentation.
    pub doc: &'static str,
}

/// An attribute's value, by its ONNX type.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of kind [`AttributeKind::Int`].
    Int(i64),
    /// Of kind [`AttributeKind::Float`].
    Float(f32),
    /// Of kind [`AttributeKind::Ints`].
    Ints(Vec<i64>),
}

impl Value {
    /// The ONNX type of this value.
    pub fn kind(&self) -> AttributeKind {
        match self {
            Value::Int(_) => AttributeKind::Int,
            Value::Float(_) => AttributeKind::Float,
            Value::Ints(_) => AttributeKind::Ints,
        }
    }
}

/// A Rust type that an attribute can have.
pub trait AttributeType: Sized {
    /// The ONNX type that stores it.
    const KIND: AttributeKind;

    /// Converts from an ONNX value.
    ///
    /// # Errors
    /// `[expected, found]`, for the error message, if the value has another type or is out of range.
    fn read(value: &Value) -> Result<Self, [String; 2]>;

    /// Converts to an ONNX value.
    fn value(&self) -> Value;
}

impl AttributeType for i64 {
    const KIND: AttributeKind = AttributeKind::Int;

    fn read(value: &Value) -> Result<i64, [String; 2]> {
        match value {
            Value::Int(n) => Ok(*n),
            other => Err(["an integer".to_owned(), format!("{other:?}")]),
        }
    }

    fn value(&self) -> Value {
        Value::Int(*self)
    }
}

/// A count, such as a number of heads or rows: 1 to 1048576.
impl AttributeType for usize {
    const KIND: AttributeKind = AttributeKind::Int;

    fn read(value: &Value) -> Result<usize, [String; 2]> {
        let n = i64::read(value)?;
        let count = usize::try_from(n).ok().filter(|n| (1..=1 << 20).contains(n));
        count.ok_or_else(|| ["a number from 1 to 1048576".to_owned(), n.to_string()])
    }

    fn value(&self) -> Value {
        Value::Int(i64::try_from(*self).unwrap_or(i64::MAX))
    }
}

/// 0 or 1.
impl AttributeType for bool {
    const KIND: AttributeKind = AttributeKind::Int;

    fn read(value: &Value) -> Result<bool, [String; 2]> {
        choice(value, 2).map(|index| index == 1)
    }

    fn value(&self) -> Value {
        Value::Int(i64::from(*self))
    }
}

/// A finite number.
impl AttributeType for f32 {
    const KIND: AttributeKind = AttributeKind::Float;

    fn read(value: &Value) -> Result<f32, [String; 2]> {
        match value {
            Value::Float(x) if x.is_finite() => Ok(*x),
            Value::Float(x) => Err(["a finite number".to_owned(), x.to_string()]),
            other => Err(["a finite number".to_owned(), format!("{other:?}")]),
        }
    }

    fn value(&self) -> Value {
        Value::Float(*self)
    }
}

impl AttributeType for Vec<i64> {
    const KIND: AttributeKind = AttributeKind::Ints;

    fn read(value: &Value) -> Result<Vec<i64>, [String; 2]> {
        match value {
            Value::Ints(list) => Ok(list.clone()),
            other => Err(["a list of integers".to_owned(), format!("{other:?}")]),
        }
    }

    fn value(&self) -> Value {
        Value::Ints(self.clone())
    }
}

/// Reads an integer from 0 to `n - 1`.
pub(crate) fn choice(value: &Value, n: usize) -> Result<usize, [String; 2]> {
    let found = i64::read(value)?;
    let expected = || if n == 2 { "0 or 1".to_owned() } else { format!("0 to {}", n - 1) };
    usize::try_from(found).ok().filter(|&i| i < n).ok_or_else(|| [expected(), found.to_string()])
}

/// Looks up a node's attribute; `None` if the node lacks it.
pub type Source<'s> = dyn FnMut(&'static AttributeDef) -> Option<Value> + 's;

/// An operator's attributes as a struct, declared by `attributes!`.
pub trait AttributeSet: Any + Send + Sync + std::fmt::Debug {
    /// Name, type and description of each attribute.
    const DEFS: &'static [AttributeDef];

    /// Reads every attribute. `operator` is the name for error messages.
    ///
    /// # Errors
    /// [`Error::Attribute`] if an attribute is missing or its value is not accepted.
    fn read(operator: &'static str, source: &mut Source<'_>) -> Result<Self, Error>
    where
        Self: Sized;

    /// The values, in the order of [`AttributeSet::DEFS`].
    fn values(&self) -> Vec<Value>;
}

/// Reads one attribute, for `attributes!`.
pub(crate) fn read_one<A: AttributeType>(
    operator: &'static str,
    def: &'static AttributeDef,
    source: &mut Source<'_>,
) -> Result<A, Error> {
    let refused = |[expected, found]: [String; 2]| Error::Attribute { operator, attribute: def.name, expected, found };
    match source(def) {
        Some(value) if value.kind() == A::KIND => A::read(&value).map_err(refused),
        other => {
            // Strings, tensors and the like are no `Value`, so a source finds nothing.
            let found = other.map_or("nothing, or another type".to_owned(), |value| format!("{value:?}"));
            Err(refused([format!("{:?}", A::KIND), found]))
        }
    }
}

/// Declares an operator's attributes as a struct: one field per attribute, in order, its doc comment being the
/// attribute's description. A field's type is an [`AttributeType`], which defines the accepted values.
macro_rules! attributes {
    ($(#[$meta:meta])* pub struct $name:ident {}) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {}

        impl $crate::attributes::AttributeSet for $name {
            const DEFS: &'static [$crate::attributes::AttributeDef] = &[];

            fn read(_: &'static str, _: &mut $crate::attributes::Source<'_>) -> Result<$name, $crate::Error> {
                Ok($name {})
            }

            fn values(&self) -> Vec<$crate::attributes::Value> {
                Vec::new()
            }
        }
    };
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[doc = $doc:literal])+ $field:ident: $ty:ty,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name { $($(#[doc = $doc])+ pub $field: $ty,)+ }

        impl $crate::attributes::AttributeSet for $name {
            const DEFS: &'static [$crate::attributes::AttributeDef] = &[$($crate::attributes::AttributeDef {
                name: stringify!($field),
                kind: <$ty as $crate::attributes::AttributeType>::KIND,
                doc: concat!($($doc),+),
            }),+];

            fn read(
                operator: &'static str,
                source: &mut $crate::attributes::Source<'_>,
            ) -> Result<$name, $crate::Error> {
                let mut defs = Self::DEFS.iter();
                $(
                    // `DEFS` has one entry per field.
                    let Some(def) = defs.next() else { unreachable!() };
                    let $field = $crate::attributes::read_one(operator, def, source)?;
                )+
                Ok($name { $($field),+ })
            }

            fn values(&self) -> Vec<$crate::attributes::Value> {
                vec![$($crate::attributes::AttributeType::value(&self.$field)),+]
            }
        }
    };
}
pub(crate) use attributes;

/// Declares an enum attribute. Variants are numbered from 0 in order.
macro_rules! choices {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[doc = $doc:literal])+ $choice:ident,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[doc = $doc])+ $choice,)+ }

        impl $name {
            /// All variants, in the order of their numbers.
            pub const ALL: &'static [$name] = &[$($name::$choice),+];
        }

        impl $crate::attributes::AttributeType for $name {
            const KIND: $crate::attributes::AttributeKind = $crate::attributes::AttributeKind::Int;

            fn read(value: &$crate::attributes::Value) -> Result<$name, [String; 2]> {
                $crate::attributes::choice(value, $name::ALL.len()).map(|index| $name::ALL[index])
            }

            fn value(&self) -> $crate::attributes::Value {
                $crate::attributes::Value::Int(*self as i64)
            }
        }
    };
}
pub(crate) use choices;

/// An attribute's name as a string, for function bodies: `name_of!(Attributes.num_heads)`. A field that does not exist
/// is a compile error.
macro_rules! name_of {
    ($set:ident.$field:ident) => {{
        let _: fn(&$set) = |set| {
            let _ = &set.$field;
        };
        stringify!($field)
    }};
}
pub(crate) use name_of;
