//! The session's config entry and the environment variable, each alone and together.

use super::*;
use crate::settings::Settings;
use moh_cpu::PRECISION_VARIABLE;
use std::process::Command;
use std::ptr::NonNull;

/// Environment variable with the session's config entry for the child process.
const ENTRY: &str = "MOH_TEST_ENTRY";
const PRECISION_ENTRY: &str = "MOH_TEST_PRECISION_ENTRY";

/// Prints what a session would be given. Runs only as a child process of the test below, because environment
/// variables are shared by all threads.
#[test]
#[ignore = "a child process of `session_entry_overrides_environment_variable`"]
fn child() {
    let entries = [(c"ai.moh.pack_weights", ENTRY), (c"ai.moh.float32_matmul_precision", PRECISION_ENTRY)];
    let value = |name| std::env::var(name).ok().map(|value| CString::new(value).unwrap());
    let entries = entries.into_iter().filter_map(|(key, name)| Some((key.to_owned(), value(name)?)));
    let mut options = Options { entries: entries.collect(), ..Options::default() };
    match unsafe { Settings::read(api(), NonNull::from(&mut options).cast()) } {
        Ok(Settings { pack_weights, precision }) => println!("found={pack_weights:?} {}", precision.name()),
        Err(failure) => println!("found={failure}"),
    }
}

/// What a child with these entries and environment variables prints.
fn found(variables: [(&str, Option<&str>); 4]) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "tests::settings::child", "--nocapture"]);
    for (name, value) in variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let found = output.lines().find_map(|line| line.split_once("found="));
    found.unwrap_or_else(|| panic!("{output}")).1.to_owned()
}

#[test]
fn session_entry_overrides_environment_variable() {
    let default = if crate::pages::can_tell() { "OfFiles highest" } else { "Never highest" };
    for (entry, variable, expected) in [
        (None, None, default),
        (None, Some(""), default),
        (None, Some("0"), "Never highest"),
        (None, Some("1"), "Always highest"),
        (None, Some("yes"), "Always highest"),
        (None, Some("Off"), "Never highest"),
        (Some("0"), None, "Never highest"),
        (Some("1"), None, "Always highest"),
        (Some("0"), Some("1"), "Never highest"),
        (Some("1"), Some("0"), "Always highest"),
        (Some("1"), Some("nonsense"), "Always highest"),
        (None, Some("nonsense"), "environment variable MOH_PACK_WEIGHTS: expected 0 or 1, found \"nonsense\""),
    ] {
        let variables =
            [(ENTRY, entry), ("MOH_PACK_WEIGHTS", variable), (PRECISION_ENTRY, None), (PRECISION_VARIABLE, None)];
        assert_eq!(found(variables), expected, "entry {entry:?}, variable {variable:?}");
    }
    for (entry, variable, expected) in [
        (None, Some("high"), default.replace("highest", "high")),
        (Some("medium"), Some("high"), default.replace("highest", "medium")),
        (Some("highest"), Some("low"), default.to_owned()),
        (None, Some(""), default.to_owned()),
        (
            Some("low"),
            None,
            "session config entry ai.moh.float32_matmul_precision: expected highest, high, medium, found \"low\""
                .to_owned(),
        ),
    ] {
        let variables =
            [(ENTRY, None), ("MOH_PACK_WEIGHTS", None), (PRECISION_ENTRY, entry), (PRECISION_VARIABLE, variable)];
        assert_eq!(found(variables), expected, "entry {entry:?}, variable {variable:?}");
    }
}
