//! The work plan: the selected rows of every KV head, cut into work items.

use super::row_step::ROWS;
use moh_operators::Error;
use moh_operators::routed_attention::Problem;
use moh_operators::{Definition, RoutedAttention};
use std::ops::Range;

/// The selected (token, head) pairs, grouped by (batch, KV head). A row is `token * group_size + head within the
/// group`.
pub(super) struct Selection {
    /// Start of the rows of each (batch, KV head), and the end of the last.
    starts: Vec<usize>,
    rows: Vec<u32>,
}

impl Selection {
    /// Reads the gates. Rows are ascending.
    pub(super) fn new(p: &Problem, gates: &[f32]) -> Result<Selection, Error> {
        let (group, heads) = (p.group_size(), p.batch * p.kv_num_heads);
        if p.batch > 0 && p.q_len.checked_mul(group).is_none_or(|rows| u32::try_from(rows).is_err()) {
            return Err(Error::Shape {
                operator: RoutedAttention::NAME,
                input: "head_gates",
                expected: "fewer than 2^32 gates for one sequence and KV head".to_owned(),
                found: format!("({}, {}, {})", p.batch, p.q_len, p.num_heads),
            });
        }
        let mut starts: Vec<usize> = zeros(heads + 1)?;
        // One element more than the maximum: each row is written unconditionally, and the end advances if it is
        // selected (no mispredicted branch).
        let mut rows: Vec<u32> = zeros(gates.len() + 1)?;
        let mut count = 0;
        for head in 0..heads {
            let (batch, kv_head) = (head / p.kv_num_heads, head % p.kv_num_heads);
            let gates = &gates[batch * p.q_len * p.num_heads..(batch + 1) * p.q_len * p.num_heads];
            for (token, gates) in gates.chunks_exact(p.num_heads).enumerate() {
                for (member, &gate) in gates[kv_head * group..(kv_head + 1) * group].iter().enumerate() {
                    rows[count] = (token * group + member) as u32;
                    count += usize::from(gate != 0.0);
                }
            }
            starts[head + 1] = count;
        }
        Ok(Selection { starts, rows })
    }

    /// The rows of a (batch, KV head).
    pub(super) fn rows(&self, head: usize) -> &[u32] {
        &self.rows[self.starts[head]..self.starts[head + 1]]
    }

    /// Average number of rows per (batch, KV head), over those that have any.
    pub(super) fn mean_rows(&self) -> usize {
        let used = self.starts.windows(2).filter(|ends| ends[0] < ends[1]).count();
        self.starts.last().map_or(0, |rows| rows / used.max(1))
    }

    fn heads(&self) -> usize {
        self.starts.len() - 1
    }
}

fn zeros<N: Copy + Default>(len: usize) -> Result<Vec<N>, Error> {
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<N>()) })?;
    numbers.resize(len, N::default());
    Ok(numbers)
}

/// A work item. Items write disjoint parts of the output, and together all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    /// No row of this (batch, KV head) is selected.
    Zero { head: usize },
    /// A part of its rows, processed in tiles.
    Tiles { head: usize, part: usize, parts: usize },
    /// All of its rows, which are few, over a part of the keys. `slot` is the index among the heads whose keys are
    /// split.
    Rows { head: usize, part: usize, parts: usize, slot: usize },
}

impl Item {
    /// Index of its (batch, KV head).
    pub(super) fn head(self) -> usize {
        match self {
            Item::Zero { head } | Item::Tiles { head, .. } | Item::Rows { head, .. } => head,
        }
    }
}

/// All work items.
pub(super) struct Plan {
    pub(super) items: Vec<Item>,
    /// Number of heads whose keys are split.
    pub(super) slots: usize,
    /// The most partial results of a split head.
    pub(super) parts: usize,
    /// Maximum rows per tiled item.
    pub(super) chunk: usize,
}

/// Minimum keys per part of a split head.
const MIN_KEYS: usize = 256;
/// Work items per worker, for load balancing.
const ITEMS_PER_WORKER: usize = 4;

impl Plan {
    /// `length` is the number of keys that a head's rows see; `tile` the number of rows of a register tile, `chunk` the
    /// number of rows that a worker's memory holds.
    pub(super) fn new(
        selection: &Selection,
        length: impl Fn(usize) -> usize,
        tile: usize,
        chunk: usize,
        workers: usize,
    ) -> Plan {
        let wanted = workers * ITEMS_PER_WORKER;
        let (mut tiled, mut few, mut most, mut keys) = (0, 0, 0, 0);
        for head in 0..selection.heads() {
            match selection.rows(head).len() {
                0 => {}
                rows if rows <= ROWS => {
                    few += 1;
                    keys += length(head);
                }
                rows => {
                    tiled += rows.div_ceil(tile);
                    most = rows.next_multiple_of(tile).max(most);
                }
            }
        }
        let chunk = chunk.min(most);
        let chunk = match workers {
            1 => chunk,
            _ => (tiled.div_ceil(wanted) * tile).min(chunk),
        };
        // Longer heads are split into more parts.
        let parts_of = |head: usize| match workers {
            1 => 1,
            _ if tiled > 0 || few >= wanted || keys == 0 => 1,
            _ => (wanted * length(head)).div_ceil(keys).min(length(head) / MIN_KEYS).max(1),
        };
        let mut plan = Plan { items: Vec::new(), slots: 0, parts: 1, chunk };
        for head in 0..selection.heads() {
            match selection.rows(head).len() {
                0 => plan.items.push(Item::Zero { head }),
                rows if rows <= ROWS => {
                    let (slot, parts) = (plan.slots, parts_of(head));
                    plan.items.extend((0..parts).map(|part| Item::Rows { head, part, parts, slot }));
                    plan.slots += usize::from(parts > 1);
                    plan.parts = plan.parts.max(parts);
                }
                rows => {
                    let parts = rows.div_ceil(chunk);
                    // With a causal mask later rows see more keys; the longest items come first.
                    plan.items.extend((0..parts).rev().map(|part| Item::Tiles { head, part, parts }));
                }
            }
        }
        plan
    }
}

/// Part `part` of `parts` of `0 .. n`, cut at multiples of `step`.
pub(super) fn share(n: usize, step: usize, part: usize, parts: usize) -> Range<usize> {
    let units = n.div_ceil(step);
    let at = |part: usize| (units * part / parts * step).min(n);
    at(part)..at(part + 1)
}
