//! `moh-export completions`, and the man pages.

use std::process::Command;

/// The page of each command, and the command.
const COMMANDS: [(&str, Option<&str>); 5] = [
    ("moh-export.1", None),
    ("moh-export-convert.1", Some("convert")),
    ("moh-export-inspect.1", Some("inspect")),
    ("moh-export-random.1", Some("random")),
    ("moh-export-verify.1", Some("verify")),
];

/// What the program prints.
fn printed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_moh-export")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Every option that `help` lists.
fn options_in(help: &str) -> Vec<&str> {
    let lines = help.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    lines.filter_map(|line| line.split([' ', ',']).find(|word| word.starts_with("--"))).collect()
}

/// The options of each command, by the command's page.
fn options() -> Vec<(&'static str, Vec<String>)> {
    let of = |(page, command): (&'static str, Option<&str>)| {
        let help = printed(&command.into_iter().chain(["--help"]).collect::<Vec<&str>>());
        let options: Vec<String> = options_in(&help).into_iter().map(str::to_owned).collect();
        assert!(options.contains(&"--json".to_owned()), "{page}: {options:?}");
        (page, options)
    };
    COMMANDS.map(of).into()
}

#[test]
fn completions_know_every_command_and_option() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = printed(&["completions", shell]);
        assert!(["convert", "inspect", "random", "verify"].iter().all(|command| script.contains(command)), "{shell}");
        for option in options().into_iter().flat_map(|(_, options)| options) {
            // fish names options without their dashes.
            let named = if shell == "fish" { format!("-l {}", &option[2..]) } else { option };
            assert!(script.contains(&named), "{shell}: no {named}");
        }
    }
}

#[test]
fn man_pages_hold_every_option() {
    let folder = tempfile::tempdir().unwrap();
    printed(&["man", folder.path().to_str().unwrap()]);
    for (page, options) in options() {
        let text = std::fs::read_to_string(folder.path().join(page)).unwrap().replace("\\-", "-");
        for option in options {
            assert!(text.contains(&option), "{page}: no {option}");
        }
    }
}

#[test]
fn the_version_tells_commit_runtimes_and_instruction_set() {
    let long = printed(&["--version"]);
    for expected in ["moh-export 0.", "(commit ", "runtimes: tract 0.", "CPU kernels: "] {
        assert!(long.contains(expected), "{long}");
    }
    assert!(printed(&["-V"]).lines().count() == 1);
}
