//! When a request is given up.

use crate::problem::{Kind, Problem};
use std::time::{Duration, Instant};

/// A request's time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline {
    pub(crate) began: Instant,
    pub(crate) end: Instant,
}

impl Deadline {
    /// From now on.
    pub(crate) fn after(time: Duration) -> Deadline {
        let began = Instant::now();
        Deadline { began, end: began + time }
    }

    pub(crate) fn has_passed(&self) -> bool {
        Instant::now() >= self.end
    }

    /// The time until then.
    pub(crate) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    fn seconds(&self) -> f64 {
        (self.end - self.began).as_secs_f64()
    }

    /// For a request whose body did not come.
    pub(crate) fn arrived(&self) -> Problem {
        let message = format!("the body did not come within the {} s that a request may take", self.seconds());
        Problem::new(Kind::Slow, message)
    }

    /// For a request that did not get its turn.
    pub(crate) fn waited(&self) -> Problem {
        let message = format!("the model was busy for all of the {} s that a request may take", self.seconds());
        Problem::new(Kind::Overdue, message)
    }

    /// For one that did not come to its end.
    pub(crate) fn ran(&self) -> Problem {
        Problem::new(Kind::Deadline, format!("not done after the {} s that a request may take", self.seconds()))
    }
}
