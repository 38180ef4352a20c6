//! Threads for a run of many short kernels.
//!
//! A token takes a language model hundreds of products of a few microseconds to a millisecond each. Waking a thread takes as long as a
//! short one, so the threads of a [`Pool`] wait actively for a while after each, and the calling thread takes part.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::threads::ThreadsError;

/// How long a thread waits actively before it sleeps: longer than what lies between two kernels, or two tokens.
const ACTIVE: Duration = Duration::from_millis(1);
/// Looks at the job between two looks at the clock.
const LOOKS: usize = 64;
/// How long it keeps its processor meanwhile, although other threads may want it.
const GREEDY: Duration = Duration::from_micros(100);

/// Threads that kernels run on within [`Pool::run`].
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A call of [`Shared::parallel_for`], on its caller's stack.
struct Job<'a> {
    task: &'a (dyn Fn(usize) + Sync),
    /// Tasks that are not done.
    left: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    workers: usize,
    /// Number of the job, and of its tasks that nobody took, in the lower half. One word, so that a task is only ever taken from the job
    /// that a thread looked at.
    state: AtomicU64,
    /// The job while some of its tasks are not done.
    job: AtomicPtr<Job<'static>>,
    busy: AtomicBool,
    ended: AtomicBool,
    sleeping: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// The pool of the [`Pool::run`] that the calling thread is in.
pub(crate) fn current() -> Option<Arc<Shared>> {
    CURRENT.with_borrow(Clone::clone)
}

impl Pool {
    /// A pool of `threads` threads (at least 1), of which the caller of [`Pool::run`] is one.
    ///
    /// # Errors
    /// [`ThreadsError`] if the threads cannot be started.
    pub fn new(threads: usize) -> Result<Pool, ThreadsError> {
        let workers = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            workers,
            state: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            busy: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, threads: Vec::with_capacity(workers) };
        for i in 0..workers {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new().name(format!("moh-pool-{i}")).spawn(move || shared.work());
            pool.threads.push(thread.map_err(|e| ThreadsError { threads, reason: e.to_string() })?);
        }
        Ok(pool)
    }

    /// Calls `work`; the kernels that it runs on this thread use the pool's threads.
    pub fn run<R>(&self, work: impl FnOnce() -> R) -> R {
        /// Restores what was current, also after a panic.
        struct Entered(Option<Arc<Shared>>);
        impl Drop for Entered {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _entered = Entered(CURRENT.replace(Some(self.shared.clone())));
        work()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.shared.rouse();
        for thread in self.threads.drain(..) {
            // A worker catches its tasks' panics.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// The threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers + 1
    }

    /// Calls `task(i)` once for every `i < tasks`, possibly concurrently, and returns when all are done.
    pub(crate) fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let few = u32::try_from(tasks).ok().filter(|&tasks| tasks > 1 && self.workers > 0);
        let Some(few) = few.filter(|_| !self.busy.swap(true, Ordering::Acquire)) else {
            return (0..tasks).for_each(task);
        };
        let job = Job { task, left: AtomicUsize::new(tasks), panic: Mutex::new(None) };
        self.job.store((&raw const job).cast_mut().cast(), Ordering::Release);
        let number = (self.state.load(Ordering::Relaxed) >> 32).wrapping_add(1) << 32;
        self.state.store(number | u64::from(few), Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            self.rouse();
        }
        self.help(number);
        let mut looks = 0;
        while job.left.load(Ordering::Acquire) > 0 {
            looks += 1;
            if looks % LOOKS == 0 { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        self.busy.store(false, Ordering::Release);
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    fn rouse(&self) {
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.wake.notify_all();
    }

    /// Does tasks of job `number` (in the upper half) until none is left to take.
    fn help(&self, number: u64) {
        let take = |state: u64| (state & !LEFT == number && state & LEFT > 0).then(|| state - 1);
        loop {
            let job = self.job.load(Ordering::Acquire);
            let Ok(state) = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, take) else { return };
            // SAFETY: a task of job `number` was taken and is not done, so `parallel_for` has not returned, which the job lies on the
            // stack of. `job` is that job: it was stored before the number, and is not replaced until all tasks are done.
            let job = unsafe { &*job };
            let task = ((state & LEFT) - 1) as usize;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (job.task)(task))) {
                job.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            // The last use of the job, which may be gone afterwards.
            job.left.fetch_sub(1, Ordering::Release);
        }
    }

    /// A worker's life.
    fn work(&self) {
        loop {
            let began = Instant::now();
            let mut looks = 0;
            let state = loop {
                let state = self.state.load(Ordering::Acquire);
                if state & LEFT > 0 || self.ended.load(Ordering::Relaxed) {
                    break state;
                }
                looks += 1;
                if looks % LOOKS != 0 {
                    std::hint::spin_loop();
                } else if began.elapsed() > ACTIVE {
                    self.sleep();
                } else if began.elapsed() > GREEDY {
                    std::thread::yield_now();
                }
            };
            if self.ended.load(Ordering::Relaxed) {
                return;
            }
            self.help(state & !LEFT);
        }
    }

    /// Sleeps until there is a job, or the pool ends.
    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        while self.state.load(Ordering::SeqCst) & LEFT == 0 && !self.ended.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The lower half of [`Shared::state`].
const LEFT: u64 = u32::MAX as u64;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn calls(shared: &Shared, tasks: usize) {
        let calls: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        shared.parallel_for(tasks, &|i| {
            calls[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1), "{tasks} tasks");
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.shared.threads(), threads);
            for tasks in [0, 1, 2, 3, 50] {
                calls(&pool.shared, tasks);
            }
            (0..3000).for_each(|i| calls(&pool.shared, i % 7));
        }
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(3).unwrap();
        while pool.shared.sleeping.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        // Every task waits for the others, so all threads must take part.
        let barrier = std::sync::Barrier::new(3);
        pool.shared.parallel_for(3, &|_| {
            barrier.wait();
        });
    }

    #[test]
    fn tasks_and_callers_nest() {
        let pool = Pool::new(2).unwrap();
        pool.shared.parallel_for(4, &|_| calls(&pool.shared, 3));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..200).for_each(|_| calls(&pool.shared, 4)));
            }
        });
    }

    #[test]
    fn panic_reaches_the_caller_after_all_tasks() {
        let pool = Pool::new(2).unwrap();
        let done = AtomicUsize::new(0);
        let task = |i: usize| match i {
            1 => panic!("task 1"),
            _ => drop(done.fetch_add(1, Ordering::Relaxed)),
        };
        assert!(catch_unwind(AssertUnwindSafe(|| pool.shared.parallel_for(6, &task))).is_err());
        assert_eq!(done.load(Ordering::Relaxed), 5);
        calls(&pool.shared, 8);
    }

    #[test]
    fn current_only_within_a_run() {
        let pool = Pool::new(2).unwrap();
        assert!(current().is_none());
        assert_eq!(pool.run(|| current().map(|shared| shared.threads())), Some(2));
        assert!(current().is_none());
    }
}
