//! Rows of several requests in one run.

use super::{Job, Run, claim};
use moh_runtime::{Dim, Model, Tensor, TensorInfo};

/// How a model's requests share runs: every input and output begins with the same dimension of any size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batching {
    /// The most rows of a run.
    pub(crate) rows: usize,
}

impl Batching {
    /// How `model` can, if it can.
    pub(crate) fn of(model: &Model, rows: usize) -> Option<Batching> {
        of(model.inputs(), model.outputs()).then_some(Batching { rows })
    }
}

fn of(inputs: &[TensorInfo], outputs: &[TensorInfo]) -> bool {
    let Some(Dim::Symbol(batch)) = inputs.first().and_then(|input| input.dims.first()) else { return false };
    let begins = |info: &TensorInfo| info.dims.first() == Some(&Dim::Symbol(batch.clone()));
    // The symbol elsewhere, or another one, ties rows to each other in ways that are not known here.
    let alone = |info: &TensorInfo| info.dims.iter().skip(1).all(|dim| matches!(dim, Dim::Fixed(_)));
    let fits = |info: &TensorInfo| begins(info) && alone(info);
    !batch.is_empty() && inputs.iter().all(fits) && outputs.iter().all(begins)
}

/// Rows of a request.
pub(super) fn rows(job: &Job) -> usize {
    job.inputs.first().and_then(|input| input.shape().first()).copied().unwrap_or(1)
}

/// Whether two requests can share a run.
pub(super) fn fit(a: &Job, b: &Job) -> bool {
    a.outputs == b.outputs && a.inputs.iter().zip(&b.inputs).all(|(a, b)| a.shape().get(1..) == b.shape().get(1..))
}

/// Each request's outputs, from one run of all; `None` where that fails.
pub(super) fn run(model: &mut impl Run, jobs: &[Job]) -> Option<Vec<Vec<Tensor>>> {
    let first = jobs.first()?;
    let inputs = (0..first.inputs.len()).map(|i| joined(jobs.iter().map(|job| &job.inputs[i])));
    let interrupt = claim::interrupt(jobs.iter().map(|job| &job.claim));
    let outputs = model.run(inputs.collect::<Option<Vec<Tensor>>>()?, &first.outputs, &interrupt).ok()?;
    let all: usize = jobs.iter().map(rows).sum();
    let mut answers: Vec<Vec<Tensor>> = jobs.iter().map(|_| Vec::new()).collect();
    for output in outputs {
        let (&given, rest) = output.shape().split_first()?;
        let (row, mut at) = (rest.iter().product::<usize>(), 0);
        if given != all {
            return None;
        }
        for (answer, job) in answers.iter_mut().zip(jobs) {
            let mut shape = vec![rows(job)];
            shape.extend(rest);
            let end = at + rows(job) * row;
            answer.push(Tensor::from_data(shape, output.data().range(at..end)?.to_owned()).ok()?);
            at = end;
        }
    }
    Some(answers)
}

/// Tensors one after the other along the first dimension.
fn joined<'t>(tensors: impl Iterator<Item = &'t Tensor> + Clone) -> Option<Tensor> {
    let first = tensors.clone().next()?;
    let mut shape = first.shape().to_vec();
    *shape.first_mut()? = tensors.clone().map(|tensor| tensor.shape()[0]).sum();
    let bytes: Vec<u8> = tensors.flat_map(|tensor| tensor.data().to_bytes()).collect();
    Tensor::from_data(shape, first.element_type().read(&bytes)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moh_runtime::ElementType;

    fn info(dims: &[&str]) -> TensorInfo {
        let dim = |d: &&str| d.parse().map_or(Dim::Symbol((*d).to_owned()), Dim::Fixed);
        TensorInfo { name: "x".to_owned(), element_type: ElementType::F32, dims: dims.iter().map(dim).collect() }
    }

    #[test]
    fn rows_are_shared_where_all_begins_with_the_batch() {
        assert!(of(&[info(&["n", "3"]), info(&["n"])], &[info(&["n", "10"])]));
        assert!(!of(&[info(&["n", "3"])], &[info(&["10"])]));
        assert!(!of(&[info(&["n", "3"]), info(&["3"])], &[info(&["n"])]));
        assert!(!of(&[info(&["n", "m"])], &[info(&["n"])]));
        assert!(!of(&[info(&["1", "3"])], &[info(&["1"])]));
        assert!(!of(&[info(&["", "3"])], &[info(&[""])]));
        assert!(!of(&[], &[]));
    }
}
