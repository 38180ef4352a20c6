//! The server's log: a line an event, on standard error.

use tracing::level_filters::LevelFilter;

/// Writes the log from now on, as text or as JSON; `false` where somebody else has set up a log before.
pub fn init(json: bool, quiet: bool) -> bool {
    let level = if quiet { LevelFilter::ERROR } else { LevelFilter::INFO };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_writer(std::io::stderr);
    if json { builder.json().flatten_event(true).try_init().is_ok() } else { builder.try_init().is_ok() }
}
