//! Distribution of work items over the host's workers.

use crate::host::Host;
use moh_operators::Error;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Memory to which workers write disjoint parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: every element belongs to one work item, and every item to one worker.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The elements of one work item.
    ///
    /// # Safety
    /// There are `start + len` elements, and no other item uses these.
    pub(crate) unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Processes `items` work items. Every worker first makes its memory with `make`; `work` returns an item's number of
/// multiply-accumulate operations. Returns their sum.
///
/// Items that are processed at the same time are far apart, as if each worker had a range of them: neighbours often write to neighbouring
/// places, and what one processor reads ahead is then in the way of another that writes there. (Two threads took 0.97 of the time of a DiT.)
///
/// # Errors
/// As `make`; some items are then not processed.
pub(crate) fn share<M>(
    host: &dyn Host,
    items: usize,
    make: impl Fn() -> Result<M, Error> + Sync,
    work: impl Fn(&mut M, usize) -> u64 + Sync,
) -> Result<u64, Error> {
    if items == 0 {
        return Ok(0);
    }
    let (next, macs, failure) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let workers = host.parallelism().max(1).min(items);
    let drain = || {
        let mut memory = None;
        let mut done = 0;
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                break;
            }
            let memory = match &mut memory {
                Some(memory) => memory,
                none => none.insert(make()?),
            };
            done += work(memory, spread(item, items, workers));
        }
        macs.fetch_add(done, Ordering::Relaxed);
        Ok(())
    };
    host.parallel_for(workers, &|_| {
        if let Err(error) = drain() {
            next.store(items, Ordering::Relaxed);
            *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(macs.into_inner()),
    }
}

/// The `turn`th item in an order that takes one of each of `workers` ranges of the items in turn.
fn spread(turn: usize, items: usize, workers: usize) -> usize {
    let (range, place) = (turn % workers, turn / workers);
    range * (items / workers) + range.min(items % workers) + place
}

/// Span width for cutting `columns` into spans: a multiple of `unit`, at most `most` columns (but at least one unit),
/// and small enough that spans times `others` items keep `workers` busy.
pub(crate) fn span(columns: usize, unit: usize, most: usize, others: usize, workers: usize) -> usize {
    /// Work items per worker, for load balancing.
    const ITEMS_PER_WORKER: usize = 8;
    let wanted = match workers {
        0 | 1 => 1,
        _ => (workers * ITEMS_PER_WORKER).div_ceil(others.max(1)),
    };
    columns.div_ceil(unit).div_ceil(wanted).clamp(1, (most / unit).max(1)) * unit
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn items_of_a_time_are_apart_and_each_has_its_turn() {
        let order: Vec<usize> = (0..7).map(|turn| spread(turn, 7, 3)).collect();
        assert_eq!(order, [0, 3, 5, 1, 4, 6, 2]);
        for (items, workers) in [(1, 1), (5, 1), (16, 4), (17, 4), (3, 3), (100, 64)] {
            let mut order: Vec<usize> = (0..items).map(|turn| spread(turn, items, workers)).collect();
            order.sort_unstable();
            assert!(order.into_iter().eq(0..items), "{items} items, {workers} workers");
        }
    }
}
