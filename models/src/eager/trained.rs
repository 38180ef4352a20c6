//! Trainings: parameters in the place of the checkpoint's tensors, and the graph that gradients go back through.

use super::Eager;
use crate::checkpoint::Weight;
use crate::error::Error;
use crate::fused;
use crate::graph::{self, Graph};
use crate::operators::{self, Computed};
use crate::ops::{ModelOperator, Ops, Result};
use crate::parameters::Parameters;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, DType, Tensor, Var};
use std::collections::BTreeMap;

impl Eager {
    /// Begins a graph where there can be one.
    pub(super) fn begin(mut self) -> Eager {
        (self.graph, self.leaves) = (None, BTreeMap::new());
        if let Some(parameters) = self.parameters.as_ref().filter(|_| self.device.is_cpu() && self.model == DType::F32)
        {
            let mut graph = Graph::default();
            for (name, var) in parameters.iter() {
                let leaf = var.as_detached_tensor();
                graph.leaf(var, &leaf);
                self.leaves.insert(name.to_owned(), leaf);
            }
            self.graph = Some(graph);
        }
        self
    }

    /// The gradients of a loss, a scalar in candle's graph that was computed from outputs and routing of this interpreter's forwards, or
    /// from the variables themselves: by the names of the parameters that it depends on.
    ///
    /// # Errors
    /// What candle fails with.
    pub fn backward(self, loss: &Tensor) -> Result<BTreeMap<String, Tensor>> {
        let mut found = loss.backward()?;
        let Some(parameters) = self.parameters else { return Ok(BTreeMap::new()) };
        let Some(graph) = self.graph else {
            let gradients = parameters.iter().map(|(name, var)| Some((name.to_owned(), found.remove(var)?)));
            return Ok(gradients.flatten().collect());
        };
        let mut sums = graph.backward(&mut found)?;
        let gradients = self.leaves.into_iter().map(|(name, leaf)| Some((name, sums.remove(leaf.id())?)));
        Ok(gradients.flatten().collect())
    }

    pub(super) fn trained(&mut self, parameters: &Parameters, weight: &Weight) -> Result<Tensor> {
        if let Some(derivation) = weight.derivation() {
            let inputs = derivation.inputs.iter().map(|input| self.load(input)).collect::<Result<Vec<_>>>()?;
            let inputs: Vec<&Tensor> = inputs.iter().collect();
            return self.composed(&inputs, |inputs| Ok((derivation.formula)(inputs)?.reshape(weight.shape())?));
        }
        if self.graph.is_none() {
            return parameters.value(weight);
        }
        let mut parts = Vec::new();
        for part in weight.parts() {
            let missing = || Error::Variable { tensor: part.tensor.clone(), found: "none of this name".to_owned() };
            let leaf = self.leaves.get(&part.tensor).ok_or_else(missing)?.clone();
            // Whole rows of the first axis: a weight is never cut otherwise.
            let row = (leaf.elem_count() / leaf.dim(0).unwrap_or(1).max(1)).max(1);
            parts.push(match part.elements == leaf.elem_count() {
                true => leaf,
                false => {
                    let rows = leaf.narrow(0, part.at / row, part.elements / row)?;
                    if let Some(graph) = &mut self.graph {
                        graph.part(&leaf, part.at / row, &rows);
                    }
                    rows
                }
            });
        }
        let joined = match parts.as_slice() {
            [one] => one.clone(),
            [] => Tensor::zeros(weight.shape(), DType::F32, &self.device)?,
            // Matrices one below the other, which have one width.
            _ => self.concat(&parts.iter().collect::<Vec<_>>(), 0)?,
        };
        let shape: Vec<i64> = weight.shape().iter().map(|&n| n as i64).collect();
        if joined.dims() == weight.shape() { Ok(joined) } else { self.reshape(&joined, &shape) }
    }

    /// Adds a step to the graph, if there is one.
    pub(super) fn step(
        &mut self,
        output: Tensor,
        inputs: &[&Tensor],
        back: impl FnOnce(&Tensor) -> Result<Vec<Option<Tensor>>> + 'static,
    ) -> Tensor {
        if let Some(graph) = &mut self.graph {
            graph.step(&output, inputs, Box::new(back));
        }
        output
    }

    /// Whether the graph wants the gradient of `x`.
    pub(super) fn wants(&self, x: &Tensor) -> bool {
        self.graph.as_ref().is_some_and(|graph| graph.knows(x))
    }

    /// A formula in candle, which differentiates it.
    pub(super) fn composed(
        &mut self,
        inputs: &[&Tensor],
        formula: impl FnOnce(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let vars = self.variables(inputs)?;
        let output = formula(&vars)?;
        Ok(self.step_of_candle(output, inputs, vars))
    }

    /// Variables in candle's graph in the place of what gradients are wanted of.
    pub(super) fn variables(&self, inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
        let variable = |x: &&Tensor| match self.wants(x) {
            true => Ok(Var::from_tensor(x)?.into_inner()),
            false => Ok((*x).clone()),
        };
        inputs.iter().map(variable).collect()
    }

    pub(super) fn step_of_candle(&mut self, output: Tensor, inputs: &[&Tensor], vars: Vec<Tensor>) -> Tensor {
        if self.graph.is_none() {
            return output;
        }
        let inside = output.detach();
        self.step(inside, inputs, move |gradient| {
            let mut found = graph::backward(&output, gradient)?;
            Ok(vars.iter().map(|var| found.remove(var)).collect())
        })
    }

    /// An operation of one tensor that brings its gradient along.
    pub(super) fn fused<F: CustomOp1 + Copy + Send + Sync + 'static>(&mut self, x: &Tensor, op: F) -> Result<Tensor> {
        let x = self.contiguous(x)?;
        let y = x.apply_op1_no_bwd(&op)?;
        let (input, output) = (x.clone(), y.clone());
        Ok(self.step(y, &[&x], move |gradient| Ok(vec![op.bwd(&input, &output, gradient)?])))
    }

    /// The same of two tensors.
    pub(super) fn fused2<F: CustomOp2 + Copy + Send + Sync + 'static>(
        &mut self,
        x: &Tensor,
        w: &Tensor,
        op: F,
    ) -> Result<Tensor> {
        let (x, w) = (self.contiguous(x)?, self.contiguous(w)?);
        let y = x.apply_op2_no_bwd(&w, &op)?;
        let (a, b, output) = (x.clone(), w.clone(), y.clone());
        Ok(self.step(y, &[&x, &w], move |gradient| {
            let (of_a, of_b) = op.bwd(&a, &b, &output, gradient)?;
            Ok(vec![of_a, of_b])
        }))
    }

    /// The same of three tensors.
    pub(super) fn fused3<F: CustomOp3 + Copy + Send + Sync + 'static>(
        &mut self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        op: F,
    ) -> Result<Tensor> {
        let (x, w, b) = (self.contiguous(x)?, self.contiguous(w)?, self.contiguous(b)?);
        let y = x.apply_op3_no_bwd(&w, &b, &op)?;
        let (inputs, output) = ([x.clone(), w.clone(), b.clone()], y.clone());
        Ok(self.step(y, &[&x, &w, &b], move |gradient| {
            let (of_x, of_w, of_b) = op.bwd(&inputs[0], &inputs[1], &inputs[2], &output, gradient)?;
            Ok(vec![of_x, of_w, of_b])
        }))
    }

    /// x W^T + b of rows.
    pub(super) fn product_of_rows(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let mut inputs = vec![x, weight];
        inputs.extend(bias);
        let y = fused::linear(x, weight, bias)?;
        let (x_, weight_, wanted) = (x.clone(), weight.clone(), [self.wants(x), true, bias.is_some()]);
        Ok(self.step(y, &inputs, move |gradient| Ok(fused::linear_gradients(gradient, &x_, &weight_, wanted)?.into())))
    }

    /// An operator, with its gradients.
    pub(super) fn trained_operator<O: ModelOperator>(
        &mut self,
        attributes: &O::Attributes,
        tensors: &[Option<Tensor>],
    ) -> Result<Computed> {
        let given: Vec<&Tensor> = tensors.iter().flatten().collect();
        let list: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
        let wants = |x: &Tensor| self.wants(x);
        if let Some((output, back)) = O::train(attributes, &operators::inputs::<O, _>(&list)?, &wants)? {
            let output = match &mut self.graph {
                Some(graph) => {
                    graph.step(&output, &given, back);
                    output
                }
                None => output,
            };
            return Ok(output.into());
        }
        let vars = self.variables(&given)?;
        let mut in_order = vars.iter();
        let list: Vec<Option<&Tensor>> =
            tensors.iter().map(|tensor| tensor.as_ref().and_then(|_| in_order.next())).collect();
        let mut computed = O::compute(attributes, &operators::inputs::<O, _>(&list)?)?;
        // Losses of what was chosen are candle's.
        if let (Some(graph), Some(_)) = (&mut self.graph, &computed.choice) {
            given.iter().zip(&vars).filter(|(_, var)| var.is_variable()).for_each(|(x, var)| graph.stands_for(var, x));
        }
        computed.output = self.step_of_candle(computed.output, &given, vars);
        Ok(computed)
    }

    /// The same numbers side by side in memory.
    pub(super) fn contiguous(&mut self, x: &Tensor) -> Result<Tensor> {
        let y = fused::packed(x)?;
        if y.id() == x.id() {
            return Ok(y);
        }
        Ok(self.step(y, &[x], |gradient| Ok(vec![Some(gradient.clone())])))
    }

    /// Whether `x` is of a training on the CPU in float32.
    pub(super) fn fuses(&self, x: &Tensor) -> bool {
        self.graph.is_some() && x.dtype() == DType::F32
    }
}
