//! A node's attributes, whose types may be wrong.

use crate::api::Status;
use moh_operators::{AttributeKind, Value};

/// Reads an attribute in its expected type, or else in another one, so that an error can name the value found. Hosts
/// return an empty list for an attribute of another type, so an empty list is only accepted where one is expected, and if
/// the attribute is not a number.
pub(super) fn value(kind: AttributeKind, read: impl Fn(AttributeKind) -> Result<Value, Status>) -> Option<Value> {
    let own = read(kind).ok();
    let surely = |value: &Value| *value != Value::Ints(Vec::new());
    if own.as_ref().is_some_and(surely) {
        return own;
    }
    let other = |other: &AttributeKind| read(*other).ok().filter(surely);
    [AttributeKind::Int, AttributeKind::Float, AttributeKind::Ints].iter().find_map(other).or(own)
}
