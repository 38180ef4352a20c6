//! `--reference`: the exported model against the outputs of the published PyTorch code, in each runtime that is here.

use crate::support::{Run, golden, text};
use candle_core::{DType, Device, Tensor, safetensors};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

type Tensors = HashMap<String, Tensor>;

/// Inputs and outputs of the published code, under the exported model's names.
fn reference(case: &str) -> Tensors {
    let tensors = safetensors::load(golden(case).join("reference.safetensors"), &Device::Cpu).unwrap();
    let get = |name: &str| tensors[name].clone();
    // Time comes first in fairseq, and its masks are 1 at padding.
    let batch_first = |name: &str| get(name).transpose(0, 1).unwrap().contiguous().unwrap();
    let seen = |name: &str| get(name).eq(0u8).unwrap();
    let named: Vec<(&str, Tensor)> = match case {
        "dit-tiny-75" => vec![
            ("hidden_states", get("x")),
            ("timestep", get("t")),
            ("class_labels", get("y")),
            ("out_hidden_states", get("out")),
        ],
        "llama-moh-tiny" => {
            let (rows, length) = get("input_ids").dims2().unwrap();
            let positions = Tensor::arange(0i64, length as i64, &Device::Cpu).unwrap();
            vec![
                ("input_ids", get("input_ids")),
                ("attention_mask", get("attention_mask")),
                ("position_ids", positions.broadcast_as((rows, length)).unwrap().contiguous().unwrap()),
                ("logits", get("logits")),
            ]
        }
        "moa-enc-tiny" => vec![
            ("inputs_embeds", batch_first("x")),
            ("attention_mask", seen("padding_mask")),
            ("last_hidden_state", batch_first("out")),
        ],
        "moa-dec-tiny" => vec![
            ("inputs_embeds", batch_first("x")),
            ("encoder_hidden_states", batch_first("encoder_out")),
            ("encoder_attention_mask", seen("encoder_padding_mask")),
            ("last_hidden_state", batch_first("out")),
        ],
        _ => vec![("pixel_values", get("pixel_values")), ("logits", get("logits"))],
    };
    named.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
}

const CASES: [(&str, &str); 5] = [
    ("dit-tiny-75", "out_hidden_states"),
    ("llama-moh-tiny", "logits"),
    ("moa-enc-tiny", "last_hidden_state"),
    ("moa-dec-tiny", "last_hidden_state"),
    ("vit-tiny-b", "logits"),
];

/// A folder for references and outputs.
struct Case {
    root: tempfile::TempDir,
    checkpoint: PathBuf,
    tensors: Tensors,
}

impl Case {
    fn new(name: &str) -> Case {
        Case { root: tempfile::tempdir().unwrap(), checkpoint: golden(name), tensors: reference(name) }
    }

    fn set(mut self, name: &str, tensor: Tensor) -> Case {
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    fn change(mut self, name: &str, change: impl Fn(&Tensor) -> Tensor) -> Case {
        let tensor = change(&self.tensors[name]);
        self.tensors.insert(name.to_owned(), tensor);
        self
    }

    fn without(mut self, name: &str) -> Case {
        self.tensors.remove(name).unwrap();
        self
    }

    fn output(&self) -> PathBuf {
        self.root.path().join("out/model.onnx")
    }

    fn run(&self, run: &Run, options: &[&str]) -> (bool, String) {
        let _ = fs::remove_dir_all(self.output().parent().unwrap());
        let file = self.root.path().join("ref.safetensors");
        safetensors::save(&self.tensors, &file).unwrap();
        self.run_on(run, &file, options)
    }

    fn run_on(&self, run: &Run, file: &Path, options: &[&str]) -> (bool, String) {
        let mut command = run.command();
        command.arg(&self.checkpoint).arg("-o").arg(self.output()).arg("--reference").arg(file).args(options);
        let done = command.output().unwrap();
        (done.status.success(), text(&done.stdout) + &text(&done.stderr))
    }

    fn agrees(&self, run: &Run, options: &[&str]) -> String {
        let (success, said) = self.run(run, options);
        assert!(success && self.output().exists(), "{said}");
        said
    }

    /// The export fails with messages that hold `parts`, and leaves nothing.
    fn fails(&self, run: &Run, options: &[&str], parts: &[&str]) {
        let (success, said) = self.run(run, options);
        assert!(!success && !self.output().parent().unwrap().exists(), "{said}");
        for part in [&["ref.safetensors"], parts].concat() {
            assert!(said.contains(part), "{part:?} is not in:\n{said}");
        }
    }
}

/// Adds to the element in the middle of a tensor.
fn tampered(tensor: &Tensor) -> Tensor {
    let mut values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let largest = values.iter().fold(1f32, |largest, v| largest.max(v.abs()));
    let middle = values.len() / 2;
    values[middle] += 1e-3 * largest;
    Tensor::from_vec(values, tensor.dims(), &Device::Cpu).unwrap()
}

#[test]
fn outputs_of_the_published_code_agree() {
    for run in Run::all() {
        for (name, output) in CASES {
            let said = Case::new(name).agrees(&run, &[]);
            let line = said.lines().find(|line| line.starts_with("reference ")).unwrap_or_else(|| panic!("{said}"));
            assert!(line.contains("ref.safetensors") && line.contains(run.name), "{line}");
            assert!(line.contains(&format!("{output} off by at most ")), "{line}");
            assert!(line.contains(" (allowed 2e-4) from your outputs"), "{line}");
            let line = said.lines().find(|line| line.starts_with("verified ")).unwrap();
            assert!(line.contains("our own implementation (candle), not with your PyTorch code"), "{line}");
        }
    }
}

#[test]
fn tampered_outputs_are_refused() {
    for run in Run::all() {
        for (name, output) in CASES {
            let case = Case::new(name).change(output, tampered);
            let shape = case.tensors[output].dims().to_vec();
            let mut rest = shape.iter().product::<usize>() / 2;
            let mut index = Vec::new();
            for size in shape.iter().rev() {
                index.insert(0, rest % size);
                rest /= size;
            }
            let element = format!("{output}{index:?}: expected ");
            case.fails(&run, &["--no-verify"], &[&element, "allowed", "1 of", run.name, "--reference-tolerance"]);
        }
    }
}

#[test]
fn a_tolerance_of_ones_own() {
    let run = Run::tract();
    let case = Case::new("vit-tiny-b").change("logits", tampered);
    let said = case.agrees(&run, &["--reference-tolerance", "1e-2", "--no-verify"]);
    assert!(said.contains("(allowed 1e-2)") && said.contains("verified      not run: as asked for"), "{said}");
    Case::new("vit-tiny-b").fails(&run, &["--reference-tolerance", "1e-12"], &["logits[", "1e-12 of"]);
    for wrong in ["0", "-1", "nan", "inf", "x"] {
        let (success, said) = case.run(&run, &[&format!("--reference-tolerance={wrong}")]);
        assert!(!success && said.contains("--reference-tolerance") && said.contains("a number above 0"), "{said}");
    }
}

#[test]
fn numbers_of_other_types() {
    let to = |dtype| move |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
    let case = Case::new("dit-tiny-75")
        .change("hidden_states", to(DType::F64))
        .change("timestep", to(DType::F32))
        .change("class_labels", to(DType::U8))
        .change("out_hidden_states", to(DType::F64));
    assert!(case.agrees(&Run::tract(), &["--no-verify"]).contains("(allowed 2e-4)"));
    // What was rounded is off by that.
    for (dtype, allowed) in [(DType::F16, "2e-2"), (DType::BF16, "1e-1")] {
        let said =
            Case::new("dit-tiny-75").change("out_hidden_states", to(dtype)).agrees(&Run::tract(), &["--no-verify"]);
        assert!(said.contains(&format!("(allowed {allowed})")), "{said}");
    }
    let said = Case::new("dit-tiny-75").agrees(&Run::tract(), &["--dtype", "f16"]);
    assert!(said.contains("out_hidden_states off by at most") && said.contains("(allowed 2e-2) from"), "{said}");
}

#[test]
fn padding_is_left_out() {
    let tensors = safetensors::load(golden("llama-moh-tiny").join("reference.safetensors"), &Device::Cpu).unwrap();
    let padded = |name: &str| tensors[&format!("padded.{name}")].clone();
    let mask = padded("attention_mask");
    let (rows, length) = mask.dims2().unwrap();
    let seen = mask.flatten_all().unwrap().to_vec1::<i64>().unwrap();
    let padding = seen.iter().filter(|&&seen| seen == 0).count();
    assert!(padding > 0);
    // What PyTorch makes of padding is anything.
    let mut logits = padded("logits").flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let width = logits.len() / (rows * length);
    for (row, _) in logits.chunks_mut(width).zip(&seen).filter(|(_, seen)| **seen == 0) {
        row.fill(f32::NAN);
    }
    let case = Case::new("llama-moh-tiny")
        .set("input_ids", padded("input_ids"))
        .set("attention_mask", mask.to_dtype(DType::U8).unwrap())
        .set("position_ids", padded("position_ids"))
        .set("logits", Tensor::from_vec(logits, (rows, length, width), &Device::Cpu).unwrap());
    for run in Run::all() {
        let said = case.agrees(&run, &["--no-verify"]);
        assert!(said.contains(&format!("; {padding} padded positions left out")), "{said}");
    }
    let last = case.change("logits", |logits| {
        let mut values = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        *values.last_mut().unwrap() += 1.0;
        Tensor::from_vec(values, logits.dims(), &Device::Cpu).unwrap()
    });
    last.fails(&Run::tract(), &["--no-verify"], &["expected", "1 of"]);
}

#[test]
fn fixed_sizes_and_gates() {
    let run = Run::tract();
    let case = Case::new("llama-moh-tiny");
    case.agrees(&run, &["--no-verify", "--batch", "2", "--sequence", "12", "--past", "0"]);
    case.fails(&run, &["--batch", "3"], &["\"input_ids\" has shape [2, 12]", "[3, 12]"]);
    case.fails(&run, &["--past", "4"], &["\"attention_mask\" has shape [2, 12]", "16"]);

    // Gates are outputs where they are asked for.
    let tensors = safetensors::load(golden("dit-tiny-75").join("reference.safetensors"), &Device::Cpu).unwrap();
    let gates = "gates.blocks.2.attn";
    let case = Case::new("dit-tiny-75").set(gates, tensors[gates].clone());
    let said = case.agrees(&run, &["--no-verify", "--output-gates"]);
    assert!(said.contains("gates.blocks.2.attn off by at most"), "{said}");
    case.fails(&run, &["--no-verify"], &[&format!("tensor {gates:?} is named as no input or output")]);
}

#[test]
fn files_that_do_not_fit() {
    let run = Run::tract();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let dit = || Case::new("dit-tiny-75");
    let llama = || Case::new("llama-moh-tiny");
    let two = dit().set("x", zeros(&[1], DType::F32)).set("t", zeros(&[1], DType::F32));
    let ports = "its inputs are hidden_states, timestep, class_labels; its outputs are out_hidden_states";
    two.fails(&run, &[], &["tensors \"t\", \"x\" are named as no input or output of the model", ports]);
    llama().set("x", zeros(&[1], DType::F32)).fails(&run, &[], &["tensor \"x\" is", "past_key_values.0.key", " more;"]);
    llama().without("position_ids").fails(&run, &[], &["lacks the model's input position_ids (batch, sequence)"]);
    let none = llama().without("position_ids").without("input_ids");
    none.fails(&run, &[], &["lacks the model's inputs input_ids, position_ids"]);
    dit().without("out_hidden_states").fails(&run, &[], &["holds no output of the model", "out_hidden_states"]);
    let rows = dit().set("timestep", zeros(&[2], DType::F32));
    rows.fails(&run, &[], &["\"timestep\" has shape [2], expected (batch), here [3] by hidden_states"]);
    let mask = llama().set("attention_mask", zeros(&[2, 13], DType::I64));
    mask.fails(&run, &[], &["\"attention_mask\" has shape [2, 13], expected (batch, past+sequence), here [2, 12]"]);
    let ids = llama().set("input_ids", zeros(&[2, 12], DType::F32));
    ids.fails(&run, &[], &["\"input_ids\" has type F32, expected integers"]);
    let labels = dit().set("out_hidden_states", zeros(&[3, 8, 8, 8], DType::I64));
    labels.fails(&run, &[], &["\"out_hidden_states\" has type I64, expected floating-point numbers"]);
    let infinite = dit().change("out_hidden_states", |x| (x * f64::INFINITY).unwrap());
    infinite.fails(&run, &[], &["out_hidden_states[0, 0, 0, 0] is", "nothing can be compared"]);
    let bf16 = dit();
    bf16.fails(&run, &["--dtype", "bf16"], &["no CPU runtime here runs bfloat16 models"]);

    let (success, said) = dit().run_on(&run, Path::new("/nowhere/ref.safetensors"), &[]);
    assert!(!success && said.contains("/nowhere/ref.safetensors: No such file"), "{said}");
    let (success, said) = dit().run_on(&run, &golden("dit-tiny-75").join("config.json"), &[]);
    assert!(!success && said.contains("config.json: not a safetensors file"), "{said}");
    let tolerance = run.command().args(["x", "-o", "x.onnx", "--reference-tolerance", "1"]).output().unwrap();
    assert!(text(&tolerance.stderr).contains("--reference"), "{}", text(&tolerance.stderr));
}
