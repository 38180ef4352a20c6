//! INT, TERM and HUP: what a program does before one of them ends it.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Runs `clean_up` in another thread when a signal asks the program to end, which it then does as the signal would have ended it. What
/// `clean_up` returns lives until then: the guard of a lock keeps others from going on. Signals that the program was started to ignore
/// stay ignored. Where the system refuses, signals end the program without it.
pub fn before_signals_end<Guard>(clean_up: impl FnOnce() -> Guard + Send + 'static) {
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| ignored(signal) == Some(false));
    let Ok(mut signals) = Signals::new(wanted) else { return };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _until_the_end = clean_up();
            let _ = emulate_default_handler(signal);
            std::process::exit(128 + signal);
        }
    });
}

/// Which signals this program was started to ignore: nohup asks for that, and so do shells for jobs in the background.
/// `None`: not known.
fn ignored() -> impl Fn(i32) -> Option<bool> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Without procfs only nohup's signal may have been ignored unnoticed.
    move |signal| match mask {
        Some(mask) => Some(mask >> (signal - 1) & 1 == 1),
        None => (signal != SIGHUP).then_some(false),
    }
}
