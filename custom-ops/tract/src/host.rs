//! Implements the kernels' [`Host`] with a pool of ours or tract's executor.

use crate::pool::{self, Shared};
use moh_cpu::{Host, Threads};
use std::ptr::NonNull;
use std::sync::Arc;
use tract_linalg::multithread::{Executor, current_tract_executor};

/// The pool that the calling thread runs in, or else tract's current executor. Memory comes from the global allocator, like tract's own.
pub(crate) struct TractHost {
    pool: Option<Arc<Shared>>,
    executor: Executor,
    allocator: Threads,
}

impl TractHost {
    pub(crate) fn current() -> TractHost {
        let pool = pool::current();
        let executor = if pool.is_some() { Executor::SingleThread } else { current_tract_executor() };
        TractHost { pool, executor, allocator: Threads::new(1) }
    }
}

// SAFETY: allocate and release are those of `Threads`, which fulfils the contract.
unsafe impl Host for TractHost {
    fn parallelism(&self) -> usize {
        match (&self.pool, &self.executor) {
            (Some(pool), _) => pool.threads(),
            (None, executor) => threads_of(executor),
        }
    }

    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if let Some(pool) = &self.pool {
            return pool.parallel_for(tasks, task);
        }
        match &self.executor {
            Executor::MultiThread(pool) if tasks > 1 => pool.scope(|scope| spread(scope, tasks, task)),
            Executor::RayonGlobal if tasks > 1 => rayon::scope(|scope| spread(scope, tasks, task)),
            _ => (0..tasks).for_each(task),
        }
    }

    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        self.allocator.allocate(bytes)
    }

    unsafe fn release(&self, ptr: NonNull<u8>, bytes: usize) {
        // SAFETY: the caller fulfils the contract of `Host::release`, which is the same.
        unsafe { self.allocator.release(ptr, bytes) }
    }
}

fn threads_of(executor: &Executor) -> usize {
    match executor {
        Executor::SingleThread => 1,
        Executor::MultiThread(pool) => pool.current_num_threads(),
        Executor::RayonGlobal => rayon::current_num_threads(),
    }
}

/// Spawns the tasks; the calling thread runs the first one itself.
fn spread<'scope>(scope: &rayon::Scope<'scope>, tasks: usize, task: &'scope (dyn Fn(usize) + Sync)) {
    for i in 1..tasks {
        scope.spawn(move |_| task(i));
    }
    if tasks > 0 {
        task(0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once() {
        for (threads, tasks) in [(1, 0), (1, 5), (3, 0), (3, 1), (3, 3), (3, 50)] {
            let host =
                TractHost { pool: None, executor: crate::executor(threads).unwrap(), allocator: Threads::new(1) };
            assert_eq!(host.parallelism(), threads);
            let calls: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            host.parallel_for(tasks, &|i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
        }
    }
}
