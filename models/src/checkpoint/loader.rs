//! What a model takes from a checkpoint, and everything that does not fit.

use std::collections::BTreeSet;

use super::{Checkpoint, Weight};
use crate::error::{Error, Mismatch, Problem};

/// Collects the tensors of a model; what is missing, misshapen or unexpected is reported at once by [`Loader::finish`].
#[derive(Debug)]
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    taken: BTreeSet<String>,
    reported: BTreeSet<String>,
    problems: Vec<Problem>,
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

    /// Ends the collection. Tensors that nobody asked for are unexpected, unless `ignorable` says that their name does not
    /// matter, or [`Checkpoint::ignore_unexpected`]. Neither are then the model's.
    ///
    /// # Errors
    /// [`Error::Tensors`] with all that does not fit.
    pub fn finish(self, ignorable: impl Fn(&str) -> bool) -> Result<(), Error> {
        let Loader { checkpoint, taken, mut problems, .. } = self;
        let rest = checkpoint.tensors.values().filter(|weight| !taken.contains(weight.name()));
        let rest = rest.filter(|weight| {
            let passed_over = ignorable(weight.name());
            if passed_over {
                checkpoint.pass_over(weight);
            }
            !passed_over && !checkpoint.ignores(weight)
        });
        problems.extend(rest.map(|weight| Problem::Unexpected {
            file: weight.file().to_owned(),
            tensor: weight.name().to_owned(),
            found: weight.shape().to_vec(),
        }));
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Tensors(Box::new(Mismatch {
            path: checkpoint.path().to_owned(),
            problems,
            prefix: None,
            hints: Vec::new(),
        })))
    }
}
