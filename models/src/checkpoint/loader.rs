//! What a model takes from a checkpoint, and everything that does not fit.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use super::{Checkpoint, Weight, WeightType};
use crate::error::Error;

/// Collects the tensors of a model; what is missing, misshapen or unexpected is reported at once by [`Loader::finish`].
#[derive(Debug)]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    taken: BTreeSet<String>,
    reported: BTreeSet<String>,
    problems: Vec<Problem>,
}

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
}

impl<'a> Loader<'a> {
    /// Takes tensors from that checkpoint.
    pub fn new(checkpoint: &'a Checkpoint) -> Loader<'a> {
        Loader { checkpoint, taken: BTreeSet::new(), reported: BTreeSet::new(), problems: Vec::new() }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// A floating-point tensor of that shape. Where the checkpoint has none, the result has the shape but no elements to read;
    /// [`Loader::finish`] will fail.
    pub fn weight(&mut self, name: &str, shape: &[usize]) -> Weight {
        self.optional(name, shape).unwrap_or_else(|| {
            if self.checkpoint.get(name).is_none() {
                let tensor = name.to_owned();
                let problem = match self.checkpoint.unreadable.get(name) {
                    Some(found) => Problem::Unreadable { tensor, found: found.clone() },
                    None => Problem::Missing { tensor, expected: shape.to_vec() },
                };
                self.report(name, problem);
            }
            Weight::absent(name, shape)
        })
    }

    /// A floating-point tensor of that shape, if the checkpoint holds one of that name.
    pub fn optional(&mut self, name: &str, shape: &[usize]) -> Option<Weight> {
        let weight = self.checkpoint.get(name)?;
        self.taken.insert(name.to_owned());
        let (file, tensor) = (weight.file().to_owned(), name.to_owned());
        if !weight.dtype().is_model_float() {
            self.report(name, Problem::Type { file, tensor, found: weight.dtype() });
            return None;
        }
        if weight.shape() != shape {
            let (expected, found) = (shape.to_vec(), weight.shape().to_vec());
            self.report(name, Problem::Shape { file, tensor, expected, found });
            return None;
        }
        Some(weight.clone())
    }

    /// Notes a tensor's problem; one is enough for a tensor that is asked for repeatedly.
    fn report(&mut self, name: &str, problem: Problem) {
        if self.reported.insert(name.to_owned()) {
            self.problems.push(problem);
        }
    }

    /// Ends the collection. Tensors that nobody asked for are unexpected, unless `ignorable` says that their name does not matter.
    ///
    /// # Errors
    /// [`Error::Tensors`] with all that does not fit.
    pub fn finish(self, ignorable: impl Fn(&str) -> bool) -> Result<(), Error> {
        let Loader { checkpoint, taken, mut problems, .. } = self;
        let rest = checkpoint.tensors.values().filter(|w| !taken.contains(w.name()) && !ignorable(w.name()));
        problems.extend(rest.map(|weight| Problem::Unexpected {
            file: weight.file().to_owned(),
            tensor: weight.name().to_owned(),
            found: weight.shape().to_vec(),
        }));
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Tensors(Box::new(Mismatch { path: checkpoint.path().to_owned(), problems })))
    }
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
        write!(f, "{}: the tensors are not those of this model", self.path.display())?;
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
        Ok(())
    }
}
