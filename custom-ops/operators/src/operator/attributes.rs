//! A node's attributes, for code that works with any operator.

use super::{Definition, Operator};
use crate::attributes::{AttributeDef, AttributeSet, Source, Value};
use crate::error::Error;
use std::any::Any;
use std::sync::Arc;

/// A node's attributes, read and checked once: which operator they belong to is known only at run time.
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
    /// [`Error::Attribute`] for one that is absent, or whose value the operator does not accept.
    pub fn read(
        operator: &'static Operator,
        mut source: impl FnMut(&'static AttributeDef) -> Option<Value>,
    ) -> Result<Attributes, Error> {
        operator.read(&mut source)
    }

    /// Checks the attributes of an operator that is known.
    ///
    /// # Errors
    /// [`Error::Attribute`] for one that the operator does not accept.
    pub fn new<D: Definition>(set: D::Attributes) -> Result<Attributes, Error> {
        // Through their values, so that a number out of range is found wherever it comes from.
        let mut values = set.values().into_iter();
        Attributes::read(D::OPERATOR, |_| values.next())
    }

    pub(crate) fn from_source<D: Definition>(source: &mut Source<'_>) -> Result<Attributes, Error> {
        let set = D::Attributes::read(D::NAME, source)?;
        D::check(&set)?;
        Ok(Attributes { operator: D::OPERATOR, values: set.values(), set: Arc::new(set) })
    }

    /// The operator that they belong to.
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
    /// [`Error::Operator`] where they belong to another operator.
    pub fn get<D: Definition>(&self) -> Result<&D::Attributes, Error> {
        let set = self.set.downcast_ref().filter(|_| *self.operator == *D::OPERATOR);
        set.ok_or(Error::Operator { expected: D::NAME, found: self.operator.name })
    }
}
