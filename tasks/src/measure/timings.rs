//! Times of repeated runs.

use std::time::Duration;

/// Times, in ascending order.
#[derive(Debug, Clone, Default)]
pub struct Timings(Vec<Duration>);

impl Timings {
    /// Adds a time.
    pub fn add(&mut self, time: Duration) {
        let at = self.0.partition_point(|&t| t <= time);
        self.0.insert(at, time);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The smallest time that at least the share `p` (0 to 1) of all times does not exceed; zero where there is none.
    pub fn percentile(&self, p: f64) -> Duration {
        let rank = (p * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).or(self.0.last()).copied().unwrap_or_default()
    }

    /// The shortest time.
    pub fn min(&self) -> Duration {
        self.percentile(0.0)
    }

    /// The middle one.
    pub fn median(&self) -> Duration {
        self.percentile(0.5)
    }

    /// All of them together.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let mut timings = Timings::default();
        assert_eq!((timings.count(), timings.median(), timings.percentile(0.99)), (0, Duration::ZERO, Duration::ZERO));
        for ms in [30, 10, 20, 40] {
            timings.add(Duration::from_millis(ms));
        }
        let of = |p| timings.percentile(p).as_millis();
        assert_eq!([of(0.0), of(0.25), of(0.26), of(0.5), of(0.95), of(1.0)], [10, 10, 20, 20, 40, 40]);
        assert_eq!((timings.min(), timings.total()), (Duration::from_millis(10), Duration::from_millis(100)));
        for ms in 1..=1000 {
            timings.add(Duration::from_millis(ms));
        }
        let of = |p| timings.percentile(p).as_millis();
        assert_eq!((timings.count(), of(0.5), of(0.99)), (1004, 498, 990));
    }
}
