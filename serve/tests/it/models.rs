//! Models to serve, exported once, and servers of them.

use moh_export::{Cache, Options as Export};
use moh_runtime::{Model, Options, RuntimeChoice};
use moh_serve::{ApiKeys, Config, Limits, ModelSpec, Server};
use moh_tasks::generate::{GenerateOptions, GenerationConfig, LanguageModel, Prompts, TextStream};
use moh_tasks::text::load_tokenizer;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// A template as chat models have it.
pub(crate) const TEMPLATE: &str = "{% for message in messages %}{{ message['role'].upper() }}:\n{{ message['content'] }}\n\n{% endfor %}\
     {% if add_generation_prompt %}ROMEO:\n{% endif %}";

fn checkpoint(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/checkpoints").join(name)
}

/// A folder with the models `llama` (cache in place), `concat` (the same, concatenated), `chat` (with a template) and `digits`.
pub(crate) fn folder() -> &'static Path {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let export = |checkpoint: PathBuf, name: &str, cache| {
            let options = Export { verify: Some(false), cache, ..Export::default() };
            moh_export::export(&checkpoint, &folder.path().join(name).join("model.onnx"), &options).unwrap();
        };
        export(checkpoint("shakespeare-moh-llama"), "llama", Some(Cache::InPlace));
        export(checkpoint("shakespeare-moh-llama"), "chat", Some(Cache::InPlace));
        export(checkpoint("shakespeare-moh-llama"), "concat", None);
        export(checkpoint("digits-moh-vit"), "digits", None);
        let config = serde_json::json!({ "chat_template": TEMPLATE, "bos_token": "<s>" });
        std::fs::write(folder.path().join("chat/tokenizer_config.json"), config.to_string()).unwrap();
        // It puts a token before every text, as most do, which a template writes itself.
        let tokenizer = folder.path().join("chat/tokenizer.json");
        let mut begins: serde_json::Value = serde_json::from_slice(&std::fs::read(&tokenizer).unwrap()).unwrap();
        begins["post_processor"] = serde_json::json!({ "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [7], "tokens": ["<s>"] } } });
        std::fs::write(tokenizer, begins.to_string()).unwrap();
        folder
    });
    folder.path()
}

pub(crate) fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, threads: Some(1), ..Options::default() }
}

/// tract, and onnxruntime where it is installed.
pub(crate) fn runtimes() -> Vec<Options> {
    let ort = Options { runtime: RuntimeChoice::Ort, ..tract() };
    match Model::load(folder().join("digits"), &ort) {
        Ok(_) => vec![tract(), ort],
        Err(reason) => {
            assert!(std::env::var_os("MOH_REQUIRE_ORT").is_none(), "MOH_REQUIRE_ORT is set, but: {reason}");
            eprintln!("SKIPPED onnxruntime: {reason}");
            vec![tract()]
        }
    }
}

/// What to serve on any free port: models of [`folder`], also as `name=model`. Measurements are of all servers of a process, so that tests of them
/// need names of their own.
pub(crate) fn config(models: &[&str], runtime: Options) -> Config {
    let spec = |text: &&str| {
        let (name, model) = text.split_once('=').unwrap_or((text, text));
        ModelSpec { name: name.to_owned(), path: folder().join(model) }
    };
    Config {
        models: models.iter().map(spec).collect(),
        listen: "127.0.0.1:0".parse().unwrap(),
        runtime,
        instances: 1,
        keys: None,
        limits: Limits::default(),
    }
}

pub(crate) fn start(models: &[&str]) -> Server {
    Server::start(&config(models, tract())).unwrap()
}

/// A server whose limits are those of `change`.
pub(crate) fn limited(models: &[&str], change: impl FnOnce(&mut Limits)) -> Server {
    let mut config = config(models, tract());
    change(&mut config.limits);
    Server::start(&config).unwrap()
}

/// A server that wants a key, `sk-right`.
pub(crate) fn locked(models: &[&str]) -> Server {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "sk-right\n").unwrap();
    let keys = Some(ApiKeys::from_file(file.path()).unwrap());
    Server::start(&Config { keys, ..config(models, tract()) }).unwrap()
}

/// What `moh-run generate` prints for one prompt at a time.
pub(crate) fn generated(model: &str, runtime: &Options, prompts: &[String], max_tokens: usize) -> Vec<String> {
    let folder = folder().join(model);
    let mut model = LanguageModel::new(Model::load(&folder, runtime).unwrap()).unwrap();
    let tokenizer = load_tokenizer(&folder, model.vocabulary()).unwrap();
    let end = GenerationConfig::from_folder(&folder).unwrap().end;
    let one = |prompt: &String| {
        let ids = tokenizer.encode(prompt, true).unwrap();
        let prompts = Prompts::new(&[ids.iter().map(|&id| i64::from(id)).collect()], 0).unwrap();
        let options = GenerateOptions { max_tokens, stop: &end, ..GenerateOptions::default() };
        let found = model.generate(&prompts, &options, |_| ControlFlow::Continue(())).unwrap();
        let mut text = TextStream::new(&tokenizer, &ids).unwrap();
        let tokens = found.tokens[0].iter().filter(|token| !end.contains(token));
        let pieces: Vec<String> = tokens.map(|&token| text.push(token as u32).unwrap()).collect();
        pieces.concat() + &text.finish().unwrap()
    };
    prompts.iter().map(one).collect()
}
