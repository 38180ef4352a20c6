//! Estimates a session's number of threads, which API 17 does not expose, by counting the threads that take tasks.
//!
//! With many more tasks than threads, kernels cut their work too finely; with fewer, threads are idle. The first call
//! therefore uses one task per processor, and later calls twice the number of threads seen.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// After this time, every idle thread of a session has woken up and taken a task.
const ALL_AWAKE: Duration = Duration::from_millis(1);

/// The number of tasks for calls of one node.
pub(crate) struct SessionThreads {
    limit: usize,
    tasks: AtomicUsize,
}

impl SessionThreads {
    /// Starts with the number of processors that this process may use.
    pub(crate) fn new() -> SessionThreads {
        static PROCESSORS: OnceLock<usize> = OnceLock::new();
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        SessionThreads::at_most(*PROCESSORS.get_or_init(processors))
    }

    fn at_most(limit: usize) -> SessionThreads {
        SessionThreads { limit, tasks: AtomicUsize::new(limit) }
    }

    /// The number of tasks to request.
    pub(crate) fn tasks(&self) -> usize {
        self.tasks.load(Relaxed)
    }

    /// Records that `threads` threads took `tasks` tasks within `time`.
    fn learn(&self, threads: usize, tasks: usize, time: Duration) {
        let worth = (2 * threads).min(self.limit);
        // If each thread took one task, or the job was too short for threads to wake up, there may be more threads.
        if threads < tasks && time >= ALL_AWAKE {
            self.tasks.store(worth, Relaxed);
        } else {
            self.tasks.fetch_max(worth, Relaxed);
        }
    }
}

/// Counts the threads that take tasks of one job.
pub(crate) struct Attendance<'s> {
    session: &'s SessionThreads,
    job: u64,
    threads: AtomicUsize,
    start: Instant,
}

thread_local! {
    /// The last job of which this thread took a task.
    static LAST_JOB: Cell<u64> = const { Cell::new(0) };
}

impl<'s> Attendance<'s> {
    pub(crate) fn new(session: &'s SessionThreads) -> Attendance<'s> {
        static JOBS: AtomicU64 = AtomicU64::new(0);
        let job = JOBS.fetch_add(1, Relaxed) + 1;
        Attendance { session, job, threads: AtomicUsize::new(0), start: Instant::now() }
    }

    /// Called by each thread when it takes a task.
    pub(crate) fn arrive(&self) {
        if LAST_JOB.replace(self.job) != self.job {
            self.threads.fetch_add(1, Relaxed);
        }
    }

    /// Ends the job after all `tasks` tasks are done.
    pub(crate) fn close(self, tasks: usize) {
        self.session.learn(self.threads.into_inner(), tasks, self.start.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(50);
    const LONG: Duration = Duration::from_millis(5);

    #[test]
    fn long_calls_determine_the_number_of_tasks() {
        let session = SessionThreads::at_most(64);
        assert_eq!(session.tasks(), 64);
        session.learn(3, 64, SHORT);
        assert_eq!(session.tasks(), 64, "the others may have been asleep");
        session.learn(10, 10, LONG);
        assert_eq!(session.tasks(), 64, "there was no task for an eleventh thread");
        session.learn(4, 64, LONG);
        assert_eq!(session.tasks(), 8);
        session.learn(1, 8, LONG);
        assert_eq!(session.tasks(), 2);
    }

    #[test]
    fn number_of_tasks_grows_again_after_a_busy_period() {
        let session = SessionThreads::at_most(16);
        session.learn(1, 16, LONG);
        assert_eq!(session.tasks(), 2);
        for expected in [4, 8, 16, 16] {
            let tasks = session.tasks();
            session.learn(tasks, tasks, SHORT);
            assert_eq!(session.tasks(), expected);
        }
    }

    #[test]
    fn each_thread_is_counted_once_per_job() {
        let session = SessionThreads::at_most(64);
        for _ in 0..2 {
            let attendance = Attendance::new(&session);
            std::thread::scope(|scope| {
                let worker = || (0..5).for_each(|_| attendance.arrive());
                scope.spawn(worker);
                scope.spawn(worker);
                worker();
            });
            assert_eq!(attendance.threads.load(Relaxed), 3);
            std::thread::sleep(ALL_AWAKE);
            attendance.close(15);
            assert_eq!(session.tasks(), 6);
        }
    }
}
