//! What a language model is asked to do.

use crate::measure::Timed;
use anyhow::Result;
use std::time::Duration;

/// The name of the length of a cache that a call gives back where it is a buffer that is updated in place.
pub(super) const IN_PLACE: &str = "capacity";

/// New tokens after cached ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) past: usize,
    pub(super) tokens: usize,
}

/// A loaded language model that repeats one step.
pub(super) trait Decoder {
    /// Makes the inputs of a step.
    fn prepare(&mut self, step: Step) -> Result<()>;
    /// Runs the step.
    fn run(&mut self) -> Result<Duration>;
}

impl Timed for Box<dyn Decoder> {
    fn run(&mut self) -> Result<Duration> {
        (**self).run()
    }
}

/// Shape and numbers of the inputs that are no caches; `None` for others.
pub(super) fn integers(name: &str, Step { past, tokens }: Step) -> Option<(Vec<usize>, Vec<i64>)> {
    let row = |numbers: Vec<i64>| Some((vec![1, numbers.len()], numbers));
    match name {
        "input_ids" => row((0..tokens as i64).map(|i| 5 + i % 97).collect()),
        "attention_mask" => row(vec![1; past + tokens]),
        "position_ids" => row((past as i64..(past + tokens) as i64).collect()),
        _ => None,
    }
}

/// Fills a cache.
pub(super) fn noise(numbers: &mut [f32]) {
    let mut state = 1u32;
    for number in numbers {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *number = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
}
