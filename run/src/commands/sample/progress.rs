//! A progress bar on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};

/// What the bar shows: the steps that are done, and the time left.
const TEMPLATE: &str = "[{bar:30}] {pos}/{len} steps, {eta} left";

/// A bar for `total` steps on standard error, which goes away when it is dropped; nothing where that is no terminal.
pub(super) fn bar(total: usize, quiet: bool) -> ProgressBar {
    on(if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() }, total)
}

fn on(target: ProgressDrawTarget, total: usize) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(total as u64), target)
        .with_style(style.progress_chars("#."))
        .with_finish(ProgressFinish::AndClear)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use indicatif::TermLike;
    use std::io::Result;
    use std::sync::{Arc, Mutex};

    /// A terminal that keeps what is written to it, `<` where a line is cleared.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn append(&self, text: &str) -> Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> Result<()> {
            self.append(text)
        }
        fn write_str(&self, text: &str) -> Result<()> {
            self.append(text)
        }
        fn clear_line(&self) -> Result<()> {
            self.append("<")
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn steps_are_shown_and_the_bar_goes_away() {
        let screen = Screen::default();
        let bar = on(ProgressDrawTarget::term_like(Box::new(screen.clone())), 40);
        bar.set_position(10);
        bar.force_draw();
        let shown = screen.0.lock().unwrap().clone();
        let expected = format!("[{}{}] 10/40 steps, ", "#".repeat(7), ".".repeat(23));
        assert!(shown.contains(&expected) && shown.contains(" left"), "{shown}");
        drop(bar);
        let after = screen.0.lock().unwrap()[shown.len()..].to_owned();
        assert!(after.contains('<') && !after.contains("steps"), "{after}");
    }

    #[test]
    fn nothing_is_shown_where_nobody_looks() {
        assert!(bar(40, true).is_hidden());
    }
}
