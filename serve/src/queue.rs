//! Requests that wait for a model's threads.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A queue with room for a number of requests, for several threads.
pub(crate) struct Queue<T> {
    inner: Mutex<Inner<T>>,
    changed: Condvar,
    room: usize,
}

struct Inner<T> {
    waiting: VecDeque<T>,
    closed: bool,
}

/// What can be dropped unheard because nobody waits for it.
pub(crate) trait Abandoned {
    fn is_abandoned(&self) -> bool;
}

/// Why a request cannot wait here; it is dropped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    Closed,
}

impl<T: Abandoned> Queue<T> {
    pub(crate) fn new(room: usize) -> Queue<T> {
        let inner = Inner { waiting: VecDeque::new(), closed: false };
        Queue { inner: Mutex::new(inner), changed: Condvar::new(), room }
    }

    /// The content is whole after every statement, so a panic elsewhere leaves nothing to fear.
    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a request at the end.
    #[cfg(test)]
    pub(crate) fn push(&self, request: T) -> Result<(), Refused> {
        self.push_all(vec![request])
    }

    /// Puts requests at the end, all or none of them.
    pub(crate) fn push_all(&self, requests: Vec<T>) -> Result<(), Refused> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(Refused::Closed);
        }
        inner.waiting.retain(|waiting| !waiting.is_abandoned());
        if requests.len() > self.room.saturating_sub(inner.waiting.len()) {
            return Err(Refused::Full);
        }
        for request in requests {
            inner.waiting.push_back(request);
            self.changed.notify_one();
        }
        Ok(())
    }

    /// How many requests can wait.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Number of requests that somebody waits for.
    pub(crate) fn len(&self) -> usize {
        self.lock().waiting.iter().filter(|waiting| !waiting.is_abandoned()).count()
    }

    /// Takes the first request, if there is one that `fits`: one that does not is left to other threads, and the others wait behind it.
    pub(crate) fn pop_if(&self, fits: impl FnOnce(&T) -> bool) -> Option<T> {
        let mut inner = self.lock();
        inner.waiting.retain(|waiting| !waiting.is_abandoned());
        if inner.waiting.front().is_some_and(fits) { inner.waiting.pop_front() } else { None }
    }

    /// Takes the first request, waiting for one; `None`: the queue is closed and empty.
    pub(crate) fn pop(&self) -> Option<T> {
        let mut inner = self.lock();
        loop {
            inner.waiting.retain(|waiting| !waiting.is_abandoned());
            match inner.waiting.pop_front() {
                Some(request) => return Some(request),
                None if inner.closed => return None,
                None => inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Takes the first request that `fits`, waiting for one at most so long.
    pub(crate) fn pop_fitting(&self, fits: impl Fn(&T) -> bool, patience: Duration) -> Option<T> {
        let (end, mut inner) = (std::time::Instant::now() + patience, self.lock());
        loop {
            if let Some(at) = inner.waiting.iter().position(|waiting| !waiting.is_abandoned() && fits(waiting)) {
                return inner.waiting.remove(at);
            }
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() || inner.closed {
                // What does not fit here may fit another thread, whom the notice was for.
                if !inner.waiting.is_empty() {
                    self.changed.notify_one();
                }
                return None;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes no more requests; those that wait can still be taken.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Drops what waits.
    pub(crate) fn clear(&self) {
        self.lock().waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::Arc;

    #[derive(Debug, PartialEq)]
    struct Request(i32, bool);

    impl Abandoned for Request {
        fn is_abandoned(&self) -> bool {
            self.1
        }
    }

    #[test]
    fn a_full_queue_refuses_and_abandoned_requests_take_no_room() {
        let queue = Queue::new(2);
        queue.push(Request(1, false)).unwrap();
        queue.push(Request(2, true)).unwrap();
        assert_eq!(queue.len(), 1);
        queue.push(Request(3, false)).unwrap();
        assert_eq!(queue.push(Request(4, false)), Err(Refused::Full));
        assert_eq!(queue.pop_if(|request| request.0 != 1), None);
        assert_eq!(
            (queue.pop(), queue.pop_if(|_| true), queue.pop_if(|_| true)),
            (Some(Request(1, false)), Some(Request(3, false)), None)
        );
    }

    #[test]
    fn requests_that_come_together_have_room_together_or_are_refused() {
        let queue = Queue::new(3);
        queue.push(Request(1, false)).unwrap();
        let three = (2..5).map(|i| Request(i, false)).collect();
        assert_eq!((queue.push_all(three), queue.len()), (Err(Refused::Full), 1));
        queue.push_all((5..7).map(|i| Request(i, false)).collect()).unwrap();
        assert_eq!((queue.room(), queue.len()), (3, 3));
        assert_eq!([1, 5, 6].map(|i| queue.pop() == Some(Request(i, false))), [true; 3]);
    }

    #[test]
    fn what_waits_when_the_queue_is_closed_is_still_served() {
        let queue = Arc::new(Queue::new(2));
        let waiting = std::thread::spawn({
            let queue = queue.clone();
            move || (queue.pop(), queue.pop())
        });
        queue.push(Request(1, false)).unwrap();
        queue.close();
        assert_eq!(waiting.join().unwrap(), (Some(Request(1, false)), None));
        assert_eq!(queue.push(Request(2, false)), Err(Refused::Closed));
    }

    #[test]
    fn all_that_wait_hear_that_the_queue_is_closed() {
        let queue = Arc::new(Queue::<Request>::new(1));
        let (done, ended) = std::sync::mpsc::channel();
        for _ in 0..3 {
            let (queue, done) = (queue.clone(), done.clone());
            std::thread::spawn(move || done.send(queue.pop()).unwrap());
        }
        // Long enough that they wait, mostly; if one does not yet, it is not woken, but sees it.
        std::thread::sleep(Duration::from_millis(100));
        queue.close();
        for _ in 0..3 {
            assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok(None));
        }
    }

    #[test]
    fn fitting_requests_are_taken_out_of_turn() {
        let queue = Queue::new(4);
        (1..4).for_each(|i| queue.push(Request(i, false)).unwrap());
        assert_eq!(queue.pop_fitting(|r| r.0 == 2, Duration::ZERO), Some(Request(2, false)));
        assert_eq!(queue.pop_fitting(|r| r.0 == 7, Duration::from_millis(1)), None);
        assert_eq!(queue.len(), 2);
    }
}
