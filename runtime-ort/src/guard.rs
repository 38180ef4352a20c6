//! Panics of libraries as errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is an error to its caller, so that nothing is to be printed.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What `work` gives, or what it panicked with. For libraries that panic on malformed files; what they hold must not be used again then.
///
/// # Errors
/// The panic's message.
pub fn guard<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                usual(panic);
            }
        }));
    });
    let before = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(before);
    result.map_err(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        message.or(panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]
    use super::*;

    #[test]
    fn panics_are_errors_also_within_each_other() {
        assert_eq!(guard(|| 7), Ok(7));
        let inner = || guard(|| -> i32 { panic!("inner {}", 1) });
        assert_eq!(guard(inner), Ok(Err("inner 1".to_owned())));
        assert_eq!(guard(|| -> i32 { panic!("outer") }), Err("outer".to_owned()));
        assert!(!GUARDED.get());
    }
}
