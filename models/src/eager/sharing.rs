//! The search for shared heads in a forward.

use super::Eager;
use crate::error::Error;
use crate::initial::seed_of;
use crate::ops::{Ops, Result};
use crate::sharing::{self, SCORES};
use candle_core::Tensor;

impl Eager {
    /// Lets the scores of the parameters choose shared heads in the forwards that follow: see [`crate::sharing`]. `seed` is that of the noise, the
    /// same for all forwards of this interpreter; `None` for none, as in evaluation.
    ///
    /// # Errors
    /// [`Error::Sharing`] where the parameters have no scores: see [`sharing::parameters`].
    pub fn search_shared_heads(&mut self, seed: Option<u64>) -> Result<()> {
        let has_scores = |parameters: &crate::Parameters| parameters.iter().any(|(name, _)| name.starts_with(SCORES));
        if !self.parameters.as_deref().is_some_and(has_scores) {
            let (subject, expected) = ("the parameters".to_owned(), format!("names that begin with {SCORES}"));
            return Err(Error::Sharing { subject, expected, found: "none".to_owned() });
        }
        self.search = Some(seed);
        Ok(())
    }

    /// The gates with shared heads, in the place of those of a router whose layer is searched.
    pub(super) fn searched(&mut self, gates: Tensor, active: usize) -> Result<Tensor> {
        let (Some(seed), Some(parameters), path) = (self.search, self.parameters.clone(), self.path()) else {
            return Ok(gates);
        };
        // Other layers have no scores.
        let Some(choice) = self.choice.take_if(|_| parameters.get(&sharing::name(&path)).is_some()) else {
            return Ok(gates);
        };
        let heads = gates.dim(2)?;
        if choice.logits.dims() != gates.dims() {
            return Err(Error::Internal("shared heads of a router that does not choose among all heads"));
        }
        let scores = sharing::scores(&parameters, &path, heads)?;
        let seed = seed.map(|seed| seed_of(seed, &path));
        let found = sharing::route(choice.kind, &choice.logits, scores.as_tensor(), active, seed)?;
        (self.choice, self.margins) = (found.choice, found.margins);
        self.input(found.output)
    }
}
