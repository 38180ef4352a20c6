//! A progress bar on a terminal.

use std::io::{IsTerminal, Write};
use std::time::Instant;

const WIDTH: usize = 30;

/// A bar on standard error; nothing where that is no terminal.
pub(super) struct Progress {
    total: usize,
    began: Instant,
    shown: bool,
}

impl Progress {
    pub(super) fn new(total: usize, quiet: bool) -> Progress {
        Progress { total, began: Instant::now(), shown: !quiet && std::io::stderr().is_terminal() }
    }

    /// Shows that `done` steps are done.
    pub(super) fn show(&mut self, done: usize) {
        if self.shown {
            // What cannot be shown is no reason to stop.
            let _ = write!(std::io::stderr(), "\r{}", self.line(done, self.began.elapsed().as_secs_f64()));
        }
    }

    fn line(&self, done: usize, seconds: f64) -> String {
        let filled = WIDTH * done / self.total.max(1);
        let left = seconds / done.max(1) as f64 * self.total.saturating_sub(done) as f64;
        let (bar, rest) = ("#".repeat(filled), ".".repeat(WIDTH - filled.min(WIDTH)));
        format!("[{bar}{rest}] {done}/{} steps, {left:.0} s left ", self.total)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r{:1$}\r", "", self.line(self.total, 0.0).len() + 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_left() {
        let progress = Progress { total: 40, began: Instant::now(), shown: false };
        assert_eq!(progress.line(10, 5.0), format!("[{}{}] 10/40 steps, 15 s left ", "#".repeat(7), ".".repeat(23)));
        assert_eq!(progress.line(40, 20.0), format!("[{}] 40/40 steps, 0 s left ", "#".repeat(30)));
    }
}
