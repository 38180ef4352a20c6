//! RoutedAttention on a CPU.
//!
//! Selected rows (query token, head) are collected per KV head and cut into work items (`plan`), which workers take
//! from a shared counter. Many rows are processed in register tiles with a running softmax (`tiles`, `step`); a few
//! rows, as in decoding, read keys and values in place, each once (`rows`, `row_step`).

mod call;
// On targets without matrix units some of this is unreachable.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables, unreachable_code))]
mod matrix;
mod matrix_pack;
mod matrix_softmax;
mod plan;
mod row_step;
mod rows;
mod step;
mod tiles;

use crate::host::{Host, Scratch};
use crate::isa::{Isa, MatrixUnit};
use crate::kernel::{self, CpuOperator, Work};
use crate::terms::{terms_at, unit_for};
pub(crate) use call::Span;
use call::{Call, Head, Output};
use matrix::MatrixMemory;
use moh_operators::routed_attention::{Inputs, Problem};
use moh_operators::{Element, Error, Float, RoutedAttention};
use plan::{Item, Plan, Selection, share};
use row_step::ROWS;
use rows::RowMemory;
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use tiles::{TileMemory, Tiling};

impl CpuOperator for RoutedAttention {
    type Output<T: Element> = T;

    fn uses(_unit: MatrixUnit) -> bool {
        true
    }

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        let kernel::Call { isa, unit, problem, inputs, output, host } = call;
        // An empty output allows dimensions of any size; otherwise memory bounds them.
        if output.is_empty() {
            return Ok(Work::default());
        }
        let Inputs { query, key, value, head_gates: gates, attn_bias: bias } = inputs;
        let spans = vec![Span::of(problem); problem.batch];
        attend(isa, unit, problem, Tensors { query, key, value, gates, bias, spans: &spans }, output, host)
    }
}

/// The inputs of a call, and what each sequence's queries see.
pub(crate) struct Tensors<'a, T> {
    pub(crate) query: &'a [T],
    pub(crate) key: &'a [T],
    pub(crate) value: &'a [T],
    pub(crate) gates: &'a [f32],
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) spans: &'a [Span],
}

/// Attention of a validated call; the lengths of the slices match `problem`.
pub(crate) fn attend<I: Isa, T: Element>(
    isa: I,
    unit: Option<MatrixUnit>,
    problem: &Problem,
    tensors: Tensors<'_, T>,
    output: &mut [T],
    host: &dyn Host,
) -> Result<Work, Error> {
    let Tensors { query, key, value, gates, bias, spans } = tensors;
    let (group_size, output) = (problem.group_size() as u32, Output(output.as_mut_ptr()));
    execute(&Call { isa, problem, group_size, query, key, value, gates, bias, spans, output }, host, unit)
}

/// Partial results of heads whose keys are split. Workers write disjoint parts.
struct Partial(*mut f32);
// SAFETY: every part of every slot belongs to one item, and every item to one worker.
unsafe impl Sync for Partial {}

fn execute<I: Isa, T: Element>(
    call: &Call<'_, I, T>,
    host: &dyn Host,
    unit: Option<MatrixUnit>,
) -> Result<Work, Error> {
    let p = call.problem;
    let selection = Selection::new(p, call.gates)?;
    let terms = terms_at(host.precision(), T::FLOAT);
    let worth_splitting = T::FLOAT == Float::BF16 || selection.mean_rows() >= matrix::ROWS_TO_SPLIT_KEYS_FOR;
    let unit = unit_for::<T>(unit, host.precision()).filter(|_| worth_splitting && (p.scale * LOG2_E).is_finite());
    let unit = unit.map(|unit| (unit, terms));
    let tiling = if unit.is_some() { matrix::tiling(p, terms) } else { Tiling::new::<I>(p) };
    let workers = host.parallelism().max(1);
    let length = |head: usize| call.length(call.head(head).batch);
    let plan = Plan::new(&selection, length, tiling.width, tiling.chunk, workers);
    let tiling = Tiling { chunk: plan.chunk, ..tiling };
    let part_len = ROWS * (p.value_dim + 2);
    let mut partial = Scratch::new::<f32>(host, plan.slots.saturating_mul(plan.parts).saturating_mul(part_len))?;
    let partial_base = Partial(partial.as_mut_slice::<f32>().as_mut_ptr());

    let (parts, partial_base) = (plan.parts, &partial_base);
    let worker = Worker { call, host, unit, selection: &selection, tiling, partial: partial_base, parts, part_len };
    let (next, macs, failure) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let take = || plan.items.get(next.fetch_add(1, Ordering::Relaxed)).copied();
    host.parallel_for(workers.min(plan.items.len()), &|_| match worker.drain(take) {
        Ok(done) => {
            macs.fetch_add(done, Ordering::Relaxed);
        }
        Err(error) => {
            // Results are not used after an error, so the remaining items are skipped.
            next.store(plan.items.len(), Ordering::Relaxed);
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    for item in &plan.items {
        if let Item::Rows { head, part: 0, parts, slot } = *item
            && parts > 1
        {
            let start = slot * plan.parts;
            let parts = &mut partial.as_mut_slice::<f32>()[start * part_len..(start + parts) * part_len];
            rows::merge(call, call.head(head), selection.rows(head), parts);
        }
    }
    Ok(Work { macs: macs.into_inner() })
}

struct Worker<'a, I, T> {
    call: &'a Call<'a, I, T>,
    host: &'a dyn Host,
    /// Used by tiles, with the number of bf16 terms that a number has.
    unit: Option<(MatrixUnit, usize)>,
    selection: &'a Selection,
    tiling: Tiling,
    partial: &'a Partial,
    /// Partial results that each split head has room for.
    parts: usize,
    part_len: usize,
}

/// A worker's memory, allocated on first use.
#[derive(Default)]
struct Workspace<'h> {
    rows: Option<RowMemory<'h>>,
    tiles: Option<TileMemory<'h>>,
    matrix: Option<MatrixMemory<'h>>,
}

impl<I: Isa, T: Element> Worker<'_, I, T> {
    /// Processes the items returned by `next` until it returns `None`.
    fn drain(&self, mut next: impl FnMut() -> Option<Item>) -> Result<u64, Error> {
        let mut memory = Workspace::default();
        let mut macs = 0;
        while let Some(item) = next() {
            self.clear_unselected(item);
            macs += self.compute(item, &mut memory)?;
        }
        Ok(macs)
    }

    fn compute<'h>(&'h self, item: Item, memory: &mut Workspace<'h>) -> Result<u64, Error> {
        let p = self.call.problem;
        match item {
            Item::Zero { .. } => Ok(0),
            Item::Tiles { .. } => {
                let spare = make(&mut memory.rows, || RowMemory::new(p, self.host))?;
                if let Some(unit) = self.unit {
                    let matrix =
                        make(&mut memory.matrix, || MatrixMemory::new(p, unit.1, self.tiling.chunk, self.host))?;
                    return Ok(matrix::attend(unit, self.call, self.head(item), self.rows(item), matrix, spare));
                }
                let tiles = make(&mut memory.tiles, || TileMemory::new(p, self.tiling, self.host))?;
                Ok(tiles::attend(self.call, self.head(item), self.rows(item), tiles, spare))
            }
            Item::Rows { part, parts, slot, .. } => {
                let memory = make(&mut memory.rows, || RowMemory::new(p, self.host))?;
                let (head, rows) = (self.head(item), self.rows(item));
                let macs = memory.attend(self.call, head, rows, share(self.call.length(head.batch), 1, part, parts));
                if parts == 1 {
                    memory.store(self.call, head, rows);
                } else {
                    let start = (slot * self.parts + part) * self.part_len;
                    // SAFETY: the memory has part_len floats for each part of each slot; this part belongs to this
                    // item.
                    let output = unsafe { std::slice::from_raw_parts_mut(self.partial.0.add(start), self.part_len) };
                    memory.store_partial(rows.len(), p.value_dim, output);
                }
                Ok(macs)
            }
        }
    }

    fn head(&self, item: Item) -> Head {
        self.call.head(item.head())
    }

    /// The item's range of its head's selected rows.
    fn range(&self, item: Item) -> Range<usize> {
        let rows = self.selection.rows(item.head()).len();
        match item {
            Item::Tiles { part, parts, .. } => share(rows, self.tiling.width, part, parts),
            _ => 0..rows,
        }
    }

    fn rows(&self, item: Item) -> &[u32] {
        &self.selection.rows(item.head())[self.range(item)]
    }

    /// Writes 0 to the outputs of unselected rows, from the item's first row (for the first item: the head's) up to
    /// the next item's first row.
    fn clear_unselected(&self, item: Item) {
        if matches!(item, Item::Rows { part: 1.., .. }) {
            return;
        }
        let (rows, range) = (self.selection.rows(item.head()), self.range(item));
        let all = self.call.problem.q_len as u32 * self.call.group_size;
        let mut from = match range.start {
            0 => 0,
            start => rows[start],
        };
        let end = rows.get(range.end).copied().unwrap_or(all);
        for &row in rows[range].iter().chain([&end]) {
            self.call.clear(self.head(item), from..row);
            from = row + 1;
        }
    }
}

fn make<M>(memory: &mut Option<M>, new: impl FnOnce() -> Result<M, Error>) -> Result<&mut M, Error> {
    match memory {
        Some(memory) => Ok(memory),
        none => Ok(none.insert(new()?)),
    }
}
