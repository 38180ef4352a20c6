//! Gradients of a forward in float32 on the CPU: what was computed from what, and how gradients go back.
//!
//! candle differentiates too, and does for losses and for what has no rule here. But for every operation it fills a tensor with zeros and adds
//! the gradient to it, and it knows nothing of heads that are off. Here a gradient that comes alone is not added to anything.

use crate::error::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId, Var};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

/// From the gradient of a step's output those of its inputs; nothing for one that has none.
pub(crate) type Back = Box<dyn FnOnce(&Tensor) -> Result<Vec<Option<Tensor>>>>;

/// The steps of a forward.
#[derive(Default)]
pub(crate) struct Graph {
    steps: Vec<Step>,
    /// What gradients are wanted of.
    known: HashSet<TensorId>,
    /// Variables of candle's graph, and the values of this one whose numbers they have.
    bridges: Vec<(Tensor, TensorId)>,
}

struct Step {
    output: TensorId,
    inputs: Vec<TensorId>,
    back: Back,
}

/// Gradients by the tensors they are of.
#[derive(Default)]
pub(crate) struct Sums(HashMap<TensorId, Tensor>);

impl Sums {
    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        match self.0.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert(gradient);
            }
            Entry::Occupied(mut entry) => {
                let sum = (entry.get() + gradient)?;
                entry.insert(sum);
            }
        }
        Ok(())
    }

    /// The gradient of a tensor.
    pub(crate) fn remove(&mut self, id: TensorId) -> Option<Tensor> {
        self.0.remove(&id)
    }
}

impl Graph {
    /// Wants the gradient of the variable `var`, whose numbers `leaf` has too.
    pub(crate) fn leaf(&mut self, var: &Var, leaf: &Tensor) {
        self.known.insert(leaf.id());
        self.bridges.push((var.as_tensor().clone(), leaf.id()));
    }

    /// The variable `var` of candle's graph is a copy of `x`.
    pub(crate) fn stands_for(&mut self, var: &Tensor, x: &Tensor) {
        self.bridges.push((var.clone(), x.id()));
    }

    /// Whether a gradient of `x` is wanted, or of what it was computed from.
    pub(crate) fn knows(&self, x: &Tensor) -> bool {
        self.known.contains(&x.id())
    }

    /// Adds the step that gave `output`, if it depends on what gradients are wanted of.
    pub(crate) fn step(&mut self, output: &Tensor, inputs: &[&Tensor], back: Back) {
        if inputs.iter().any(|input| self.knows(input)) {
            self.known.insert(output.id());
            let inputs = inputs.iter().map(|input| input.id()).collect();
            self.steps.push(Step { output: output.id(), inputs, back });
        }
    }

    /// A variable of candle's graph in the place of `x`: what depends on it is differentiated by candle.
    pub(crate) fn bridge(&mut self, x: &Tensor) -> Result<Tensor> {
        if !self.knows(x) {
            return Ok(x.clone());
        }
        let var = Var::from_tensor(x)?.into_inner();
        self.bridges.push((var.clone(), x.id()));
        Ok(var)
    }

    /// A value that was computed in candle's graph, for this one.
    pub(crate) fn enter(&mut self, x: &Tensor) -> Tensor {
        if !x.track_op() {
            return x.clone();
        }
        let inside = x.detach();
        // A copy, which the variables before it have no part in.
        let vars = self.bridges.clone();
        let inputs: Vec<TensorId> = vars.iter().map(|(_, id)| *id).collect();
        self.known.insert(inside.id());
        let outside = x.clone();
        let back = move |gradient: &Tensor| {
            let mut found = backward(&outside, gradient)?;
            Ok(vars.iter().map(|(var, _)| found.remove(var)).collect())
        };
        self.steps.push(Step { output: inside.id(), inputs, back: Box::new(back) });
        inside
    }

    /// Gradients of what they are wanted of, from those of candle's graph of the loss.
    pub(crate) fn backward(self, loss: &mut GradStore) -> Result<Sums> {
        let mut sums = Sums::default();
        for (var, id) in &self.bridges {
            if let Some(gradient) = loss.remove(var) {
                sums.add(*id, gradient)?;
            }
        }
        drop(self.bridges);
        for Step { output, inputs, back } in self.steps.into_iter().rev() {
            let Some(gradient) = sums.remove(output) else { continue };
            for (id, gradient) in inputs.into_iter().zip(back(&gradient)?) {
                if let Some(gradient) = gradient
                    && self.known.contains(&id)
                {
                    sums.add(id, gradient)?;
                }
            }
        }
        Ok(sums)
    }
}

/// candle's gradients of what `y` was computed from, where `gradient` is that of `y`.
pub(crate) fn backward(y: &Tensor, gradient: &Tensor) -> Result<GradStore> {
    Ok((y * gradient)?.sum_all()?.backward()?)
}
