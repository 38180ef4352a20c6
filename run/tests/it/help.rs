//! `moh-run completions`, and the man pages.

use crate::program::{run, text};

const COMMANDS: [&str; 10] =
    ["infer", "generate", "translate", "classify", "sample", "routes", "profile", "bench", "serve", "doctor"];

/// Every option that `help` lists.
fn options_in(help: &str) -> Vec<&str> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    lines.filter_map(|line| line.split([' ', ',']).find(|word| word.starts_with("--"))).collect()
}

/// Every command's options.
fn options() -> Vec<(&'static str, Vec<String>)> {
    let of = |command| {
        let (success, help, errors) = run(&[command, "--help"]);
        assert!(success, "{errors}");
        let options: Vec<String> = options_in(&help).into_iter().map(str::to_owned).collect();
        for common in ["--quiet", "--json"] {
            assert!(options.contains(&common.to_owned()), "{command}: {options:?}");
        }
        (command, options)
    };
    COMMANDS.map(of).into()
}

#[test]
fn completions_know_every_command_and_option() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let (success, script, errors) = run(&["completions", shell]);
        assert!(success, "{errors}");
        for (command, options) in options() {
            assert!(script.contains(command), "{shell}: no {command}");
            for option in options {
                // fish names options without their dashes.
                let named = if shell == "fish" { format!("-l {}", &option[2..]) } else { option };
                assert!(script.contains(&named), "{shell}: no {named}");
            }
        }
    }
    let (success, _, errors) = run(&["completions", "cmd"]);
    assert!(!success && errors.contains("bash"), "{errors}");
}

#[test]
fn man_pages_hold_every_option() {
    let folder = tempfile::tempdir().unwrap();
    let (success, _, errors) = run(&["man", text(folder.path())]);
    assert!(success, "{errors}");
    for (command, options) in options() {
        let page = std::fs::read_to_string(folder.path().join(format!("moh-run-{command}.1"))).unwrap();
        let page = page.replace("\\-", "-");
        for option in options {
            assert!(page.contains(&option), "{command}: no {option}");
        }
    }
    let page = std::fs::read_to_string(folder.path().join("moh-run.1")).unwrap().replace("\\-", "-");
    assert!(COMMANDS.iter().all(|command| page.contains(&format!("moh-run-{command}(1)"))), "{page}");
    assert!(!folder.path().join("moh-run-man.1").exists(), "that command is for packagers");
}

#[test]
fn the_version_tells_commit_runtimes_and_instruction_set() {
    let (_, short, _) = run(&["-V"]);
    assert!(short.starts_with("moh-run 0.") && short.contains("(commit ") && short.lines().count() == 1, "{short}");
    let (_, long, _) = run(&["--version"]);
    let set = moh_runtime::instruction_set().unwrap();
    for expected in [short.trim_end(), "runtimes: tract 0.", &format!("CPU kernels: {set} (this processor has ")] {
        assert!(long.contains(expected), "{long}");
    }
}
