//! A family of another crate.

use super::{Family, Inputs, Layer, Port, Sizes, Workload};
use crate::ops::{Ops, Result};
use crate::sample::Sample;
use crate::tape::Tape;

/// A family whose type is known where it was read only. Its forward is on a tape.
pub(super) struct Outside {
    family: Box<dyn Described>,
    tape: Tape,
}

impl Outside {
    pub(super) fn new<F: Family + Send + Sync + 'static>(family: F) -> Result<Outside> {
        let tape = Tape::of(&family)?;
        Ok(Outside { family: Box::new(family), tape })
    }

    pub(super) fn layers(&self) -> Vec<Layer> {
        self.family.layers()
    }

    pub(super) fn inputs(&self) -> Vec<Port> {
        self.family.inputs()
    }

    pub(super) fn outputs(&self) -> Vec<Port> {
        self.family.outputs()
    }

    pub(super) fn workload(&self) -> Workload {
        self.family.workload()
    }

    pub(super) fn resized(&self, tokens: usize) -> Option<(&'static str, usize)> {
        self.family.resized(tokens)
    }

    pub(super) fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        self.family.samples(sizes)
    }

    pub(super) fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        self.tape.play(ops, inputs)
    }
}

/// What a family says of itself, without its forward.
trait Described: Send + Sync {
    fn layers(&self) -> Vec<Layer>;
    fn inputs(&self) -> Vec<Port>;
    fn outputs(&self) -> Vec<Port>;
    fn workload(&self) -> Workload;
    fn resized(&self, tokens: usize) -> Option<(&'static str, usize)>;
    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>>;
}

impl<F: Family + Send + Sync> Described for F {
    fn layers(&self) -> Vec<Layer> {
        Family::layers(self)
    }

    fn inputs(&self) -> Vec<Port> {
        Family::inputs(self)
    }

    fn outputs(&self) -> Vec<Port> {
        Family::outputs(self)
    }

    fn workload(&self) -> Workload {
        Family::workload(self)
    }

    fn resized(&self, tokens: usize) -> Option<(&'static str, usize)> {
        Family::resized(self, tokens)
    }

    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        Family::samples(self, sizes)
    }
}
