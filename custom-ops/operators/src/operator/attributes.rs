//! A node's attributes, of any operator.

use super::{Definition, Operator};
use crate::attributes::{AttributeDef, AttributeSet, Source, Value};
use crate::error::Error;
use std::any::Any;
use std::sync::Arc;

/// A node's attributes, read and checked once. Their type is known at run time only.
#[derive(Clone)]
pub struct Attributes {
    operator: &'static Operator,
    values: Vec<Value>,
    set: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for Attributes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut map = f.debug_map();
        self.iter().for_each(|(def, value)| {
            map.entry(&def.name, value);
        });
        map.finish()?;
        write!(f, " of {}", self.operator.name)
    }
}

impl PartialEq for Attributes {
    fn eq(&self, other: &Attributes) -> bool {
        self.operator == other.operator && self.values == other.values
    }
}

impl Attributes {
    /// Reads and checks every attribute of `operator`.
    ///
    /// # Errors
    /// [`Error::Attribute`] if an attribute is missing or its value is not accepted.
    pub fn read(
        operator: &'static Operator,
        mut source: impl FnMut(&'static AttributeDef) -> Option<Value>,
    ) -> Result<Attributes, Error> {
        operator.read(&mut source)
    }

    /// Checks the attributes of a known operator.
    ///
    /// # Errors
    /// [`Error::Attribute`] if a value is not accepted.
    pub fn new<D: Definition>(set: D::Attributes) -> Result<Attributes, Error> {
        // Converts to ONNX values and back, which checks every value's range.
        let mut values = set.values().into_iter();
        Attributes::read(D::OPERATOR, |_| values.next())
    }

    pub(crate) fn from_source<D: Definition>(source: &mut Source<'_>) -> Result<Attributes, Error> {
        let set = D::Attributes::read(D::NAME, source)?;
        D::check(&set)?;
        Ok(Attributes { operator: D::OPERATOR, values: set.values(), set: Arc::new(set) })
    }

    /// The operator to which they belong.
    pub fn operator(&self) -> &'static Operator {
        self.operator
    }

    /// Definitions and values, in the operator's order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static AttributeDef, &Value)> + '_ {
        self.operator.attributes.iter().zip(&self.values)
    }

    /// The attributes as the operator's own type.
    ///
    /// # Errors
    /// [`Error::Operator`] if they belong to another operator.
    pub fn get<D: Definition>(&self) -> Result<&D::Attributes, Error> {
        let set = self.set.downcast_ref().filter(|_| *self.operator == *D::OPERATOR);
        set.ok_or(Error::Operator { expected: D::NAME, found: self.operator.name })
    }
}
