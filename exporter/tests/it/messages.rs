//! What moh-export says of obvious mistakes: what is wrong, where, and what to do.

use crate::support::{Run, golden, text};
use std::fs;
use std::path::Path;

/// Runs the program in a folder; it fails, and says `parts` in one line.
fn fails(folder: &Path, arguments: &[&str], parts: &[&str]) {
    let done = Run::tract().command().current_dir(folder).args(arguments).output().unwrap();
    let said = text(&done.stderr);
    assert!(!done.status.success() && done.stdout.is_empty(), "{arguments:?}: {}", text(&done.stdout));
    for part in parts {
        assert!(said.contains(part), "{arguments:?}: {part:?} is not in:\n{said}");
    }
}

#[test]
fn outputs_that_cannot_be() {
    let root = tempfile::tempdir().unwrap();
    let golden = golden("llama-moh-tiny");
    let checkpoint = golden.to_str().unwrap();
    fs::create_dir(root.path().join("folder")).unwrap();
    fs::write(root.path().join("file"), "").unwrap();
    let output = |output: &str, parts: &[&str]| fails(root.path(), &[checkpoint, "-o", output], parts);
    output("folder", &["output folder: this is a folder; name the model to write, such as folder/model.onnx"]);
    output("new", &["output new: the name of the model to write must end in .onnx"]);
    output("new.ONNX", &["must end in .onnx"]);
    output("", &["--output"]);
    output(
        "file/model.onnx",
        &["error: file: not a directory; a file is where a folder is needed: choose another folder"],
    );
    output("/proc/model.onnx", &["error: /proc: "]);
    fs::write(root.path().join("there.onnx"), "").unwrap();
    output("there.onnx", &["there.onnx exists already; --force replaces it"]);
    fs::copy(golden.join("config.json"), root.path().join("config.json")).unwrap();
    fs::copy(golden.join("model.safetensors"), root.path().join("own.onnx_data")).unwrap();
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("own.onnx_data", root.path().join("own.safetensors")).unwrap();
        let parts = ["output own.onnx_data: this is a file of the checkpoint itself", "choose another output"];
        fails(root.path(), &["own.safetensors", "-o", "own.onnx", "--force"], &parts);
    }
    let left: Vec<_> = fs::read_dir(root.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with(".moh-export-")), "{left:?}");
}

/// Another file than the one that was named would be written, and the same for several names.
#[cfg(target_os = "linux")]
#[test]
fn names_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let name = |bytes: &'static [u8]| std::ffi::OsStr::from_bytes(bytes);
    let run = |output: &std::ffi::OsStr| {
        let mut command = Run::tract().command();
        command.current_dir(root.path()).arg(golden("dit-tiny-75")).args(["--no-verify", "-o"]);
        command.arg(output).output().unwrap()
    };
    let refused = run(name(b"out/m\xff.onnx"));
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("the name of the model to write must be UTF-8"), "{said}");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    // Folders may have any name.
    let done = run(name(b"out\xff/model.onnx"));
    assert!(done.status.success(), "{}", text(&done.stderr));
    assert!(root.path().join(name(b"out\xff")).join("model.onnx_data").is_file());
}

#[test]
fn an_exported_model_is_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("model.onnx"), "").unwrap();
    let parts = ["it is an exported model", "`moh-run profile model.onnx` shows"];
    fails(root.path(), &["inspect", "model.onnx"], &parts);
    fails(root.path(), &["model.onnx", "-o", "out/model.onnx"], &parts);
}

/// Types also have the names that PyTorch and numpy give them.
#[test]
fn element_types_have_other_names() {
    let root = tempfile::tempdir().unwrap();
    for (name, own) in [("float16", "f16"), ("fp16", "f16"), ("float32", "f32")] {
        let mut command = Run::tract().command();
        let command = command.current_dir(root.path()).arg(golden("llama-moh-tiny")).args(["--no-verify", "--force"]);
        let done = command.args(["-o", "out/model.onnx", "--dtype", name]).output().unwrap();
        assert!(text(&done.stdout).contains(&format!(", written as {own}\n")), "{}", text(&done.stderr));
    }
}

#[test]
fn parameters_of_a_quantised_model() {
    let root = tempfile::tempdir().unwrap();
    let mut command = Run::tract().command();
    let command =
        command.current_dir(root.path()).arg(golden("llama-moh-tiny")).args(["--no-verify", "--quantize", "int4"]);
    let done = command.args(["-o", "out/model.onnx"]).output().unwrap();
    let said = text(&done.stdout);
    assert!(said.contains(", those that are not quantised written as f32\n"), "{said}{}", text(&done.stderr));
}

/// Options that change nothing are said to.
#[test]
fn options_that_have_no_effect() {
    let root = tempfile::tempdir().unwrap();
    let note = |checkpoint: &str, output: &str, options: &[&str]| {
        let mut command = Run::tract().command();
        let command = command.current_dir(root.path()).arg(golden(checkpoint)).args(["-o", output, "--no-verify"]);
        let done = command.args(options).output().unwrap();
        assert!(done.status.success(), "{options:?}: {}", text(&done.stderr));
        let said = text(&done.stdout);
        let mut notes = said.lines().filter_map(|line| line.strip_prefix("note          "));
        notes.find(|note| !note.starts_with("tokenizer.json is not written")).unwrap_or_default().to_owned()
    };
    let changed = |option: &str, operators: &str| {
        format!("{option} moh changed nothing: no part of this model can be written as ai.moh.{operators}")
    };
    let (llama, vit) = ("llama-moh-tiny", "vit-tiny-b");
    assert_eq!(note(llama, "1/m.onnx", &["--norms", "moh"]), changed("--norms", "LayerNorm"));
    assert_eq!(note(llama, "2/m.onnx", &["--convolutions", "moh"]), changed("--convolutions", "DepthwiseConv"));
    // What a target chooses is for models of all kinds.
    assert_eq!(note(llama, "3/m.onnx", &["--for", "ort-cpu"]), "");
    assert_eq!(note(llama, "4/m.onnx", &["--dense-layers", "moh"]), "");
    let routing = ["--quantize", "int8", "--quantize-routing"];
    assert_eq!(note(llama, "5/m.onnx", &routing), "");
    let said = note(vit, "6/m.onnx", &[&routing[..], &["--block", "16"]].concat());
    assert!(said.starts_with("quantising the routing too changed nothing: "), "{said}");
    let said = note(llama, "8/m.onnx", &["--ignore-unexpected", "head*", "--ignore-unexpected", "aux.*"]);
    assert_eq!(
        said,
        "--ignore-unexpected changed nothing: no tensor that the model has no use for is named 'head*' or 'aux.*'"
    );
    let said = note("dit-tiny-75", "7/m.onnx", &["--weights", "link", "--dtype", "f16"]);
    assert!(said.starts_with("the model needs every tensor in another type or form"), "{said}");
}

#[test]
fn numbers_and_names_that_cannot_be() {
    let root = tempfile::tempdir().unwrap();
    let (llama, dit) = (golden("llama-moh-tiny"), golden("dit-tiny-75"));
    let with = |checkpoint: &Path, options: &[&str], parts: &[&str]| {
        fails(root.path(), &[&[checkpoint.to_str().unwrap(), "-o", "out/model.onnx"], options].concat(), parts);
        assert!(!root.path().join("out").exists());
    };
    with(
        &llama,
        &["--opset", "99"],
        &["ONNX operator-set version 99 is not supported: expected 20 to 24; choose it with --opset"],
    );
    with(
        &llama,
        &["--ir-version", "3"],
        &["ONNX IR version 3 is not supported: expected 9 to 13; choose it with --ir-version"],
    );
    with(
        &llama,
        &["--quantize", "int4", "--block", "64"],
        &[
            "\"model.layers.0.mlp.down_proj.weight\" has rows of 160 numbers, which are no whole blocks of 64",
            "choose --block 32, or --keep 'model.layers.*.mlp.down_proj' leaves them in floating point",
        ],
    );
    with(&llama, &["--quantize", "int4", "--keep", "fc1"], &["no layer that could be quantised is named \"fc1\""]);
    with(
        &llama,
        &["--attention", "portable", "--cache", "in-place"],
        &[
            "a cache in place is made of operators of ai.moh: it cannot be written as standard operators",
            "leave out --attention portable or --cache in-place",
        ],
    );
    for option in ["--dense-layers", "--norms", "--convolutions", "--form"] {
        let portable = ["--attention", "portable", "--for", "ort-cpu", "--quantize", "int4"];
        let expected = format!(
            "{option} moh writes operators of ai.moh, and a portable model has standard operators only; leave out --attention \
             portable or {option} moh"
        );
        with(&llama, &[&portable[..], &[option, "moh"]].concat(), &[&expected]);
    }
    with(&llama, &["--quantize", "int4", "--opset", "20"], &["choose --opset 21, --form nbits or --form moh"]);
    with(
        &llama,
        &["--quantize", "int8", "--keep", "*"],
        &[
            "no layer of this model is left to be quantised: all are kept by their names",
            "name fewer layers with --keep",
        ],
    );
    with(
        &llama,
        &["--quantize", "int4", "--reduce-range"],
        &["a reduced range is one of weights of 8 bits", "leave out --reduce-range, or choose --quantize int8"],
    );
    with(
        &llama,
        &["--quantize", "int4", "--quantize-routing"],
        &["--quantize-routing is for --quantize int8", "leave it out"],
    );
    let beyond = "the model's longest have 256, its max_position_embeddings; choose smaller --sequence and --past";
    for (sizes, lengths) in [
        (&["--sequence", "257"][..], "0 cached and 257 new"),
        (&["--past", "256"], "256 cached and 1 new"),
        (&["--past", "200", "--sequence", "57"], "200 cached and 57 new"),
    ] {
        with(&llama, sizes, &[&format!("sequences of {lengths} tokens: {beyond}")]);
    }
    with(&llama, &["--check"], &["--check reads the files that --weights link links"]);
    with(
        &llama,
        &["--batch", "16777216", "--sequence", "256", "--verify"],
        &["verification: with these sizes, ", "leave out --verify, or choose smaller sizes"],
    );
    with(&llama, &["--block", "32"], &["--quantize <TYPE>"]);
    with(&llama, &["--opset", "x"], &["'x' for '--opset <N>': expected a whole number"]);
    with(&llama, &["--batch", "-1"], &["'-1' for '--batch <N>'", "expected a whole number from 1 to 16777216"]);
    let seed = ["random", "moh-dit-s-75", "-o", "out", "--seed", "-1"];
    fails(root.path(), &seed, &["'-1' for '--seed <SEED>': expected a whole number from 0 to 18446744073709551615"]);
    with(&llama, &["--batch", "0"], &["'0' for '--batch <N>'", "expected a whole number from 1 to 16777216"]);
    with(&dit, &["--past", "5"], &["this moh-dit has no dimension past; it has batch; leave out --past"]);
    with(&llama, &["--family", "gpt"], &["'gpt' for '--family <NAME>'", "moh-llama", "moh-vit"]);
    with(&llama, &["--part", "encoder"], &["moh-llama has no encoder and decoder", "leave out --part"]);
}

/// Sizes that no machine has memory for are no reason not to write the model.
#[test]
fn models_of_large_sizes_are_not_run() {
    let root = tempfile::tempdir().unwrap();
    let mut command = Run::tract().command();
    let sizes = ["--batch", "16777216", "--sequence", "256"];
    let done = command.current_dir(root.path()).arg(golden("llama-moh-tiny")).args(["-o", "model.onnx"]).args(sizes);
    let done = done.output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    let report = text(&done.stdout);
    assert!(report.contains("verified      not run: with the sizes asked for it would take "), "{report}");
}

/// A report that cannot be written is no success.
#[cfg(target_os = "linux")]
#[test]
fn standard_output_is_full() {
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    for arguments in [&["inspect", "--preset", "moh-dit-s-75"][..], &["inspect", "--preset", "moh-dit-s-75", "--json"]]
    {
        let done = Run::tract().command().args(arguments).stdout(full()).output().unwrap();
        let said = text(&done.stderr);
        assert!(!done.status.success() && said.contains("error: standard output: "), "{arguments:?}: {said}");
    }
}

/// What was done, and whether it was, is not a matter of who listens.
#[cfg(target_os = "linux")]
#[test]
fn standard_error_is_full() {
    let root = tempfile::tempdir().unwrap();
    let run = |options: &[&str]| {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut command = Run::tract().command();
        let command = command.current_dir(root.path()).arg(golden("dit-tiny-75")).args(["-o", "model.onnx"]);
        command.args(options).stderr(full).output().unwrap().status.code()
    };
    // With a warning, and with an error.
    assert_eq!(run(&["--dtype", "bf16"]), Some(0));
    assert_eq!(run(&[]), Some(1));
}

#[test]
fn bfloat16_is_said_to_run_on_no_cpu() {
    let root = tempfile::tempdir().unwrap();
    let dit = golden("dit-tiny-75");
    let run = |output: &str, options: &[&str]| {
        let mut command = Run::tract().command();
        let done = command.current_dir(root.path()).arg(&dit).args(["-o", output]).args(options).output().unwrap();
        assert!(done.status.success(), "{}", text(&done.stderr));
        (text(&done.stdout), text(&done.stderr))
    };
    for options in [&["--dtype", "bf16"][..], &["--dtype", "bf16", "--verify"]] {
        let (report, warning) = run(&format!("{}/model.onnx", options.len()), options);
        assert!(report.contains("note          a bf16 model loads in no CPU runtime"), "{report}");
        assert!(report.contains("verified      not run: no CPU runtime here runs bfloat16 models"), "{report}");
        assert!(
            warning.starts_with("warning: ") && warning.contains("model.onnx: a bf16 model loads in no CPU"),
            "{warning}"
        );
    }
    let (report, warning) = run("quiet/model.onnx", &["--dtype", "bf16", "--quiet"]);
    assert_eq!((report.as_str(), warning.as_str()), ("", ""));
}

/// A file system of 64 KiB, where the test may mount one.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk() {
    let root = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size=64k tmpfs '{0}' || exit 77; '{1}' '{2}' -o '{0}/out/model.onnx'; code=$?; ls -A '{0}'; exit $code",
        root.path().display(),
        env!("CARGO_BIN_EXE_moh-export"),
        golden("dit-tiny-75").display()
    );
    let done = std::process::Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
        .output();
    let Ok(done) = done.map_err(|e| eprintln!("SKIPPED: {e}")) else { return };
    let said = text(&done.stderr);
    if done.status.code() == Some(77) || said.contains("unshare") {
        eprintln!("SKIPPED: {said}");
        return;
    }
    assert!(!done.status.success() && done.stdout.is_empty(), "left: {}", text(&done.stdout));
    assert!(
        said.contains("out/model.onnx: too little room on the disk: ")
            && said.contains(" bytes are needed, 65536 are free"),
        "{said}"
    );
}
