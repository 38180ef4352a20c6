//! Prefixes of tensors' names: what checkpoints find, and errors and reports name.

use std::fmt;

/// What was done to the names of a checkpoint to make them those of its model.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Prefix {
    /// Wrappers put it before the names: `module.` or `model.backbone.`. Tensors without it are no part of the model.
    Removed(String),
    /// A part of the model was saved, whose names lack it: `model.` in a `LlamaModel`.
    Added(String),
}

impl Prefix {
    /// The model's name of the tensor that the file calls `name`; `None` for one that is no part of the model.
    pub(crate) fn apply(&self, name: &str) -> Option<String> {
        match self {
            Prefix::Removed(prefix) => name.strip_prefix(prefix.as_str()).map(str::to_owned),
            Prefix::Added(prefix) => Some(format!("{prefix}{name}")),
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Prefix::Removed(prefix) => write!(f, "{:?} removed", prefix),
            Prefix::Added(prefix) => write!(f, "{:?} added", prefix),
        }
    }
}
