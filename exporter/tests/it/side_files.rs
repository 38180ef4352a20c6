//! What serving stacks read beside a model: contents, and whose files are replaced.

use crate::support::{Run, golden, text};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/checkpoints").join(name)
}

/// Whether an export succeeded, and what it said.
fn run(checkpoint: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Run::tract().command();
    let done = command.arg(checkpoint).args(["--no-verify"]).args(arguments).output().unwrap();
    (done.status.success(), text(&done.stdout) + &text(&done.stderr))
}

fn succeeds(checkpoint: &Path, arguments: &[&str]) -> String {
    let (success, said) = run(checkpoint, arguments);
    assert!(success, "{said}");
    said
}

/// A checkpoint's folder and one for outputs.
struct Case(tempfile::TempDir);

impl Case {
    /// A copy of the checkpoint.
    fn new(checkpoint: &Path) -> Case {
        let case = Case(tempfile::tempdir().unwrap());
        fs::create_dir(case.checkpoint()).unwrap();
        for entry in fs::read_dir(checkpoint).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, case.checkpoint().join(path.file_name().unwrap())).unwrap();
        }
        case
    }

    fn checkpoint(&self) -> PathBuf {
        self.0.path().join("checkpoint")
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Exports to a file or folder here.
    fn export(&self, output: &str, arguments: &[&str]) -> (bool, String) {
        run(&self.checkpoint(), &[&["-o", self.at(output).to_str().unwrap()], arguments].concat())
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.at(name)).unwrap()).unwrap()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap()
    }

    /// Removes a file of the checkpoint.
    fn without(self, name: &str) -> Case {
        fs::remove_file(self.checkpoint().join(name)).unwrap();
        self
    }

    /// Changes the checkpoint's configuration.
    fn configure(self, change: impl FnOnce(&mut Value)) -> Case {
        let mut config = self.json("checkpoint/config.json");
        change(&mut config);
        fs::write(self.at("checkpoint/config.json"), config.to_string()).unwrap();
        self
    }
}

/// Paths of all files below a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match path.is_dir() {
            true => found.extend(names(&path).into_iter().map(|below| format!("{name}/{below}"))),
            false => found.push(name),
        }
    }
    found.sort();
    found
}

/// The files of an export; of those that are texts and not the tokenizer also what they say.
fn shown(folder: &Path) -> String {
    let one = |name: String| match fs::read_to_string(folder.join(&name)) {
        Ok(text) if name != "tokenizer.json" => format!("--- {name}\n{text}\n"),
        _ => format!("--- {name}\n"),
    };
    names(folder).into_iter().map(one).collect()
}

/// A translation model of random weights, its parts in one checkpoint.
fn translator() -> Case {
    let case = Case(tempfile::tempdir().unwrap());
    let config = json!({
        "family": "moa", "encoder_embed_dim": 16, "decoder_embed_dim": 16, "ffn_embed_dim": 32,
        "num_expert": 4, "attention_heads": 2, "head_dim": 8, "share_all_embeddings": true, "vocab_size": 20,
        "encoder_layers": 1, "decoder_layers": 1, "max_target_positions": 60,
    });
    fs::write(case.at("moa.json"), config.to_string()).unwrap();
    let mut command = Run::tract().command();
    let done = command.args(["random", "moa.json", "-o", "checkpoint"]).current_dir(case.0.path()).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    case
}

/// What a shared library of macOS begins with; nothing loads it here.
const LIBRARY: [u8; 4] = [0xcf, 0xfa, 0xed, 0xfe];

#[test]
fn a_language_model() {
    let case = Case::new(&example("shakespeare-moh-llama"));
    let library = case.at("libmoh_ops.so");
    fs::write(&library, LIBRARY).unwrap();
    let (success, said) =
        case.export("out/model.onnx", &["--layout", "onnx", "--with-library", library.to_str().unwrap()]);
    assert!(success, "{said}");
    insta::assert_snapshot!(shown(&case.at("out")));
}

#[test]
fn an_image_classifier() {
    let case = Case::new(&example("digits-moh-vit"));
    assert!(case.export("out/model.onnx", &[]).0);
    insta::assert_snapshot!(shown(&case.at("out")));
}

#[test]
fn a_diffusion_transformer_for_triton() {
    let case = Case::new(&example("digits-moh-dit"));
    let folder = case.at("repository/digits");
    let arguments = ["--triton", folder.to_str().unwrap(), "--with-library", "/opt/moh/libmoh_ops.so"];
    succeeds(&case.checkpoint(), &arguments);
    insta::assert_snapshot!(shown(&case.at("repository")));
}

#[test]
fn both_parts_of_a_translator() {
    let case = translator();
    let (success, said) = case.export("out", &["--part", "both"]);
    assert!(success, "{said}");
    insta::assert_snapshot!(shown(&case.at("out")));
    let refused = case.export("out2/model.onnx", &["--part", "both"]);
    assert!(!refused.0 && refused.1.contains("both parts are three models"), "{}", refused.1);
    assert!(!case.at("out2").exists());
}

/// A model of a repository is as its server wants it: with the batch where requests of different lengths would not batch.
#[test]
fn a_language_model_for_triton() {
    let case = Case::new(&golden("llama-moh-tiny"));
    succeeds(&case.checkpoint(), &["--triton", case.at("r/llama").to_str().unwrap()]);
    let config = case.read("r/llama/config.pbtxt");
    assert!(config.contains("max_batch_size: 0\n") && config.contains("dims: [ -1, 2, -1, 8 ]"), "{config}");
    assert!(!config.contains("dynamic_batching") && !config.contains("model_operations"), "{config}");
    let both = run(&case.checkpoint(), &["--triton", "r/x", "-o", "x.onnx"]);
    assert!(!both.0 && both.1.contains("cannot be used with"), "{}", both.1);
}

#[test]
fn nothing_besides_the_model() {
    let case = Case::new(&example("shakespeare-moh-llama"));
    assert!(case.export("out/model.onnx", &["--bare"]).0);
    assert_eq!(names(&case.at("out")), ["model.onnx", "model.onnx_data"]);
}

/// The exported configuration makes the same model again, and nobody is warned of its new keys.
#[test]
fn exported_configurations_export_again() {
    let cases = [Case::new(&example("shakespeare-moh-llama")), Case::new(&example("digits-moh-vit")), translator()];
    for (case, part) in cases.into_iter().zip([&[][..], &[], &["--part", "both"]]) {
        let [first, second] =
            ["one", "two"].map(|name| if part.is_empty() { format!("{name}/model.onnx") } else { name.into() });
        assert!(case.export(&first, part).0);
        let config = case.at("one/config.json");
        let (success, said) = case.export(&second, &[part, &["--config", config.to_str().unwrap()]].concat());
        assert!(success && !said.contains("warning"), "{said}");
        assert_eq!(names(&case.at("one")), names(&case.at("two")));
        for name in names(&case.at("one")) {
            assert!(
                fs::read(case.at("one").join(&name)).unwrap() == fs::read(case.at("two").join(&name)).unwrap(),
                "{name}"
            );
        }
    }
}

#[test]
fn family_of_the_command_line() {
    let case = Case::new(&golden("llama-moh-tiny"));
    assert!(case.export("out/model.onnx", &["--family", "llama"]).0);
    assert_eq!(case.json("out/config.json")["family"], "llama");
}

#[test]
fn keys_of_the_checkpoint_stay() {
    let case = Case::new(&golden("llama-moh-tiny")).configure(|config| {
        config["model_type"] = json!("mistral");
        config["head_dim"] = json!(8);
        config["transformers.js_config"] = json!({"dtype": "fp32"});
    });
    assert!(case.export("out/model.onnx", &[]).0);
    assert_eq!(case.read("out/config.json"), case.read("checkpoint/config.json"));
    let ours = case.configure(|config| config["model_type"] = json!("moh_llama"));
    assert!(ours.export("ours/model.onnx", &[]).0);
    assert_eq!(ours.json("ours/config.json")["model_type"], "llama");
}

/// From tokenizer.json and a chat template alone.
#[test]
fn a_tokenizer_without_its_configuration() {
    let case = Case::new(&example("shakespeare-moh-llama")).without("tokenizer_config.json");
    fs::write(case.at("checkpoint/chat_template.jinja"), "{{ messages }}").unwrap();
    assert!(case.export("out/model.onnx", &[]).0);
    let expected = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": false, "model_max_length": 512,
        "chat_template": "{{ messages }}",
    });
    assert_eq!(case.json("out/tokenizer_config.json"), expected);
    assert_eq!(case.read("out/chat_template.jinja"), "{{ messages }}");
}

/// Numbers of special tokens come from the tokenizer where no configuration has them, and those of a generation_config.json
/// come first.
#[test]
fn special_tokens() {
    let case = Case::new(&example("shakespeare-moh-llama")).configure(|config| {
        for key in ["bos_token_id", "eos_token_id"] {
            config[key] = Value::Null;
        }
    });
    assert!(case.export("tokenizer/model.onnx", &[]).0);
    let genai = case.json("tokenizer/genai_config.json");
    assert_eq!((&genai["model"]["bos_token_id"], &genai["model"]["eos_token_id"]), (&json!(1), &json!(2)));
    let generation = json!({"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": true, "temperature": 0.5});
    fs::write(case.at("checkpoint/generation_config.json"), generation.to_string()).unwrap();
    assert!(case.export("generation/model.onnx", &[]).0);
    let genai = case.json("generation/genai_config.json");
    assert_eq!((&genai["model"]["eos_token_id"], &genai["model"]["pad_token_id"]), (&json!([2, 0]), &json!(0)));
    assert_eq!((&genai["search"]["do_sample"], &genai["search"]["temperature"]), (&json!(true), &json!(0.5)));
    assert_eq!(case.json("generation/generation_config.json"), generation);
}

/// Where both have one, that of generation_config.json is what chats end with.
#[test]
fn special_tokens_of_two_configurations() {
    let case = Case::new(&example("shakespeare-moh-llama")).configure(|config| config["eos_token_id"] = json!(2));
    fs::write(case.at("checkpoint/generation_config.json"), json!({"eos_token_id": [5, 2]}).to_string()).unwrap();
    assert!(case.export("out/model.onnx", &[]).0);
    assert_eq!(case.json("out/genai_config.json")["model"]["eos_token_id"], json!([5, 2]));
}

#[test]
fn a_translators_token_that_begins_texts() {
    let case = translator().configure(|config| config["decoder_start_token_id"] = json!(3));
    let (success, said) = case.export("out", &["--part", "both"]);
    assert!(success, "{said}");
    assert_eq!(case.json("out/generation_config.json")["decoder_start_token_id"], json!(3));
}

/// genai calls a model with any number of tokens.
#[test]
fn sizes_that_genai_does_not_have() {
    let case = Case::new(&golden("llama-moh-tiny"));
    assert!(case.export("out/model.onnx", &["--sequence", "1"]).0);
    assert!(!names(&case.at("out")).contains(&"genai_config.json".to_owned()));
}

/// A configuration of the model before would have genai call this one.
#[test]
fn a_genai_configuration_of_an_earlier_export() {
    let case = Case::new(&golden("llama-moh-tiny"));
    let note = "genai_config.json: it is of an earlier export under this name, and does not fit this model: remove it";
    assert!(!case.export("out/model.onnx", &[]).1.contains(note));
    let (success, said) = case.export("out/model.onnx", &["--force", "--sequence", "4", "--past", "0"]);
    assert!(success && said.contains(note), "{said}");
    let other = Case::new(&golden("vit-tiny-b"));
    let (success, said) = run(&other.checkpoint(), &["-o", case.at("out/model.onnx").to_str().unwrap(), "--force"]);
    assert!(success && said.contains(note), "{said}");
    // That of another model, and one that fits again.
    fs::create_dir(case.at("others")).unwrap();
    fs::rename(case.at("out/genai_config.json"), case.at("others/genai_config.json")).unwrap();
    assert!(!case.export("others/other.onnx", &["--sequence", "4"]).1.contains(note));
    assert!(!case.export("out/model.onnx", &["--force"]).1.contains(note));
}

/// Verification has files of its own for a while.
#[test]
fn models_may_have_any_name() {
    let case = Case::new(&golden("vit-tiny-b"));
    for name in ["verify.onnx", "model.onnx_data.verify.onnx"] {
        for options in [&[][..], &["--force"]] {
            let (success, said) = case.export(&format!("out/{name}"), options);
            assert!(success && said.contains("verified"), "{said}");
            assert!(case.at(&format!("out/{name}")).is_file(), "{name}");
        }
    }
}

#[test]
fn side_files_of_a_model_for_triton_stay() {
    let case = Case::new(&golden("vit-tiny-b"));
    let (success, said) = run(&case.checkpoint(), &["--triton", case.at("net").to_str().unwrap()]);
    assert!(success, "{said}");
    let before = case.read("net/config.json");
    let other = Case::new(&golden("llama-moh-tiny"));
    let (success, said) = run(&other.checkpoint(), &["-o", case.at("net/model.onnx").to_str().unwrap(), "--force"]);
    assert!(!success && said.contains("1/model.onnx"), "{said}");
    assert_eq!(case.read("net/config.json"), before);
}

/// Programs would use them with the new model; whose they are, nobody can tell, so that they stay.
#[test]
fn files_of_an_earlier_model() {
    const NOTE: &str = "there before this export";
    let case = Case::new(&example("shakespeare-moh-llama"));
    fs::write(case.at("checkpoint/preprocessor_config.json"), "{}").unwrap();
    fs::write(case.at("checkpoint/chat_template.jinja"), "{{ messages }}").unwrap();
    assert!(!case.export("out/model.onnx", &[]).1.contains(NOTE));
    assert!(!case.export("out/model.onnx", &["--force"]).1.contains(NOTE));
    fs::write(case.at("out/preprocessor_config.json"), "{}").unwrap();
    let said = case.export("out/model.onnx", &["--force"]).1;
    let expected = format!(
        "note          {} was there before this export, and is not from this checkpoint, but programs such as moh-run \
         use it with this model: remove it, or replace it with this model's file\n",
        case.at("out/preprocessor_config.json").display()
    );
    assert!(said.contains(&expected), "{said}");

    let other = Case::new(&golden("vit-tiny-b"));
    let output = case.at("out/model.onnx");
    let (success, said) = run(&other.checkpoint(), &["-o", output.to_str().unwrap(), "--force", "--json"]);
    assert!(success, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    let notes: Vec<&str> = report["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    let note = notes.iter().find(|note| note.contains("were there before this export")).unwrap();
    let left = ["generation_config", "tokenizer_config", "preprocessor_config", "tokenizer"]
        .map(|name| name.to_owned() + ".json");
    for name in left.iter().map(String::as_str).chain(["chat_template.jinja"]) {
        assert!(note.contains(case.at("out").join(name).to_str().unwrap()), "{name}: {note}");
        assert!(case.at("out").join(name).exists(), "{name}");
    }
    // Of the user, and beside another model, whose they may be.
    let bare = run(&other.checkpoint(), &["-o", output.to_str().unwrap(), "--force", "--bare"]).1;
    let beside = run(&other.checkpoint(), &["-o", case.at("out/other.onnx").to_str().unwrap()]).1;
    assert!(!bare.contains(NOTE) && !beside.contains(NOTE), "{bare}{beside}");
}

/// By its name, a folder is its own model.onnx first.
#[test]
fn a_model_below_another() {
    let case = Case::new(&golden("vit-tiny-b"));
    let note = format!(
        "note          by the folder's name, {}, moh-run runs {}, not this model: name {}\n",
        case.at("out").display(),
        case.at("out/model.onnx").display(),
        case.at("out/onnx/model.onnx").display()
    );
    assert!(case.export("out/model.onnx", &[]).0);
    for options in [["--layout", "onnx"], ["--for", "web"]] {
        let (success, said) = case.export("out/model.onnx", &[&options[..], &["--force"]].concat());
        assert!(success && said.contains(&note), "{said}");
    }
    // That one runs, and these are named.
    for (output, options) in [("out/model.onnx", "flat"), ("out/other.onnx", "onnx"), ("alone/model.onnx", "onnx")] {
        let (success, said) = case.export(output, &["--layout", options, "--force"]);
        assert!(success && !said.contains("by the folder's name"), "{said}");
    }
}

#[test]
fn a_language_model_without_a_tokenizer() {
    let note = "note          tokenizer.json is not written, because the checkpoint has none";
    let case = Case::new(&example("shakespeare-moh-llama"));
    assert!(!case.export("with/model.onnx", &[]).1.contains(note));
    let (success, said) = case.without("tokenizer.json").export("without/model.onnx", &[]);
    assert!(success && said.contains(note), "{said}");
    let image = Case::new(&golden("vit-tiny-b")).export("out/model.onnx", &[]).1;
    assert!(!image.contains(note), "{image}");
}

#[test]
fn libraries_that_are_none() {
    let case = Case::new(&golden("llama-moh-tiny"));
    let at = |name: &str| case.at(name).to_str().unwrap().to_owned();
    fs::write(at("text.so"), "libmoh_ops").unwrap();
    fs::create_dir(at("folder")).unwrap();
    for name in ["config.json", "model.onnx"] {
        fs::write(case.at("folder").join(name), LIBRARY).unwrap();
    }
    let own = "the export writes a file or folder of this name itself";
    for (library, problem) in [
        ("text.so", "expected a shared library (ELF, Mach-O or PE), found a file of another kind"),
        ("folder", "expected a shared library (ELF, Mach-O or PE), found a folder"),
        ("nowhere.so", "No such file or directory"),
        ("folder/config.json", own),
        ("folder/model.onnx", own),
    ] {
        let (success, said) = case.export("out/model.onnx", &["--with-library", &at(library)]);
        assert!(!success && said.contains(&format!("library {}: {problem}", at(library))), "{said}");
        assert!(said.contains("--with-library takes the file of libmoh_ops"), "{said}");
        assert!(!case.at("out").exists());
    }
    // A path on a server is the server's.
    let (success, said) = run(&case.checkpoint(), &["--triton", &at("r/llama"), "--with-library", "nowhere.so"]);
    assert!(!success && said.contains("library nowhere.so: "), "{said}");
    succeeds(&case.checkpoint(), &["--triton", &at("r/llama"), "--with-library", "/nowhere/libmoh_ops.so"]);
}

#[test]
fn tokenizers_that_are_none() {
    let case = Case::new(&example("shakespeare-moh-llama"));
    let tokenizer = case.at("checkpoint/tokenizer.json");
    let whole = fs::read(&tokenizer).unwrap();
    for broken in [&whole[..whole.len() / 2], b"[]", b""] {
        fs::write(&tokenizer, broken).unwrap();
        let (success, said) = case.export("out/model.onnx", &[]);
        assert!(!success && said.contains("tokenizer.json: the tokenizer cannot be read: "), "{said}");
    }
    assert!(case.export("bare/model.onnx", &["--bare"]).0, "it is not copied");
    fs::remove_file(&tokenizer).unwrap();
    for name in ["tokenizer.json", "vocab.json", "tokenizer_config.json"] {
        let _ = fs::remove_file(case.at("checkpoint").join(name));
        fs::create_dir(case.at("checkpoint").join(name)).unwrap();
        let (success, said) = case.export("out/model.onnx", &[]);
        assert!(!success && said.contains(&format!("{name}: is a directory")), "{said}");
        fs::remove_dir(case.at("checkpoint").join(name)).unwrap();
    }
    assert!(!case.at("out").exists());
}

#[test]
fn how_images_are_prepared() {
    let unknown = Case::new(&golden("vit-tiny-b"));
    let said = unknown.export("out/model.onnx", &[]).1;
    assert!(said.contains("preprocessor_config.json is not written"), "{said}");
    assert!(!unknown.at("out/preprocessor_config.json").exists());
    assert_eq!(unknown.json("out/config.json")["num_labels"], 10);
    let case = unknown.configure(|config| {
        config["image_mean"] = json!(0.5);
        config["image_resize"] = json!(72);
        config["image_interpolation"] = json!("bilinear");
    });
    assert!(case.export("told/model.onnx", &[]).0);
    let processor = case.json("told/preprocessor_config.json");
    let expected = json!({
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": true, "do_resize": true,
        "size": {"shortest_edge": 72}, "resample": 2, "do_center_crop": true, "crop_size": {"height": 64, "width": 64},
        "do_rescale": true, "rescale_factor": 1.0 / 255.0, "do_normalize": true,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.229, 0.224, 0.225],
    });
    assert_eq!(processor, expected);
    let other = Case::new(&golden("vit-tiny-b")).configure(|config| config["image_interpolation"] = json!("lanczos"));
    let (success, said) = other.export("other/model.onnx", &[]);
    assert!(!success && said.contains("expected nearest, bilinear or bicubic, found lanczos"), "{said}");
    assert!(!other.at("other").exists());
}

/// What is rounded where, and whose operators compute the model.
#[test]
fn model_cards_of_quantised_and_of_portable_models() {
    let case = Case::new(&golden("llama-moh-tiny"));
    let card = |name: &str, options: &[&str]| {
        let (success, said) = case.export(&format!("{name}/model.onnx"), options);
        assert!(success, "{said}");
        case.read(&format!("{name}/README.md"))
    };
    let (same, skips) = ("the results are the same.", "heads that a token does not use are skipped");
    let rounds = "`session.qdq_matmulnbits_accuracy_level` is `0`";
    let qdq = card("qdq", &["--quantize", "int8"]);
    assert!(qdq.contains(", as int8, the rest as f32 |") && qdq.contains(same) && qdq.contains(rounds), "{qdq}");
    let moh = card("moh", &["--quantize", "int4", "--form", "moh", "--activations", "int8"]);
    assert!(moh.contains(", as int4, the rest as f32 |") && !moh.contains(rounds), "{moh}");
    assert!(moh.contains("the results are the same, but for activations that one rounds to 8 bits"), "{moh}");
    let portable = card("portable", &["--attention", "portable"]);
    assert!(portable.contains(", as f32 |") && !portable.contains(skips) && !portable.contains(rounds), "{portable}");
    assert!(portable.contains("Its operators are ONNX's own, which compute all heads in every runtime."), "{portable}");
}

#[test]
fn a_model_card_of_the_users_own() {
    let case = Case::new(&golden("dit-tiny-75"));
    fs::create_dir(case.at("out")).unwrap();
    fs::write(case.at("out/README.md"), "mine").unwrap();
    for options in [&[][..], &["--force"]] {
        let (success, said) = case.export("out/model.onnx", options);
        assert!(success && said.contains("README.md: kept as it was, because moh-export did not write it"), "{said}");
        assert_eq!(case.read("out/README.md"), "mine");
    }
    // Ours is replaced, also one that was changed.
    fs::remove_file(case.at("out/README.md")).unwrap();
    assert!(case.export("out/model.onnx", &["--force"]).0);
    let ours = case.read("out/README.md");
    fs::write(case.at("out/README.md"), format!("{ours}more")).unwrap();
    assert!(case.export("out/model.onnx", &["--force"]).0);
    assert_eq!(case.read("out/README.md"), ours);
    // That of another model is not.
    let said = case.export("out/other.onnx", &[]).1;
    assert!(said.contains("README.md: kept as it was, because it is that of model.onnx"), "{said}");
    assert_eq!(case.read("out/README.md"), ours);
}

#[test]
fn a_genai_configuration_of_the_users_own() {
    let case = Case::new(&golden("llama-moh-tiny"));
    fs::create_dir(case.at("out")).unwrap();
    let mine = r#"{"model": {"decoder": {"filename": "model.onnx"}}, "search": {"max_length": 7}}"#;
    fs::write(case.at("out/genai_config.json"), mine).unwrap();
    let (success, said) = case.export("out/model.onnx", &[]);
    assert!(!success && said.contains("genai_config.json exists already") && said.contains("--force"), "{said}");
    assert_eq!(names(&case.at("out")), ["genai_config.json"]);
    assert!(case.export("out/model.onnx", &["--force"]).0);
    assert_ne!(case.read("out/genai_config.json"), mine);
    let ours = case.read("out/genai_config.json");
    let said = case.export("out/other.onnx", &["--dtype", "f16"]).1;
    assert!(said.contains("genai_config.json: kept as it was, because it is that of model.onnx"), "{said}");
    assert_eq!(case.read("out/genai_config.json"), ours);
}

/// An export into the checkpoint's folder changes nothing of the checkpoint.
#[test]
fn the_checkpoints_own_files() {
    let case = Case::new(&example("shakespeare-moh-llama"));
    let before: Vec<_> = names(&case.checkpoint()).into_iter().map(|name| (case.read_bytes(&name), name)).collect();
    for options in [&[][..], &["--force"]] {
        let (success, said) = case.export("checkpoint/model.onnx", options);
        assert!(success && said.contains("config.json: kept as it was, because it is the checkpoint's own"), "{said}");
        for (bytes, name) in &before {
            assert!(case.read_bytes(name) == *bytes, "{name}");
        }
    }
    assert!(case.at("checkpoint/genai_config.json").exists());
}

impl Case {
    fn read_bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.checkpoint().join(name)).unwrap()
    }
}

#[test]
fn nothing_is_left_of_an_export_that_fails() {
    let case = Case::new(&example("shakespeare-moh-llama"));
    let (success, said) = case.export("out/model.onnx", &["--layout", "onnx", "--with-library", "nowhere.so"]);
    assert!(!success && said.contains("nowhere.so"), "{said}");
    fs::write(case.at("checkpoint/generation_config.json"), "[").unwrap();
    let (success, said) = case.export("out/model.onnx", &["--layout", "onnx"]);
    assert!(!success && said.contains("generation_config.json"), "{said}");
    fs::remove_file(case.at("checkpoint/generation_config.json")).unwrap();
    // The weights are refused after everything else has been prepared.
    let (success, said) = case.export("out/model.onnx", &["--layout", "onnx", "--reference", "nowhere.safetensors"]);
    assert!(!success && said.contains("nowhere.safetensors"), "{said}");
    assert!(!case.at("out").exists());
    fs::create_dir_all(case.at("out/onnx/model.onnx_data/blocked")).unwrap();
    let (success, said) = case.export("out/model.onnx", &["--layout", "onnx", "--force"]);
    assert!(!success && said.contains("model.onnx_data"), "{said}");
    assert_eq!(names(&case.at("out")), Vec::<String>::new());
}
