//! Panics of the code under test, some of which are caught on their way.

use std::panic::{set_hook, take_hook};

/// Where source files of operators and of what loads models lie.
const OURS: [&str; 4] = ["custom-ops/", "runtime-ort/src/", "tasks/src/", "serve/src/"];

/// A panic in this project's code ends the process, although tract's and the tokenizer's are caught and are errors of the model.
pub fn end_the_process() {
    // The guard's own hook, which says nothing of what is caught, comes first.
    let _ = moh_runtime::guard(|| ());
    let usual = take_hook();
    set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|place| OURS.iter().any(|folder| place.file().contains(folder))) {
            eprintln!("{panic}");
            std::process::abort();
        }
        usual(panic);
    }));
}
