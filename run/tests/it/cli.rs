//! The program, as a shell calls it.

use crate::models::{count_on, counter, write_tokenizer};
use crate::program::{moh_run, names, outcome, refusal, run, text};
use crate::support::doubler;
use crate::support::onnx::{DataType, Graph};
use moh_runtime::Tensor;
use moh_tasks::{read_tensors, write_tensors};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;

/// `x` in float64 and `mask` as booleans: the model takes float32 and int64.
fn write_inputs(path: &Path) {
    let x = Tensor::new([2, 3], vec![0.5f64, 1.0, 1.5, 2.0, 2.5, 3.0]).unwrap();
    let mask = Tensor::new([2], vec![true, false]).unwrap();
    write_tensors(path, &[("x".to_owned(), x), ("mask".to_owned(), mask)], true).unwrap();
}

#[test]
fn infer_converts_inputs_and_writes_every_output() {
    let (folder, model) = doubler();
    let (inputs, outputs) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    write_inputs(&inputs);
    for name in names() {
        let args =
            ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&outputs), "--runtime", name, "--force"];
        let (success, printed, errors) = run(&args);
        assert!(success, "{errors}");
        assert_eq!((printed.as_str(), errors.as_str()), ("", "y float32 [2, 3]\nm int64 [2]\n"));
        let y = Tensor::new([2, 3], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let m = Tensor::new([2], vec![1i64, 0]).unwrap();
        assert_eq!(read_tensors(&outputs).unwrap(), [("m".to_owned(), m), ("y".to_owned(), y)]);
        let (success, printed, errors) = run(&[&args[..], &["--json"]].concat());
        assert!(success && errors.is_empty(), "{errors}");
        let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(found["outputs"][0], serde_json::json!({ "name": "y", "type": "float32", "shape": [2, 3] }));
        assert_eq!(found["file"], text(&outputs));
    }
}

#[test]
fn infer_keeps_a_file_that_is_there() {
    let (folder, model) = doubler();
    let (inputs, outputs) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    write_inputs(&inputs);
    std::fs::write(&outputs, "precious").unwrap();
    let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&outputs), "--runtime", "tract"];
    assert!(refusal(&args).contains("exists already; --force overwrites it"));
    assert_eq!(std::fs::read(&outputs).unwrap(), b"precious");
    // Not even with --force the model itself, by whatever name.
    let before = std::fs::read(&model).unwrap();
    let round = folder.path().join(".").join(model.file_name().unwrap());
    let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&round), "--runtime", "tract", "--force"];
    assert!(refusal(&args).contains("this is a file of the model itself"));
    assert_eq!(std::fs::read(&model).unwrap(), before);
    let lost = folder.path().join("nowhere/out.safetensors");
    let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&lost), "--runtime", "tract"];
    assert!(refusal(&args).contains("there is no folder"));
}

#[test]
fn infer_names_what_is_wrong_and_leaves_nothing_behind() {
    let (folder, model) = doubler();
    let (inputs, outputs) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    let attempt = |tensors: &[(&str, Tensor)]| {
        let tensors: Vec<(String, Tensor)> = tensors.iter().map(|(n, t)| ((*n).to_owned(), t.clone())).collect();
        write_tensors(&inputs, &tensors, true).unwrap();
        let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&outputs), "--runtime", "tract"];
        let errors = refusal(&args);
        let left: Vec<String> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "in.safetensors" && name != "model.onnx")
            .collect();
        assert_eq!(left, [""; 0]);
        errors
    };
    let mask = Tensor::new([1], vec![1i64]).unwrap();
    let row = Tensor::new([1, 3], vec![1f32; 3]).unwrap();
    let errors = attempt(&[("mask", mask.clone()), ("X", row)]);
    for expected in ["unexpected input X", "missing input x", "x float32 (n, 3)"] {
        assert!(errors.contains(expected), "{errors}");
    }
    let errors = attempt(&[("mask", mask.clone()), ("x", Tensor::new([1, 3], vec![0.1f64; 3]).unwrap())]);
    assert!(errors.contains("in.safetensors: x: 0.1 (element 0) is not a float32"), "{errors}");
    let errors = attempt(&[("mask", mask), ("x", Tensor::new([3], vec![1f32; 3]).unwrap())]);
    assert!(errors.contains("x: expected shape (n, 3), found [3]"), "{errors}");
}

#[test]
fn missing_and_damaged_files_are_errors() {
    let (folder, model) = doubler();
    let inputs = folder.path().join("in.safetensors");
    let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", "o", "--runtime", "tract"];
    assert!(refusal(&args).contains("in.safetensors: input file not found"));
    std::fs::write(&inputs, "damaged").unwrap();
    assert!(refusal(&args).contains("in.safetensors: not a safetensors file"));
    write_inputs(&inputs);
    let nowhere = folder.path().join("nowhere/out.safetensors");
    let args = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&nowhere), "--runtime", "tract"];
    assert!(refusal(&args).contains("out.safetensors: cannot be written"));
    assert!(refusal(&["generate", "/nowhere", "--prompt", "a"]).contains("/nowhere: model not found"));
    let mut dangling = Graph::new();
    dangling.input("x", DataType::Float, &["n"]);
    dangling.output("y", DataType::Float, &["n"]);
    std::fs::write(&model, dangling.encode()).unwrap();
    let errors = refusal(&["generate", text(&model), "--prompt", "a", "--runtime", "tract"]);
    assert!(errors.contains("nothing computes output y"), "{errors}");
    std::fs::write(&model, "damaged").unwrap();
    assert!(refusal(&["generate", text(folder.path()), "--prompt", "a"]).contains("model.onnx: not an ONNX model"));
}

/// What is often named in a model's place.
#[test]
fn a_folder_or_file_without_a_model_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str| refusal(&["generate", text(&folder.path().join(name)), "--prompt", "a"]);
    let path = folder.path().join("model.onnx");
    assert!(refused("").contains(&format!("{}: model not found\n", path.display())), "{}", refused(""));
    std::fs::write(folder.path().join("model.safetensors"), "").unwrap();
    assert!(
        refused("").contains("model not found; the folder holds model.safetensors: export it with moh-export first")
    );
    let errors = refused("model.safetensors");
    assert!(errors.contains("not an ONNX model: it is a checkpoint: export it with moh-export first"), "{errors}");
    std::fs::write(folder.path().join("vit.onnx"), "version https://git-lfs.github.com/spec/v1\noid sha256:0").unwrap();
    assert!(refused("").contains("the folder holds vit.onnx: name the file"));
    assert!(refused("vit.onnx").contains("it is a Git LFS pointer: `git lfs pull` fetches the model"));
}

/// The counting model with a tokenizer of letters: a is 0.
fn letters() -> tempfile::TempDir {
    let (folder, _) = counter();
    write_tokenizer(folder.path());
    folder
}

fn continuation(prompt: &[i64], steps: usize) -> String {
    count_on(prompt, steps).iter().map(|&token| char::from(b'a' + token as u8)).collect()
}

#[test]
fn generate_streams_the_continuation() {
    let folder = letters();
    for name in names() {
        let args = ["generate", text(folder.path()), "--prompt", "bad", "--max-tokens", "9", "--runtime", name];
        let (success, printed, errors) = run(&args);
        assert!(success, "{errors}");
        assert_eq!(printed, continuation(&[1, 0, 3], 9) + "\n");
        assert!(errors.contains("prefill 3 tokens in ") && errors.contains("decode 8 tokens in "), "{errors}");
    }
}

#[test]
fn generate_prints_numbers_and_reads_the_prompt_from_a_pipe() {
    let folder = letters();
    let args =
        ["generate", text(folder.path()), "--prompt", "-", "--max-tokens", "4", "--ids", "-q", "--runtime", "tract"];
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let mut child = moh_run(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"1 0 3\n").unwrap();
    let (success, printed, errors) = outcome(&child.wait_with_output().unwrap());
    let numbers: Vec<String> = count_on(&[1, 0, 3], 4).iter().map(ToString::to_string).collect();
    assert!(success, "{errors}");
    assert_eq!((printed, errors.as_str()), (numbers.join(" ") + "\n", ""));
}

#[test]
fn generate_stops_at_the_end_token_and_at_the_longest_sequence() {
    let folder = letters();
    let full = count_on(&[1, 0, 3], 9);
    let end = full[4];
    let stop = full.iter().position(|&token| token == end).unwrap();
    let config = format!(r#"{{"eos_token_id": {end}, "max_position_embeddings": 10}}"#);
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let generate = |more: &[&str]| {
        let base = ["generate", text(folder.path()), "--prompt", "bad", "--max-tokens", "9", "--runtime", "tract"];
        run(&[&base, more].concat())
    };
    let (_, printed, _) = generate(&[]);
    assert_eq!(printed, continuation(&[1, 0, 3], stop) + "\n", "the end token is no text");
    let (_, printed, errors) = generate(&["--ignore-eos"]);
    assert_eq!(printed, continuation(&[1, 0, 3], 7) + "\n");
    assert!(errors.contains("note: at most 7 tokens, because the model's longest sequence is 10"), "{errors}");
    let long = ["generate", text(folder.path()), "--prompt", "aaaaaaaaaa", "--runtime", "tract"];
    assert!(refusal(&long).contains("the prompt has 10 tokens, the model's longest sequence is 10"));
}

#[test]
fn generate_begins_with_the_begin_token_or_refuses_an_empty_prompt() {
    let folder = letters();
    let args = ["generate", text(folder.path()), "--prompt", "", "--max-tokens", "3", "--runtime", "tract"];
    assert!(refusal(&args).contains("prompt: it is empty"));
    std::fs::write(folder.path().join("config.json"), r#"{"bos_token_id": 4}"#).unwrap();
    assert_eq!(run(&args).1, continuation(&[4], 3) + "\n");
}

#[test]
fn generate_needs_a_tokenizer_and_a_language_model() {
    let (folder, _) = counter();
    let args = ["generate", text(folder.path()), "--prompt", "a", "--runtime", "tract"];
    assert!(refusal(&args).contains("tokenizer.json: the model's tokenizer must be beside it"));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(refusal(&args).contains("tokenizer.json: not a tokenizer"));
    let (folder, _) = doubler();
    let args = ["generate", text(folder.path()), "--prompt", "a", "--runtime", "tract"];
    assert!(refusal(&args).contains("not a language model"));
}

#[test]
fn a_closed_pipe_ends_the_program_quietly() {
    let folder = letters();
    let args = ["generate", text(folder.path()), "--prompt", "bad", "--max-tokens", "100000", "--runtime", "tract"];
    let mut child = moh_run(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 5];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let (success, _, errors) = outcome(&child.wait_with_output().unwrap());
    assert_eq!((success, errors.as_str()), (true, ""));
    assert_eq!(first, continuation(&[1, 0, 3], 5).as_bytes());
}

/// What a command tells has no part in how it ends.
#[cfg(target_os = "linux")]
#[test]
fn standard_error_may_be_full() {
    let folder = letters();
    let (_doubler, model) = doubler();
    let (inputs, outputs) = (folder.path().join("in.safetensors"), folder.path().join("out.safetensors"));
    write_inputs(&inputs);
    let generate = ["generate", text(folder.path()), "--prompt", "bad", "--seed", "1", "--runtime", "tract"];
    let infer = ["infer", text(&model), "--inputs", text(&inputs), "-o", text(&outputs), "--runtime", "tract"];
    for (args, code) in [
        (&generate[..], 0),
        (&infer, 0),
        (&["bench", text(&model), "--runtime", "tract"], 1),
        (&["generate", "/nowhere", "--prompt", "a"], 1),
        (&["generate"], 2),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = moh_run(args).stderr(full).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert_eq!(output.stdout.is_empty(), args[0] != "generate" || code != 0, "{args:?}");
    }
}

#[test]
fn a_library_that_would_not_be_used_is_refused() {
    let (_folder, model) = doubler();
    for option in ["--ort-library", "--ops-library"] {
        let refused = |args: &[&str]| {
            let errors = refusal(&[args, &["--runtime", "tract", option, "/nowhere/lib.so"]].concat());
            assert!(errors.contains(&format!("{option} is for onnxruntime, and only tract is to run")), "{errors}");
        };
        refused(&["generate", text(&model), "--prompt", "a"]);
        for command in ["profile", "bench", "serve"] {
            refused(&[command, text(&model)]);
        }
    }
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [&["generate", "m"][..], &["infer", "m"], &["generate", "m", "--prompt", "a", "--threads", "0"], &[]] {
        assert_eq!(moh_run(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
    let both = ["generate", "m", "--prompt", "a", "--no-custom-ops", "--ops-library", "l"];
    assert_eq!(moh_run(&both).output().unwrap().status.code(), Some(2));
}

/// Without any variable there is no Python to ask: what runs the model then, the notice says.
#[test]
fn falling_back_to_tract_is_told() {
    let folder = letters();
    let args = ["generate", text(folder.path()), "--prompt", "bad", "--max-tokens", "2"];
    let (success, _, errors) = outcome(&moh_run(&args).env_clear().output().unwrap());
    assert!(success, "{errors}");
    assert_eq!(errors.contains("note: running in tract"), errors.contains("runtime tract"), "{errors}");
    let strict = [&args[..], &["--runtime", "ort"]].concat();
    let (success, _, strict_errors) = outcome(&moh_run(&strict).env_clear().output().unwrap());
    assert_eq!(success, errors.contains("runtime onnxruntime"), "{strict_errors}");
}
