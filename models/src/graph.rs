//! Gradients of a forward in float32 on the CPU: what was computed from what, and how gradients go back.
//!
//! candle differentiates too, and does for losses and for what has no rule here. But for every operation it fills a tensor with zeros and adds
//! the gradient to it, and it knows nothing of heads that are off. Here a gradient that comes alone is not added to anything.

use crate::error::Result;
use crate::fused::{self, Arithmetic};
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
    /// Rows of leaves: the leaf, where in it they begin, and the tensor of them.
    parts: Vec<(Tensor, usize, TensorId)>,
}

struct Step {
    output: TensorId,
    inputs: Vec<TensorId>,
    back: Back,
}

/// Gradients by the tensors they are of, and whether nobody else has them: those can be added to.
#[derive(Default)]
pub(crate) struct Sums(HashMap<TensorId, (Tensor, bool)>);

impl Sums {
    fn add(&mut self, id: TensorId, gradient: Tensor) -> Result<()> {
        // candle's gradients of variables may depend on other variables, which they are no part of.
        let gradient = gradient.detach();
        match self.0.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert((gradient, false));
            }
            Entry::Occupied(mut entry) => match entry.get() {
                (sum, true) => fused::add_in_place(sum, &gradient)?,
                (first, false) => {
                    let sum = fused::binary(Arithmetic::Sum, first, &gradient)?;
                    entry.insert((sum, true));
                }
            },
        }
        Ok(())
    }

    /// The gradient of a tensor.
    pub(crate) fn remove(&mut self, id: TensorId) -> Option<Tensor> {
        self.0.remove(&id).map(|(gradient, _)| gradient)
    }
}

impl Graph {
    /// Wants the gradient of the variable `var`, whose numbers `leaf` has too.
    pub(crate) fn leaf(&mut self, var: &Var, leaf: &Tensor) {
        self.known.insert(leaf.id());
        self.bridges.push((var.as_tensor().clone(), leaf.id()));
    }

    /// `rows` are those of `leaf` from `first` on.
    pub(crate) fn part(&mut self, leaf: &Tensor, first: usize, rows: &Tensor) {
        if self.knows(leaf) {
            self.known.insert(rows.id());
            self.parts.push((leaf.clone(), first, rows.id()));
        }
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
        let mut found: Vec<(Tensor, Vec<(usize, Tensor)>)> = Vec::new();
        for (leaf, first, rows) in self.parts {
            let Some(gradient) = sums.remove(rows) else { continue };
            match found.iter_mut().find(|(other, _)| other.id() == leaf.id()) {
                Some((_, parts)) => parts.push((first, gradient)),
                None => found.push((leaf, vec![(first, gradient)])),
            }
        }
        for (leaf, parts) in found {
            sums.add(leaf.id(), fused::joined(leaf.dims(), &parts)?)?;
        }
        Ok(sums)
    }
}

/// candle's gradients of what `y` was computed from, where `gradient` is that of `y`.
pub(crate) fn backward(y: &Tensor, gradient: &Tensor) -> Result<GradStore> {
    Ok((y * gradient.detach())?.sum_all()?.backward()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::checkpoint::Weight;
    use crate::eager::Eager;
    use crate::ops::{Linear, Ops};
    use crate::parameters::Parameters;
    use crate::sample::Rng;
    use candle_core::{Device, Tensor, Var};
    use std::sync::Arc;

    fn random(seed: u64, shape: &[usize]) -> Var {
        let mut rng = Rng::new(seed);
        Var::from_vec((0..shape.iter().product()).map(|_| rng.normal()).collect(), shape, &Device::Cpu).unwrap()
    }

    /// A table that is read in candle before a model, and used in candle after it; what the first forward gives is part of the loss and the
    /// second one's input.
    #[test]
    fn gradients_through_both_graphs() {
        let (table, matrix, weights) = (random(1, &[5, 3]), random(2, &[3, 3]), random(3, &[4, 5]));
        let rows = Tensor::new(&[0u32, 3, 3, 1], &Device::Cpu).unwrap();
        let vars = [("table".to_owned(), table.clone()), ("matrix".to_owned(), matrix.clone())];
        let mut ops = Eager::new().with_parameters(Arc::new(Parameters::new(vars, &[], &Device::Cpu).unwrap()));
        let layer = Linear { weight: Weight::absent("matrix", &[3, 3]), bias: None };
        let mut forward = |x: &Tensor| {
            let x = ops.input(x.clone()).unwrap();
            let y = ops.linear(&x, &layer).unwrap();
            let y = ops.add(&x, &y).unwrap();
            ops.output(y).unwrap()
        };
        let loss = |forward: &mut dyn FnMut(&Tensor) -> Tensor| {
            let first = forward(&table.index_select(&rows, 0).unwrap());
            let second = forward(&(&first * 2.0).unwrap());
            let logits = second.matmul(&table.t().unwrap()).unwrap();
            let loss = (logits * weights.as_detached_tensor()).unwrap().sum_all().unwrap();
            (loss + first.sqr().unwrap().sum_all().unwrap()).unwrap()
        };
        let found = loss(&mut forward);
        let found = ops.backward(&found).unwrap();
        let expected = loss(&mut |x| (x + x.matmul(&matrix.t().unwrap()).unwrap()).unwrap()).backward().unwrap();
        for (name, var) in [("table", &table), ("matrix", &matrix)] {
            let [a, b] =
                [&found[name], expected.get(var).unwrap()].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4 * b.abs().max(1.0)), "{name}: {a:?} {b:?}");
        }
    }
}
