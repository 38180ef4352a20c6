//! Keys of a configuration that nobody reads: what configurations find, and errors and warnings name.

use std::fmt;

/// A key of a configuration that its model does not read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedKey {
    /// The key.
    pub key: String,
    /// The absent key that was probably meant.
    pub meant: Option<String>,
    /// What was used in its place.
    pub default: Option<String>,
}

impl fmt::Display for UnusedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.key)?;
        match (&self.meant, &self.default) {
            (Some(meant), Some(default)) => write!(f, " (did you mean {meant:?}, which is {default} by default?)"),
            (Some(meant), None) => write!(f, " (did you mean {meant:?}?)"),
            (None, _) => Ok(()),
        }
    }
}
