//! How an exported model disagrees with the user's outputs.

use std::fmt;
use std::path::PathBuf;

/// The element of the exported model's outputs that is farthest from the user's.
#[derive(Debug)]
pub struct Difference {
    /// The user's file.
    pub file: PathBuf,
    /// The output.
    pub output: String,
    /// The element.
    pub index: Vec<usize>,
    /// Its value in the file.
    pub expected: f32,
    /// Its value in the exported model's output.
    pub found: f32,
    /// How far it may be.
    pub allowed: f32,
    /// The same in units of `largest`.
    pub tolerance: f32,
    /// The largest value in the file's output, or 1.
    pub largest: f32,
    /// How many elements are farther than they may be.
    pub beyond: usize,
    /// How many were compared.
    pub elements: usize,
    /// What ran the model.
    pub runtime: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { output, index, expected, found, allowed, tolerance, largest, beyond, elements, .. } = self;
        write!(f, "{}: the exported model disagrees with your outputs: {output}{index:?}: ", self.file.display())?;
        write!(f, "expected {expected}, found {found} with {}; ", self.runtime)?;
        write!(f, "off by {:.1e}, allowed {allowed:.1e} ({tolerance:.0e} of {largest}, ", (found - expected).abs())?;
        write!(f, "the largest value or 1); {beyond} of {elements} elements are off by more than that")
    }
}
