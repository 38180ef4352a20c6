//! Implements the kernels' [`Host`] with the session's threads and memory.

use crate::context::KernelContext;
use crate::objects::{Allocator, CpuMemory};
use crate::threads::{Attendance, SessionThreads};
use moh_cpu::{Host, Precision};
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

/// The session's resources during one call of a kernel.
pub(crate) struct SessionHost<'c> {
    context: &'c KernelContext<'c>,
    memory: &'c CpuMemory,
    threads: &'c SessionThreads,
    precision: Precision,
    /// Created at the kernel's first allocation; `None` if the host has no allocator.
    allocator: OnceLock<Option<Allocator>>,
}

impl<'c> SessionHost<'c> {
    pub(crate) fn new(
        context: &'c KernelContext<'c>,
        memory: &'c CpuMemory,
        threads: &'c SessionThreads,
        precision: Precision,
    ) -> SessionHost<'c> {
        SessionHost { context, memory, threads, precision, allocator: OnceLock::new() }
    }

    fn allocator(&self) -> Option<&Allocator> {
        self.allocator.get_or_init(|| self.context.allocator(self.memory).ok()).as_ref()
    }
}

// SAFETY: memory comes from the session's allocator, has the requested size, and is released once.
unsafe impl Host for SessionHost<'_> {
    fn parallelism(&self) -> usize {
        self.threads.tasks()
    }

    /// A panic in a task, or a failure of the host's threads, is raised in the caller after all tasks are done.
    fn parallel_for(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 {
            return (0..tasks).for_each(task);
        }
        let job = Job { task, attendance: Attendance::new(self.threads), panic: Mutex::new(None) };
        // SAFETY: the job outlives the call, which returns after the last task; it is only shared by reference.
        let done = unsafe { self.context.parallel_for(tasks, run_task, (&raw const job).cast_mut().cast()) };
        if let Some(payload) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(payload);
        }
        if let Err(status) = done {
            resume_unwind(Box::new(format!("the threads of the session failed: {status}")));
        }
        job.attendance.close(tasks);
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn allocate(&self, bytes: usize) -> Option<NonNull<u8>> {
        self.allocator()?.allocate(bytes)
    }

    unsafe fn release(&self, memory: NonNull<u8>, _: usize) {
        if let Some(allocator) = self.allocator() {
            // SAFETY: the memory is from `allocate` and not yet released, by the caller's contract.
            unsafe { allocator.release(memory) }
        }
    }
}

struct Job<'t> {
    task: &'t (dyn Fn(usize) + Sync),
    attendance: Attendance<'t>,
    /// The panic of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

unsafe extern "C" fn run_task(job: *mut c_void, index: usize) {
    // SAFETY: `parallel_for` passes its job, which lives until the last task is done.
    let job = unsafe { &*job.cast::<Job<'_>>() };
    let run = || {
        job.attendance.arrive();
        (job.task)(index);
    };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(run)) {
        job.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
    }
}
