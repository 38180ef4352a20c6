//! `moh-run doctor`.

use crate::program::{moh_run, outcome};
use crate::support::have_onnxruntime;
use serde_json::Value;

/// Success, the report, and what is on standard error; with these variables and arguments.
fn doctor(variables: &[(&str, &str)], more: &[&str]) -> (bool, Value, String) {
    let mut command = moh_run(&[&["doctor", "--json"], more].concat());
    command.envs(variables.iter().copied());
    let (success, printed, errors) = outcome(&command.output().unwrap());
    (success, serde_json::from_str(&printed).unwrap(), errors)
}

fn all_right(checked: &Value) -> bool {
    let operators = checked.as_array().unwrap();
    operators.len() >= 6
        && operators
            .iter()
            .all(|o| o["ran"] == true && o["error"].as_f64().unwrap() <= 1.0 && o["calls"].as_u64() > Some(0))
}

/// As where onnxruntime is not installed: then models run in tract, which is no problem.
#[test]
fn without_onnxruntime_tract_is_examined() {
    let (success, report, errors) =
        doctor(&[("ORT_DYLIB_PATH", ""), ("PATH", "/nowhere"), ("LD_LIBRARY_PATH", "")], &[]);
    if !report["onnxruntime"]["path"].is_null() {
        println!("SKIPPED: this system has an onnxruntime");
        return;
    }
    assert!(success && errors.is_empty(), "{errors}");
    assert_eq!((&report["works"], &report["models run in"]), (&true.into(), &"tract".into()));
    assert!(all_right(&report["kernels in tract"]), "{report}");
    assert_eq!(report["processor"]["instruction_set"], moh_runtime::instruction_set().unwrap());
    assert!(report["tract"]["version"].as_str().unwrap().starts_with("0."));
}

#[test]
fn what_does_not_work_is_a_problem_with_a_remedy() {
    let problem = |variables: &[(&str, &str)], more: &[&str]| {
        let (success, report, errors) = doctor(variables, more);
        assert!(!success && report["works"] == false, "{report}");
        assert!(errors.starts_with("error: ") && errors.ends_with(" found\n"), "{errors}");
        let first = &report["problems"][0];
        format!("{} -> {}", first["problem"].as_str().unwrap(), first["what_to_do"].as_str().unwrap())
    };
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        let found = problem(&[], &["--device", "cuda"]);
        assert!(found.contains("GPU: none: no NVIDIA driver is loaded -> leave out --device cuda"), "{found}");
    }
    let found = problem(&[("MOH_CPU_ISA", "abacus")], &[]);
    assert!(
        found.contains("MOH_CPU_ISA: expected one that this processor has") && found.contains("unset MOH_CPU_ISA"),
        "{found}"
    );
    let found = problem(&[], &["--ort-library", "/nowhere/lib.so"]);
    assert!(found.contains("onnxruntime library /nowhere/lib.so: named by an option"), "{found}");
    assert_eq!(doctor(&[], &["--ort-library", "/nowhere/lib.so"]).1["models run in"], "none");
    assert!(found.contains("`pip install onnxruntime`"), "{found}");
    let found = problem(&[], &["--ops-library", "/nowhere/libmoh_ops.so"]);
    assert!(found.contains("operator library /nowhere/libmoh_ops.so: named by an option"), "{found}");
    if have_onnxruntime() {
        let found = problem(&[("MOH_OPS_LIBRARY", "/nowhere/libmoh_ops.so")], &[]);
        assert!(
            found.contains("libmoh_ops: operator library /nowhere/libmoh_ops.so: named by MOH_OPS_LIBRARY"),
            "{found}"
        );
        assert!(found.contains("cargo build --release -p moh-ops"), "{found}");
        if doctor(&[], &[]).1["libmoh_ops"]["found"] == "found beside the program" {
            let found = problem(&[("MOH_PACK_WEIGHTS", "maybe")], &[]);
            assert!(found.contains("found beside the program") && !found.contains("named by an option"), "{found}");
        }
        let text = tempfile::NamedTempFile::new().unwrap();
        let found = problem(&[("MOH_OPS_LIBRARY", text.path().to_str().unwrap())], &[]);
        assert!(
            found.starts_with("kernels in onnxruntime: operator library")
                && found.contains(": named by MOH_OPS_LIBRARY: ")
                && found.contains("Failed to load"),
            "{found}"
        );
        assert!(found.contains("build libmoh_ops for this system"), "{found}");
    }
}

#[test]
fn people_get_lines() {
    let (_, printed, _) = outcome(&moh_run(&["doctor"]).output().unwrap());
    for name in
        ["moh-run ", "processor ", "threads ", "onnxruntime ", "tract ", "GPU ", "models run in ", "kernels in tract "]
    {
        assert!(printed.lines().any(|line| line.starts_with(name)), "{name}: {printed}");
    }
}

/// A name that is no instruction set ends every command before a run, in tract as well.
#[test]
fn an_instruction_set_that_is_none_is_refused_when_a_model_is_loaded() {
    let (folder, _) = crate::support::doubler();
    let args = ["generate", folder.path().to_str().unwrap(), "--prompt", "a", "--runtime", "tract"];
    let (success, _, errors) = outcome(&moh_run(&args).env("MOH_CPU_ISA", "abacus").output().unwrap());
    assert!(!success && errors.starts_with("error: environment variable MOH_CPU_ISA: expected one that"), "{errors}");
}
