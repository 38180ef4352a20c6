//! The session's config entry and the environment variable, each alone and together.

use super::*;
use crate::settings::Settings;
use std::process::Command;
use std::ptr::NonNull;

/// Environment variable with the session's config entry for the child process.
const ENTRY: &str = "MOH_TEST_ENTRY";

/// Prints whether a session would pack weights. Runs only as a child process of the test below, because environment
/// variables are shared by all threads.
#[test]
#[ignore = "a child process of `session_entry_overrides_environment_variable`"]
fn child() {
    let entry =
        std::env::var(ENTRY).ok().map(|value| (c"ai.moh.pack_weights".to_owned(), CString::new(value).unwrap()));
    let mut options = Options { entries: entry.into_iter().collect(), ..Options::default() };
    match unsafe { Settings::read(api(), NonNull::from(&mut options).cast()) } {
        Ok(Settings { pack_weights }) => println!("found={pack_weights}"),
        Err(failure) => println!("found={failure}"),
    }
}

#[test]
fn session_entry_overrides_environment_variable() {
    let found = |entry: Option<&str>, variable: Option<&str>| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "tests::settings::child", "--nocapture"]);
        for (name, value) in [(ENTRY, entry), ("MOH_PACK_WEIGHTS", variable)] {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let found = output.lines().find_map(|line| line.split_once("found="));
        found.unwrap_or_else(|| panic!("{output}")).1.to_owned()
    };
    for (entry, variable, expected) in [
        (None, None, "false"),
        (None, Some(""), "false"),
        (None, Some("0"), "false"),
        (None, Some("1"), "true"),
        (None, Some("yes"), "true"),
        (None, Some("Off"), "false"),
        (Some("0"), None, "false"),
        (Some("1"), None, "true"),
        (Some("0"), Some("1"), "false"),
        (Some("1"), Some("0"), "true"),
        (Some("1"), Some("nonsense"), "true"),
        (None, Some("nonsense"), "environment variable MOH_PACK_WEIGHTS: expected 0 or 1, found \"nonsense\""),
    ] {
        assert_eq!(found(entry, variable), expected, "entry {entry:?}, variable {variable:?}");
    }
}
