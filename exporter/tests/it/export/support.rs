//! Copies of golden checkpoints that a test may change, and the model files that exports wrote.

use candle_core::{Device, Tensor};
use moh_export::proto::{ModelProto, TensorProto};
use moh_export::{Error, Options, Report, export};
use prost::Message;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// What an export of `llama-moh-tiny` writes, sorted.
pub(crate) const FILES: [&str; 6] =
    ["README.md", "config.json", "genai_config.json", "generation_config.json", "model.onnx", "model.onnx_data"];

/// A copy of a golden checkpoint, and a folder for the output.
pub(crate) struct Case {
    root: TempDir,
}

impl Case {
    /// A copy of `tests/golden/<name>`.
    pub(crate) fn new(name: &str) -> Case {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
        let case = Case { root: tempfile::tempdir().unwrap() };
        fs::create_dir(case.checkpoint()).unwrap();
        for name in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(name), case.checkpoint().join(name)).unwrap();
        }
        case
    }

    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.root.path().join("checkpoint")
    }

    pub(crate) fn weights(&self) -> PathBuf {
        self.checkpoint().join("model.safetensors")
    }

    /// The output's folder; the first export makes it.
    pub(crate) fn folder(&self) -> PathBuf {
        self.root.path().join("out")
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.folder().join("model.onnx")
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder().join("model.onnx_data")
    }

    /// Puts a file into the output's folder.
    pub(crate) fn place(&self, name: &str, contents: &str) {
        fs::create_dir_all(self.folder()).unwrap();
        fs::write(self.folder().join(name), contents).unwrap();
    }

    /// Puts a folder that holds a file into the output's folder: no file can be renamed to it.
    pub(crate) fn block(&self, name: &str) {
        fs::create_dir_all(self.folder().join(name)).unwrap();
        fs::write(self.folder().join(name).join("kept"), "precious").unwrap();
    }

    pub(crate) fn export(&self, options: &Options) -> Result<Report, Error> {
        export(&self.checkpoint(), &self.output(), options)
    }

    /// Names in the output's folder, hidden ones too, sorted; empty where there is no folder.
    pub(crate) fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder()).into_iter().flatten();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Writes the checkpoint again with other tensors in the place of its own.
    pub(crate) fn rewrite(&self, change: impl Fn(&str, Tensor) -> Tensor) {
        let tensors = candle_core::safetensors::load(self.weights(), &Device::Cpu).unwrap().into_iter();
        let changed = tensors.map(|(name, tensor)| (name.clone(), change(&name, tensor))).collect();
        candle_core::safetensors::save(&changed, self.weights()).unwrap();
    }
}

/// An export without verification.
pub(crate) fn unverified() -> Options {
    Options { verify: Some(false), ..Options::default() }
}

/// The model in a file.
pub(crate) fn read(path: &Path) -> ModelProto {
    ModelProto::decode(fs::read(path).unwrap().as_slice()).unwrap()
}

/// A constant of a model.
pub(crate) fn constant<'a>(model: &'a ModelProto, name: &str) -> &'a TensorProto {
    let constants = &model.graph.as_ref().unwrap().initializer;
    constants.iter().find(|constant| constant.name() == name).unwrap_or_else(|| panic!("there is no {name}"))
}
