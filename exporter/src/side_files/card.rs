//! README.md, the model card: what the model is and how to run it from its folder.

use super::facts::{Facts, Kind};
use super::{SideFile, genai};
use crate::error::Error;
use crate::graph::{Dim, ElementType, Value};
use crate::place::Layout;
use crate::quantize::{Activations, Form, METADATA, Quantize};
use crate::text::{runs, short};
use moh_models::families::Layer;
use std::path::Path;

/// What marks a card that moh-export wrote, before the name of its model.
const MARK: &str = "<!-- Written by moh-export for ";
const MARK_END: &str = ". Without this line, moh-export never replaces this file. -->";

/// The model that a card of ours names; `None` for any other card.
pub(super) fn model_of(text: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(text).ok()?;
    let (_, rest) = text.split_once(MARK)?;
    Some(rest.split_once(MARK_END)?.0.to_owned())
}

/// `library` is the name of our library in the folder; `files` are those that go along.
pub(super) fn write(facts: &Facts<'_>, library: Option<&str>, files: &[SideFile]) -> Result<String, Error> {
    let has = |name: &str| files.iter().any(|file| file.name == name);
    let mut text = front_matter(facts);
    text += &format!("{MARK}{}{MARK_END}\n\n", facts.place.model_from_folder());
    text += &format!("# {}\n\n{}\n\n{}", facts.name(), summary(facts), numbers(facts)?);
    text += &format!("\nThe model is `{}`", facts.place.model_from_folder());
    if facts.kind == Kind::Translator {
        text += ", `decoder_model.onnx` (the first token) and `decoder_with_past_model.onnx` (the others)";
    }
    if facts.external {
        let data = Path::new(facts.place.model_folder).join(&facts.place.data);
        let data = data.display();
        text += &format!("; its weights are `{}`, which must stay beside it", data);
    }
    text += ".\n";
    text += &operators(facts);
    if facts.layout == Layout::Triton {
        return Ok(text + &triton(facts));
    }
    if facts.dtype == ElementType::BF16 {
        text += "\nbfloat16 models load in no CPU runtime.\n";
        return Ok(text);
    }
    let python = Python { facts, library, tokenizer: has("tokenizer.json") };
    text += &python.write();
    if has(genai::NAME) && python.tokenizer {
        text += GENAI;
    }
    if python.tokenizer || has("preprocessor_config.json") {
        text += &optimum(facts);
    }
    if facts.kind != Kind::Translator {
        text += &cpp(facts, library);
        text += &rust(facts, has("tokenizer.json"));
    }
    Ok(text)
}

/// How the model was quantised, if it was.
fn quantised(facts: &Facts<'_>) -> Option<Quantize> {
    facts.graph.metadata.get(METADATA).and_then(|text| serde_json::from_str(text).ok())
}

/// What computes the model, and how its results depend on that.
fn operators(facts: &Facts<'_>) -> String {
    let how = quantised(facts);
    let rounds = how.as_ref().is_some_and(|how| how.activations == Activations::Int8);
    let mut text = match facts.graph.functions.is_empty() {
        true => "Its operators are ONNX's own, which compute all heads in every runtime.\n".to_owned(),
        false => {
            let same = if rounds {
                "the same, but for activations that one rounds to 8 bits and the other does not"
            } else {
                "the same"
            };
            format!(
                "Without the library of the `ai.moh` operators (`libmoh_ops.so`), ONNX runtimes run the operators' function bodies, \
                 which compute all heads. With it, heads that a token does not use are skipped; the results are {same}.\n"
            )
        }
    };
    if how.is_some_and(|how| how.form == Form::Qdq) {
        text += "\nonnxruntime rounds what is multiplied with quantised weights to 8 bits, unless the session's entry \
                 `session.qdq_matmulnbits_accuracy_level` is `0`; `moh_onnx` and `moh-run` set it.\n";
    }
    text
}

fn front_matter(facts: &Facts<'_>) -> String {
    let pipeline = match facts.kind {
        Kind::LanguageModel { .. } => "pipeline_tag: text-generation\n",
        Kind::Classifier { .. } => "pipeline_tag: image-classification\n",
        Kind::Translator => "pipeline_tag: translation\n",
        Kind::Diffusion | Kind::Other => "",
    };
    format!("---\nlibrary_name: onnx\n{pipeline}tags:\n- onnx\n- mixture-of-head-attention\n---\n")
}

fn summary(facts: &Facts<'_>) -> String {
    let what = match facts.kind {
        Kind::LanguageModel { .. } => "A language model",
        Kind::Classifier { .. } => "An image classifier",
        Kind::Diffusion => "A diffusion transformer",
        Kind::Translator => "A translation model",
        Kind::Other => "A model",
    };
    let routed = facts.model.layers().iter().any(|layer| layer.heads.active() < layer.heads.num_heads);
    let how =
        if routed { "in whose attention each token uses some of the heads" } else { "that uses every attention head" };
    format!(
        "{what} of the family `{}` {how}, exported to ONNX (operator set {}).",
        facts.model.family(),
        facts.graph.opset
    )
}

fn numbers(facts: &Facts<'_>) -> Result<String, Error> {
    let (model, workload) = (facts.model, facts.model.workload());
    let layers = model.layers();
    let each = |count: &dyn Fn(&Layer) -> usize| runs(&layers.iter().map(count).collect::<Vec<_>>());
    let macs = model.macs(&workload.sizes)?;
    let per_token = |macs: u64| short(macs as f64 / workload.tokens.max(1) as f64);
    let part = if facts.kind == Kind::Translator { " of the decoder" } else { "" };
    let rows = [
        (format!("attention layers{part}"), layers.len().to_string()),
        ("heads of a layer".to_owned(), each(&|layer| layer.heads.num_heads)),
        ("heads that every token uses".to_owned(), each(&|layer| layer.heads.num_shared_heads)),
        ("heads chosen for a token".to_owned(), each(&|layer| layer.heads.top_k)),
        ("heads in use".to_owned(), format!("{:.1} %", 100.0 * model.active_share())),
        (format!("parameters{part}"), format!("{}, as {}", short(model.parameters() as f64), types(facts))),
        (
            format!("multiply-accumulates a token{part}, at {} tokens", workload.tokens),
            format!(
                "{} with all heads, {} with those in use ({:.1} % less)",
                per_token(macs.dense),
                per_token(macs.routed),
                100.0 * macs.saved()
            ),
        ),
    ];
    let rows: String = rows.iter().map(|(key, value)| format!("| {key} | {value} |\n")).collect();
    Ok(format!("| | |\n|---|---|\n{rows}"))
}

/// What the weights are stored as.
fn types(facts: &Facts<'_>) -> String {
    let dtype = facts.dtype;
    quantised(facts).map_or_else(|| dtype.to_string(), |how| format!("{}, the rest as {dtype}", how.bits.name()))
}

/// A program for onnxruntime's Python package.
struct Python<'a> {
    facts: &'a Facts<'a>,
    library: Option<&'a str>,
    tokenizer: bool,
}

impl Python<'_> {
    fn write(&self) -> String {
        let facts = self.facts;
        if facts.kind == Kind::Translator {
            return String::new();
        }
        let loop_fits = genai::fits(facts);
        let tokenizers = if loop_fits && self.tokenizer { "\nfrom tokenizers import Tokenizer" } else { "" };
        let register = match self.library {
            Some(library) => format!("options.register_custom_ops_library(\"./{library}\")\n"),
            None => "# options.register_custom_ops_library(\"/path/to/libmoh_ops.so\")\n".to_owned(),
        };
        let open = format!(
            "options = ort.SessionOptions()\n{register}session = ort.InferenceSession({:?}, options, \
             providers=[\"CPUExecutionProvider\"])\n",
            facts.place.model_from_folder()
        );
        let packages = if tokenizers.is_empty() { "" } else { " tokenizers" };
        let run = match &facts.kind {
            Kind::LanguageModel { layers, kv_num_heads, head_dim, .. } if loop_fits => {
                self.generate(*layers, *kv_num_heads, *head_dim)
            }
            _ => self.call(),
        };
        format!(
            "\n## Python\n\n    pip install onnxruntime numpy{packages}\n\n```python\nimport numpy as np\nimport onnxruntime as \
             ort{tokenizers}\n\n{open}\n{run}```\n"
        )
    }

    /// Greedy generation.
    fn generate(&self, layers: usize, heads: usize, width: usize) -> String {
        let (prompt, shown) = match self.tokenizer {
            true => (
                "tokenizer = Tokenizer.from_file(\"tokenizer.json\")\ntokens = tokenizer.encode(\"Once upon a time\").ids\n",
                "print(tokenizer.decode(tokens))\n",
            ),
            false => ("tokens = [1]\n", "print(tokens)\n"),
        };
        let names = "[f\"{layer}.{kind}\" for layer in range(LAYERS) for kind in (\"key\", \"value\")]";
        let names = names.replace("LAYERS", &layers.to_string());
        let end = match self.facts.tokens.end[..] {
            [] => String::new(),
            ref ids => format!("    if tokens[-1] in {ids:?}:\n        break\n"),
        };
        format!(
            "{prompt}names = {names}\n\
             caches = {{name: np.zeros((1, {heads}, 0, {width}), np.{float}) for name in names}}\n\
             new = tokens\n\
             for _ in range(50):\n\
             \x20   feeds = {{f\"past_key_values.{{name}}\": caches[name] for name in names}}\n\
             \x20   feeds[\"input_ids\"] = np.array([new])\n\
             \x20   feeds[\"attention_mask\"] = np.ones((1, len(tokens)), np.int64)\n\
             \x20   feeds[\"position_ids\"] = np.arange(len(tokens) - len(new), len(tokens))[None]\n\
             \x20   logits, *present = session.run([\"logits\"] + [f\"present.{{name}}\" for name in names], feeds)\n\
             \x20   caches = dict(zip(names, present))\n\
             \x20   new = [int(logits[0, -1].argmax())]\n\
             \x20   tokens = tokens + new\n\
             {end}{shown}",
            float = self.float(),
        )
    }

    fn float(&self) -> &'static str {
        if self.facts.dtype == ElementType::F16 { "float16" } else { "float32" }
    }

    /// One call, with inputs of the right shapes.
    fn call(&self) -> String {
        let inputs = self.facts.graph.inputs.iter().map(|input| {
            let (fill, ty) = match input.ty {
                ElementType::I64 => ("ones", "int64"),
                ElementType::U8 | ElementType::U4 => ("zeros", "uint8"),
                ElementType::I8 | ElementType::I4 => ("zeros", "int8"),
                ElementType::Bool => ("ones", "bool"),
                ElementType::F32 => ("zeros", "float32"),
                ElementType::F16 | ElementType::BF16 => ("zeros", self.float()),
            };
            let dims: Vec<String> = input.dims.iter().map(|dim| example(dim).to_string()).collect();
            let comma = if dims.len() == 1 { "," } else { "" };
            format!("    {:?}: np.{fill}(({}{comma}), np.{ty}),  # {}\n", input.name, dims.join(", "), described(input))
        });
        let inputs: String = inputs.collect();
        let output = self.facts.graph.outputs.first().map_or("", |output| output.name.as_str());
        format!("inputs = {{\n{inputs}}}\noutputs = session.run([{output:?}], inputs)\nprint(outputs[0].shape)\n")
    }
}

/// A size for a dimension, a sum of named ones or a number.
fn example(dim: &Dim) -> usize {
    match dim {
        Dim::Fixed(n) => *n,
        Dim::Unknown => 1,
        Dim::Named(sum) => {
            let part = |name: &str| match name {
                "batch" => 1,
                name if name.contains("past") => 0,
                name => name.parse().unwrap_or(4),
            };
            sum.split('+').map(|name| part(name.trim())).sum()
        }
    }
}

fn described(value: &Value) -> String {
    let dims: Vec<String> = value.dims.iter().map(Dim::to_string).collect();
    format!("({})", dims.join(", "))
}

const GENAI: &str = r#"
## onnxruntime-genai

    pip install onnxruntime onnxruntime-genai

```python
import onnxruntime_genai as og

model = og.Model(".")
tokenizer = og.Tokenizer(model)
params = og.GeneratorParams(model)
params.set_search_options(max_length=50)
generator = og.Generator(model, params)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```
"#;

fn optimum(facts: &Facts<'_>) -> String {
    // Optimum looks for the usual names, in the folder `onnx` too, where it is told no other one. Told of a subfolder, it would
    // look for generation_config.json there.
    let file = &facts.place.model;
    let named = if file == "model.onnx" { String::new() } else { format!(", file_name={file:?}") };
    let code = match facts.kind {
        Kind::LanguageModel { .. } => format!(
            "from optimum.onnxruntime import ORTModelForCausalLM\nfrom transformers import AutoTokenizer\n\n\
             model = ORTModelForCausalLM.from_pretrained(\".\"{named}, use_io_binding=False)\n\
             tokenizer = AutoTokenizer.from_pretrained(\".\")\n\
             tokens = tokenizer(\"Once upon a time\", return_tensors=\"pt\")\n\
             print(tokenizer.decode(model.generate(**tokens, max_length=50)[0]))\n"
        ),
        Kind::Classifier { .. } => format!(
            "from optimum.onnxruntime import ORTModelForImageClassification\n\
             from PIL import Image\nfrom transformers import AutoImageProcessor, pipeline\n\n\
             model = ORTModelForImageClassification.from_pretrained(\".\"{named})\n\
             processor = AutoImageProcessor.from_pretrained(\".\", use_fast=False)\n\
             classify = pipeline(\"image-classification\", model=model, image_processor=processor)\n\
             print(classify(Image.new(\"RGB\", (256, 256)))[0])  # or the path of a picture\n"
        ),
        Kind::Translator => {
            "from optimum.onnxruntime import ORTModelForSeq2SeqLM\nfrom transformers import AutoTokenizer\n\n\
             model = ORTModelForSeq2SeqLM.from_pretrained(\".\")\n\
             tokenizer = AutoTokenizer.from_pretrained(\".\")\n\
             tokens = tokenizer(\"Guten Morgen\", return_tensors=\"pt\")\n\
             print(tokenizer.decode(model.generate(**tokens)[0]))\n"
                .to_owned()
        }
        Kind::Diffusion | Kind::Other => return String::new(),
    };
    let pillow = if matches!(facts.kind, Kind::Classifier { .. }) { " pillow" } else { "" };
    format!("\n## Optimum\n\n    pip install optimum-onnx onnxruntime{pillow}\n\n```python\n{code}```\n")
}

fn cpp(facts: &Facts<'_>, library: Option<&str>) -> String {
    let library = library.map_or("/path/to/libmoh_ops.so".to_owned(), |library| format!("./{library}"));
    format!(
        "\n## C++\n\n```cpp\n#include <onnxruntime_cxx_api.h>\n\nint main() {{\n  Ort::Env env;\n  Ort::SessionOptions options;\n  \
         options.RegisterCustomOpsLibrary({library:?});  // or leave it out\n  \
         Ort::Session session(env, {:?}, options);\n}}\n```\n",
        facts.place.model_from_folder()
    )
}

fn rust(facts: &Facts<'_>, tokenizer: bool) -> String {
    let model = facts.place.model_from_folder();
    let command = match facts.kind {
        Kind::LanguageModel { .. } if tokenizer => Some(format!("generate {model} --prompt \"Once upon a time\"")),
        Kind::LanguageModel { .. } => Some(format!("generate {model} --prompt \"1\" --ids")),
        Kind::Classifier { .. } => Some(format!("classify {model} picture.png")),
        Kind::Diffusion => Some(format!("sample {model} --class 1 -o samples.png")),
        Kind::Translator | Kind::Other => None,
    };
    let command = command.map_or(String::new(), |command| format!("\n## moh-run\n\n    moh-run {command}\n"));
    format!(
        "{command}\n## Rust, with the crate ort\n\n```rust\nlet session = ort::session::Session::builder()?\n    \
         .with_operator_library(\"/path/to/libmoh_ops.so\")? // or leave it out\n    .commit_from_file({model:?})?;\n```\n"
    )
}

fn triton(facts: &Facts<'_>) -> String {
    let name = facts.place.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = if name.is_empty() { "the model's name".to_owned() } else { format!("`{name}`") };
    format!(
        "\n## Triton\n\nThis folder is {name} in a model repository. In the repository's folder:\n\n    \
         tritonserver --model-repository \"$PWD\"\n\nTriton 24.05 or newer loads the model. `--with-library` of the export \
         names the library in `config.pbtxt`.\n"
    )
}
