//! A few query rows: keys and values are read once, in place.

use super::call::{Call, Head};
use super::row_step::{KEYS, ROWS, RowStep};
use crate::gather::{Log2Bias, Widen};
use crate::host::Host;
use crate::isa::Isa;
use crate::memory::{Memory, Sections, pitch};
use moh_operators::Element;
use moh_operators::Error;
use moh_operators::routed_attention::Problem;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// A worker's memory, which also holds the result of the last [`RowMemory::attend`].
pub(super) struct RowMemory<'h> {
    floats: Memory<'h>,
    query_pitch: usize,
    value_pitch: usize,
    queries: usize,
    scores: usize,
    outputs: usize,
    max: usize,
    sum: usize,
}

impl<'h> RowMemory<'h> {
    pub(super) fn new(p: &Problem, host: &'h dyn Host) -> Result<RowMemory<'h>, Error> {
        let mut sections = Sections::default();
        let (query_pitch, value_pitch) = (pitch(p.head_dim), pitch(p.value_dim));
        Ok(RowMemory {
            query_pitch,
            value_pitch,
            queries: sections.add(ROWS, query_pitch)?,
            scores: sections.add(ROWS, KEYS)?,
            outputs: sections.add(ROWS, value_pitch)?,
            max: sections.add(ROWS, 1)?,
            sum: sections.add(ROWS, 1)?,
            floats: sections.allocate(host)?,
        })
    }

    /// Computes attention of at most [`ROWS`] rows to `keys`; the result stays in this memory. Returns the number of
    /// multiply-accumulate operations.
    pub(super) fn attend<I: Isa, T: Element>(
        &mut self,
        call: &Call<'_, I, T>,
        head: Head,
        rows: &[u32],
        keys: Range<usize>,
    ) -> u64 {
        let p = call.problem;
        let rows = &rows[..rows.len().min(ROWS)];
        let (query_pitch, value_pitch) = (self.query_pitch, self.value_pitch);
        let (outputs, max, sum) = (self.outputs, self.max, self.sum);
        self.floats.slice(outputs..outputs + rows.len() * value_pitch).fill(0.0);
        self.floats.slice(max..max + ROWS).fill(f32::NEG_INFINITY);
        self.floats.slice(sum..sum + ROWS).fill(0.0);
        for (r, &row) in rows.iter().enumerate() {
            let output = self.floats.at(self.queries + r * query_pitch);
            let factors = [p.scale, LOG2_E];
            let input = call.query(head, row);
            call.isa.vectorize(Widen { input, stride: 0, rows: 1, dim: p.head_dim, scale: factors, output, pitch: 0 });
        }
        let end = rows.last().map_or(0, |&row| call.visible(head, row)).min(keys.end);
        let mut macs = 0;
        for start in (keys.start..end).step_by(KEYS) {
            let keys = (end - start).min(KEYS);
            let mut visible = [0; ROWS];
            for (r, &row) in rows.iter().enumerate() {
                visible[r] = call.visible(head, row).saturating_sub(start).min(keys);
                let scores = self.scores + r * KEYS;
                fill_bias(call, head, row, start, self.floats.slice(scores..scores + keys));
            }
            call.isa.vectorize(RowStep {
                rows: rows.len(),
                keys,
                head_dim: p.head_dim,
                value_dim: p.value_dim,
                queries: self.floats.at(self.queries),
                query_pitch,
                key: call.keys(head, start),
                value: call.values(head, start),
                scores: self.floats.at(self.scores),
                output: self.floats.at(self.outputs),
                value_pitch,
                max: self.floats.at(self.max),
                sum: self.floats.at(self.sum),
                visible,
            });
            macs += rows.len() * keys * p.head_dim + visible.iter().sum::<usize>() * p.value_dim;
        }
        macs as u64
    }

    /// Writes the complete result to the rows' outputs.
    pub(super) fn store<I: Isa, T: Element>(&mut self, call: &Call<'_, I, T>, head: Head, rows: &[u32]) {
        for (r, &row) in rows.iter().enumerate() {
            let (sum, values) = (self.sum + r, self.outputs + r * self.value_pitch);
            let sum = self.floats.slice(sum..sum + 1)[0];
            store_row(call, head, row, self.floats.slice(values..values + call.problem.value_dim), sum);
        }
    }

    /// Copies the partial result to `output`, for [`merge`].
    pub(super) fn store_partial(&mut self, rows: usize, value_dim: usize, output: &mut [f32]) {
        for (r, output) in output.chunks_exact_mut(value_dim + 2).take(rows).enumerate() {
            let (max, sum, values) = (self.max + r, self.sum + r, self.outputs + r * self.value_pitch);
            output[0] = self.floats.slice(max..max + 1)[0];
            output[1] = self.floats.slice(sum..sum + 1)[0];
            output[2..].copy_from_slice(self.floats.slice(values..values + value_dim));
        }
    }
}

fn fill_bias<I: Isa, T: Element>(call: &Call<'_, I, T>, head: Head, row: u32, key: usize, scores: &mut [f32]) {
    match call.bias(head, row, key) {
        None => scores.fill(0.0),
        Some((bias, 0)) => scores.fill(Log2Bias::of(bias[0].to_f32())),
        Some((bias, _)) => {
            for (score, bias) in scores.iter_mut().zip(bias) {
                *score = Log2Bias::of(bias.to_f32());
            }
        }
    }
}

/// Writes a row: gate * values / sum of weights, or 0 if the sum is 0 because every key is masked.
fn store_row<I: Isa, T: Element>(call: &Call<'_, I, T>, head: Head, row: u32, values: &[f32], sum: f32) {
    if sum == 0.0 {
        return call.clear(head, row..row + 1);
    }
    let factor = call.gate(head, row) / sum;
    let output = call.output(head, row);
    for (d, value) in values.iter().enumerate() {
        // SAFETY: a row's output has value_dim = values.len() elements and belongs to this work item.
        unsafe { output.add(d).write(T::from_f32(value * factor)) }
    }
}

/// Combines a head's partial results, `parts` times [`ROWS`] rows of (largest score, sum, values), and writes its
/// rows.
pub(super) fn merge<I: Isa, T: Element>(call: &Call<'_, I, T>, head: Head, rows: &[u32], parts: &mut [f32]) {
    let row_len = call.problem.value_dim + 2;
    for (r, &row) in rows.iter().enumerate() {
        let (total, others) = parts.split_at_mut(ROWS * row_len);
        let total = &mut total[r * row_len..(r + 1) * row_len];
        for part in others.chunks_exact(ROWS * row_len) {
            let part = &part[r * row_len..(r + 1) * row_len];
            let max = if part[0] > total[0] { part[0] } else { total[0] };
            let decay = |old: f32| if old == max { 1.0 } else { (old - max).exp2() };
            let (ours, theirs) = (decay(total[0]), decay(part[0]));
            for (total, part) in total[1..].iter_mut().zip(&part[1..]) {
                *total = *total * ours + part * theirs;
            }
            total[0] = max;
        }
        store_row(call, head, row, &total[2..], total[1]);
    }
}
