//! `moh-run profile` and `bench`.

use crate::models::counter;
use crate::program::{moh_run, moh_run_with_signals, names, refusal, run, text};
use crate::support::onnx::{DataType, Graph};
use crate::support::{doubler, have_onnxruntime, write};
use serde_json::Value;

fn parsed(args: &[&str]) -> Value {
    let (success, printed, errors) = run(args);
    assert!(success, "{errors}");
    serde_json::from_str(&printed).unwrap()
}

#[test]
fn a_profile_has_every_phase_and_node() {
    let (folder, model) = counter();
    for name in names() {
        let found =
            parsed(&["profile", text(&model), "--runtime", name, "--runs", "3", "--sequence", "5", "--json", "-q"]);
        assert_eq!(found["sequence"], 5);
        let phases = found["phases"].as_array().unwrap();
        assert_eq!([&phases[0]["phase"], &phases[1]["phase"]], ["prefill", "decode"]);
        for phase in phases {
            let nodes = phase["nodes"].as_array().unwrap();
            let has = |part: &str| nodes.iter().any(|node| node["name"].as_str().unwrap().contains(part));
            assert!(has("sum_positions") && has("present.0.key"), "{name}: {nodes:?}");
            let times: Vec<f64> = nodes.iter().map(|node| node["ms"].as_f64().unwrap()).collect();
            assert!(times.is_sorted_by(|a, b| a >= b));
            assert!((phase["parts_ms"]["rest"].as_f64().unwrap() - times.iter().sum::<f64>()).abs() < 1e-6);
            assert_eq!(phase["kernels_ms"]["ai.moh"], 0.0);
        }
        let trace = folder.path().join(format!("{name}.json"));
        let args = ["profile", text(&model), "--runtime", name, "--runs", "1", "--trace", text(&trace)];
        let (success, printed, errors) = run(&args);
        assert!(success, "{errors}");
        assert!(printed.contains("prefill in ") && printed.contains("all nodes"), "{printed}");
        assert_eq!(trace.exists(), name == "ort");
        std::fs::write(&trace, "precious").unwrap();
        let (success, _, again) = run(&args);
        assert!(!success && again.contains("exists already; --force overwrites it"), "{again}");
        assert_eq!(std::fs::read_to_string(&trace).unwrap(), "precious");
        let (success, _, forced) = run(&[&args[..], &["--force"]].concat());
        assert!(success, "{forced}");
        assert_eq!(std::fs::read_to_string(&trace).unwrap() != "precious", name == "ort");
        assert_eq!(errors.contains("tract writes no profile of its own"), name == "tract");
    }
}

#[test]
fn a_benchmark_compares_runtimes_at_every_size() {
    let (_folder, model) = counter();
    let list = if have_onnxruntime() { "tract,ort-bodies" } else { "tract" };
    let args = ["bench", text(&model), "--runtime", list, "--seconds", "0", "--runs", "3", "-q"];
    let sizes = ["--batch", "1,2", "--sequence", "4,6", "--threads", "1,2", "--json"];
    let found = parsed(&[&args[..], &sizes].concat());
    let found = found.as_array().unwrap();
    assert_eq!(found.len(), 2 * 2 * 2 * 2);
    for entry in found {
        let runtimes = entry["runtimes"].as_array().unwrap();
        assert_eq!(runtimes.len(), list.split(',').count());
        for runtime in runtimes {
            let of = |key: &str| runtime[key].as_f64().unwrap();
            assert_eq!(of("runs"), 3.0);
            assert!(0.0 < of("min_ms") && of("min_ms") <= of("median_ms") && of("median_ms") <= of("p99_ms"));
            let tokens = entry["batch"].as_u64().unwrap()
                * if entry["phase"] == "decode" { 1 } else { entry["sequence"].as_u64().unwrap() };
            assert!((of("per_second") * of("median_ms") / 1e3 / tokens as f64 - 1.0).abs() < 1e-9);
        }
    }
    let (success, printed, errors) = run(&args);
    assert!(success, "{errors}");
    assert_eq!(printed.lines().count(), 1 + 2 * list.split(',').count(), "{printed}");
}

#[test]
fn what_cannot_be_measured_is_told() {
    let (folder, model) = counter();
    for command in ["profile", "bench"] {
        let refused = |more: &[&str]| refusal(&[&[command, text(&model), "--runtime", "tract"], more].concat());
        assert!(refusal(&[command, "/nowhere", "--runtime", "tract"]).contains("/nowhere: model not found"));
        std::fs::write(folder.path().join("config.json"), r#"{"max_position_embeddings": 12}"#).unwrap();
        assert!(refused(&["--sequence", "13"]).contains("a sequence of 13 tokens, but the model's longest is 12"));
        std::fs::remove_file(folder.path().join("config.json")).unwrap();
        let errors = refused(&["--batch", "1000000", "--sequence", "1000000"]);
        assert!(errors.contains("the input input_ids int64 (batch, sequence) would be too large"), "{errors}");
        for usage in [
            ["--batch", "0"],
            ["--threads", "0"],
            ["--threads", "a"],
            ["--threads", "100000"],
            ["--sequence", "0"],
            ["--runs", "0"],
            ["--batch", "-1"],
            ["--batch", "1000000000000"],
        ] {
            let args = [&[command, text(&model)][..], &usage].concat();
            let output = moh_run(&args).output().unwrap();
            assert_eq!(output.status.code(), Some(2), "{usage:?}");
            let errors = String::from_utf8(output.stderr).unwrap();
            assert!(errors.contains(&format!("for '{}", usage[0])), "{errors}");
            assert!(errors.contains("expected a whole number from 1 to 10"), "{errors}");
        }
        let (_other, doubler) = doubler();
        let errors = refusal(&[command, text(&doubler), "--runtime", "tract"]);
        assert!(
            errors.contains("cannot make inputs: the size of dimension n of input x float32 (n, 3) is unknown"),
            "{errors}"
        );
    }
    if have_onnxruntime() {
        let errors = refusal(&["bench", text(&model), "--runtime", "ort", "--ort-library", "/nowhere/lib.so"]);
        assert!(errors.contains("/nowhere/lib.so"), "{errors}");
    }
}

#[test]
fn fixed_sizes_are_kept() {
    let mut graph = Graph::new();
    graph.input("input_ids", DataType::Int64, &["2", "3"]);
    graph.cast_to_float("input_ids", "y");
    graph.output("y", DataType::Float, &["2", "3"]);
    let (_folder, model) = write(&graph);
    let args = ["bench", text(&model), "--runtime", "tract", "--seconds", "0", "--runs", "1", "--json", "-q"];
    let found = parsed(&[&args[..], &["--batch", "2"]].concat());
    assert_eq!(
        (&found[0]["phase"], &found[0]["sequence"], &found[0]["items"]),
        (&"forward".into(), &3.into(), &"tokens".into())
    );
    assert!(refusal(&args).contains("a batch of 1, but the model was exported for 2"));
    let errors = refusal(&[&args[..], &["--batch", "2", "--sequence", "4"]].concat());
    assert!(errors.contains("a sequence of 4 tokens, but the model was exported for 3"), "{errors}");
}

/// onnxruntime writes its profile to a temporary folder, which no way to end the program leaves behind.
#[cfg(unix)]
#[test]
fn a_signal_leaves_no_temporary_folder() {
    use std::os::unix::process::ExitStatusExt;
    let (_folder, model) = counter();
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        for name in names() {
            let temporary = tempfile::tempdir().unwrap();
            let entries = || std::fs::read_dir(temporary.path()).unwrap().count();
            let args = ["profile", text(&model), "--runtime", name, "--runs", "1000000", "--json"];
            let mut command = moh_run_with_signals(&args);
            let mut child =
                command.env("TMPDIR", temporary.path()).stdout(std::process::Stdio::null()).spawn().unwrap();
            while entries() == 0 {
                assert!(child.try_wait().unwrap().is_none(), "the program ended by itself");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let status = std::process::Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
            assert!(status.unwrap().success());
            assert_eq!(child.wait().unwrap().signal(), Some(number), "{signal}");
            assert_eq!(entries(), 0, "{signal} {name}");
        }
    }
}
