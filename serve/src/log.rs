//! The server's log: a line an event, on standard error.

use tracing::level_filters::LevelFilter;

/// Writes the log from now on, as text or as JSON; `false` where somebody else has set up a log before.
pub fn init(json: bool, quiet: bool) -> bool {
    let level = if quiet { LevelFilter::ERROR } else { LevelFilter::INFO };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_writer(std::io::stderr);
    // Its own errors go to standard error with a panic where that cannot be written, as on a full disk: requests must not fail for the log.
    let builder = builder.log_internal_errors(false);
    if json { builder.json().flatten_event(true).try_init().is_ok() } else { builder.try_init().is_ok() }
}
