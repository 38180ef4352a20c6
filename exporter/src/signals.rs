//! INT, TERM and HUP: what an unfinished export has prepared is removed, and the program ends as the signal would have ended it.

use moh_export::staging;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Waits for the signals in another thread. Where the system refuses, they end the program as ever, and the next export cleans up.
pub(crate) fn clean_up() {
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| ignored(signal) == Some(false));
    let Ok(mut signals) = Signals::new(wanted) else { return };
    std::thread::spawn(move || {
        if let Some(signal) = signals.forever().next() {
            let _until_the_end = staging::abandon();
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
