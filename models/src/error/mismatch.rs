//! Tensors that do not fit their model.

use std::fmt;
use std::path::PathBuf;

use crate::prefix::Prefix;
use crate::weight_type::WeightType;

/// A tensor that does not fit its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The checkpoint does not hold it.
    Missing {
        /// Its name.
        tensor: String,
        /// The shape that the model needs.
        expected: Vec<usize>,
    },
    /// The checkpoint holds something else of that name, or in a form that is not read.
    Unreadable {
        /// Its name.
        tensor: String,
        /// What the checkpoint holds.
        found: String,
    },
    /// Its shape is another.
    Shape {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// The shape that the model needs.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// Its type is not one of F64, F32, F16 and BF16.
    Type {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// The type in the file.
        found: WeightType,
    },
    /// The model has no use for it.
    Unexpected {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// The shape in the file.
        found: Vec<usize>,
    },
}

/// Every tensor of a checkpoint that does not fit its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The checkpoint's weight file or index.
    pub path: PathBuf,
    /// What does not fit; never empty.
    pub problems: Vec<Problem>,
    /// What was done to the files' names, where that makes more of them fit: tensors are named without or with it.
    pub prefix: Option<Prefix>,
    /// What may be the reason: whole sentences, without a full stop.
    pub hints: Vec<String>,
}

impl Problem {
    fn kind(&self) -> &'static str {
        match self {
            Problem::Missing { .. } => "missing",
            Problem::Unreadable { .. } => "unreadable",
            Problem::Shape { .. } => "of another shape",
            Problem::Type { .. } => "of another type",
            Problem::Unexpected { .. } => "unexpected",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Missing { tensor, expected } => write!(f, "{tensor:?} {expected:?}"),
            Problem::Unreadable { tensor, found } => write!(f, "{tensor:?}: {found}"),
            Problem::Shape { file, tensor, expected, found } => {
                write!(f, "{tensor:?}: expected {expected:?}, found {found:?} in {}", file.display())
            }
            Problem::Type { file, tensor, found } => {
                write!(f, "{tensor:?}: expected F64, F32, F16 or BF16, found {found} in {}", file.display())
            }
            Problem::Unexpected { file, tensor, found } => write!(f, "{tensor:?} {found:?} in {}", file.display()),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 20;
        write!(f, "{}: the tensors are not those of the model that the configuration describes", self.path.display())?;
        if let Some(prefix) = &self.prefix {
            write!(f, " (names with the prefix {prefix})")?;
        }
        for kind in ["missing", "unreadable", "of another shape", "of another type", "unexpected"] {
            let mut of_kind = self.problems.iter().filter(|problem| problem.kind() == kind);
            let count = of_kind.clone().count();
            if count == 0 {
                continue;
            }
            write!(f, "\n{count} {kind}:")?;
            for problem in of_kind.by_ref().take(SHOWN) {
                write!(f, "\n  {problem}")?;
            }
            if count > SHOWN {
                write!(f, "\n  and {} more", count - SHOWN)?;
            }
        }
        for hint in &self.hints {
            write!(f, "\n{hint}")?;
        }
        Ok(())
    }
}
