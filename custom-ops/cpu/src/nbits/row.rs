//! The rows that a product is asked for.

/// A row of the activations, and its sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// Index into the activations.
    pub(crate) index: u32,
    /// Sums of the first of the columns and those after it.
    pub(crate) output: *mut f32,
}
