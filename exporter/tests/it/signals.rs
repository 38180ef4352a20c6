//! Exports that end by a signal leave nothing, and the next one removes what could not be helped.

use crate::published::write_zeros;
use crate::support::{Run, golden, text};
use moh_models::presets::Preset;
use moh_models::{Config, Model};
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A folder with a checkpoint that takes its time: many zeros, which take no room.
struct Slow {
    root: tempfile::TempDir,
}

impl Slow {
    fn new(preset: &str) -> Slow {
        let root = tempfile::tempdir().unwrap();
        write_zeros(&root.path().join("model.pth"), Preset::named(preset).unwrap());
        Slow { root }
    }

    /// Where the outputs of `start` go: the folder is made for them.
    fn out(&self) -> PathBuf {
        self.root.path().join("made/out")
    }

    /// Starts an export and waits until it writes weights.
    fn start(&self, command: &mut Command) -> Child {
        let before = hidden(&self.out());
        let arguments = ["--dtype", "f32", "--no-verify", "--force"];
        command.arg(self.root.path().join("model.pth")).arg("-o").arg(self.out().join("slow.onnx")).args(arguments);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        let writes = |folder: &PathBuf| folder.join("slow.onnx_data").exists();
        while !hidden(&self.out()).iter().any(|folder| !before.contains(folder) && writes(folder)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing was written");
            assert!(child.try_wait().unwrap().is_none(), "the export is faster than this test");
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }
}

fn hidden(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".moh-export-")).collect()
}

fn send(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap().success());
}

/// The program, started with the signals as they are by default: whoever runs the tests may ignore some, as nohup does.
fn program() -> Command {
    let program = Run::tract().command();
    if !cfg!(target_os = "linux") {
        return program;
    }
    let mut command = Command::new("/usr/bin/env");
    command.arg("--default-signal=HUP,INT,TERM").arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

#[test]
fn signals_leave_nothing_and_end_the_program() {
    let slow = Slow::new("moh-dit-b-75");
    for (name, number) in [("HUP", 1), ("INT", 2), ("TERM", 15)] {
        let child = slow.start(&mut program());
        send(name, &child);
        let done = child.wait_with_output().unwrap();
        // A shell shows this as 128 and the number.
        assert_eq!(done.status.signal(), Some(number), "{name}: {:?}", done.status);
        assert_eq!(text(&done.stderr), "", "{name}");
        assert!(!slow.root.path().join("made").exists(), "{name}: {:?}", hidden(&slow.out()));
    }
}

#[test]
fn a_folder_that_was_there_stays_with_its_files() {
    let slow = Slow::new("moh-dit-b-75");
    fs::create_dir_all(slow.out()).unwrap();
    fs::write(slow.out().join("slow.onnx"), "old").unwrap();
    let child = slow.start(&mut program());
    send("TERM", &child);
    assert_eq!(child.wait_with_output().unwrap().status.signal(), Some(15));
    let left: Vec<_> = fs::read_dir(slow.out()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["slow.onnx"]);
    assert_eq!(fs::read_to_string(slow.out().join("slow.onnx")).unwrap(), "old");
}

/// Another export into the folder removes what a killed one left, and never what a live one prepares.
#[test]
fn what_a_killed_export_left_is_swept() {
    let slow = Slow::new("moh-dit-b-75");
    let mut killed = slow.start(&mut program());
    killed.kill().unwrap();
    killed.wait().unwrap();
    let dead = hidden(&slow.out());
    assert_eq!(dead.len(), 1, "{dead:?}");

    let live = slow.start(&mut program());
    send("STOP", &live);
    assert!(!dead[0].exists(), "the live export did not sweep");
    let prepared = hidden(&slow.out());
    let done = program()
        .arg(golden("dit-tiny-75"))
        .arg("-o")
        .arg(slow.out().join("other.onnx"))
        .arg("--no-verify")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert_eq!((prepared.len(), hidden(&slow.out())), (1, prepared.clone()));
    // The live one finds that the configuration beside its output has become another model's.
    send("CONT", &live);
    let live = live.wait_with_output().unwrap();
    assert!(!live.status.success() && text(&live.stderr).contains("other.onnx"), "{}", text(&live.stderr));
    let mut left: Vec<_> = fs::read_dir(slow.out()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["README.md", "config.json", "other.onnx", "other.onnx_data"]);
}

/// nohup starts programs with that signal ignored.
#[cfg(target_os = "linux")]
#[test]
fn ignored_signals_stay_ignored() {
    let slow = Slow::new("moh-dit-s-75");
    let program = Run::tract().command();
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(program.get_program()).env("PATH", "");
    let child = slow.start(shell.process_group(0));
    send("HUP", &child);
    assert!(child.wait_with_output().unwrap().status.success());
    assert!(slow.out().join("slow.onnx").exists());
}

/// `random` writes in the same way.
#[test]
fn a_random_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let mut command = program();
    command.current_dir(root.path()).args(["random", "moh-dit-xl-75", "-o", "new"]).stdout(Stdio::null());
    let child = command.spawn().unwrap();
    let begun = Instant::now();
    while hidden(&root.path().join("new")).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
    send("INT", &child);
    assert_eq!(child.wait_with_output().unwrap().status.signal(), Some(2));
    assert!(!root.path().join("new").exists());
}

/// A conversion is prepared beside its output.
#[test]
fn a_conversion() {
    let root = tempfile::tempdir().unwrap();
    let config = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}"#;
    let values = serde_json::from_str(config).unwrap();
    let (_, tensors) = Model::plan(&Config::new("config.json", values), Some("llama")).unwrap();
    let mut end = 0;
    let entry = |(name, shape): &(String, Vec<usize>)| {
        let begin = end;
        end += 2 * shape.iter().product::<usize>();
        (name.clone(), serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}))
    };
    let header = serde_json::Value::Object(tensors.iter().map(entry).collect()).to_string();
    let length = header.len() as u64;
    let weights = root.path().join("model.safetensors");
    fs::write(&weights, [&length.to_le_bytes(), header.as_bytes()].concat()).unwrap();
    // Zeros that take no room.
    fs::OpenOptions::new().append(true).open(weights).unwrap().set_len(8 + length + end as u64).unwrap();
    fs::write(root.path().join("config.json"), config).unwrap();

    let made = root.path().join("made");
    let mut command = program();
    command.current_dir(root.path()).args(["convert", ".", "-o", "made/moh"]).stdout(Stdio::null());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !hidden(&made).iter().any(|folder| folder.join("moh/model.safetensors").exists()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nothing was written");
        assert!(child.try_wait().unwrap().is_none(), "the conversion is faster than this test");
        std::thread::sleep(Duration::from_millis(1));
    }
    send("INT", &child);
    let done = child.wait_with_output().unwrap();
    assert_eq!((done.status.signal(), text(&done.stderr).as_str()), (Some(2), ""));
    assert!(!made.exists(), "{:?}", hidden(&made));
}
