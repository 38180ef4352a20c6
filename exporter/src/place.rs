//! Where an export's files lie in its folder.

use moh_runtime::MODEL_FILE;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// How the files of an export are arranged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The model and its weights beside config.json.
    #[default]
    Flat,
    /// In the folder `onnx` below config.json, as Optimum and transformers.js like it.
    Onnx,
    /// A model of a Triton model repository: the model in the folder `1`, config.pbtxt above it.
    #[value(skip)]
    Triton,
}

impl Layout {
    pub(crate) const ALL: [Layout; 3] = [Layout::Flat, Layout::Onnx, Layout::Triton];

    /// The folder of the model below that of the other files.
    pub(crate) fn model_folder(self) -> &'static str {
        match self {
            Layout::Flat => "",
            Layout::Onnx => "onnx",
            Layout::Triton => "1",
        }
    }
}

/// The paths of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The folder of config.json and the other side files.
    pub(crate) folder: PathBuf,
    /// The folder of the model below it; may be empty.
    pub(crate) model_folder: &'static str,
    /// The model's name.
    pub(crate) model: String,
    /// The name of the weights beside it.
    pub(crate) data: String,
}

impl Place {
    /// The paths of a model to be written to `output`, whose name is UTF-8, but for what the layout puts between folder and name.
    pub fn new(output: &Path, layout: Layout) -> Place {
        Place {
            folder: folder_of(output).to_owned(),
            model_folder: layout.model_folder(),
            model: output.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            data: data_name(output),
        }
    }

    /// The model's path.
    pub fn output(&self) -> PathBuf {
        self.beside_model(&self.model)
    }

    /// The path of a file beside the model.
    pub(crate) fn beside_model(&self, name: &str) -> PathBuf {
        match (self.folder == Path::new("."), self.model_folder) {
            // As the user wrote it.
            (true, "") => PathBuf::from(name),
            _ => self.folder.join(self.model_folder).join(name),
        }
    }

    /// The path of a side file.
    pub(crate) fn side(&self, name: &str) -> PathBuf {
        if self.folder == Path::new(".") { PathBuf::from(name) } else { self.folder.join(name) }
    }

    /// The model's path from the side files' folder, with `/` between its parts.
    pub(crate) fn model_from_folder(&self) -> String {
        match self.model_folder {
            "" => self.model.clone(),
            folder => format!("{folder}/{}", self.model),
        }
    }

    /// What to know where the folder's name means another model to our programs, which look into the folder before those below it.
    pub(crate) fn shadowed(&self) -> Option<String> {
        if self.model_folder.is_empty() || self.model != MODEL_FILE {
            return None;
        }
        let run = moh_runtime::find_model(&self.folder).ok()?;
        let (folder, own) = (self.folder.display(), self.output());
        let is_other = run != self.folder.join(self.model_folder).join(&self.model);
        is_other.then(|| {
            let (run, own) = (run.display(), own.display());
            format!("by the folder's name, {folder}, moh-run runs {run}, not this model: name {own}")
        })
    }
}

/// Name of the weight file that belongs to a model file.
fn data_name(model: &Path) -> String {
    format!("{}_data", model.file_name().unwrap_or_default().to_string_lossy())
}

/// The folder that `output` is in.
fn folder_of(output: &Path) -> &Path {
    output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_each_layout() {
        let paths = |output: &str, layout| {
            let place = Place::new(Path::new(output), layout);
            [place.output(), place.side("config.json"), place.model_from_folder().into()]
                .map(|p| p.display().to_string())
        };
        assert_eq!(paths("out/m.onnx", Layout::Flat), ["out/m.onnx", "out/config.json", "m.onnx"]);
        assert_eq!(paths("out/m.onnx", Layout::Onnx), ["out/onnx/m.onnx", "out/config.json", "onnx/m.onnx"]);
        assert_eq!(paths("r/n/model.onnx", Layout::Triton), ["r/n/1/model.onnx", "r/n/config.json", "1/model.onnx"]);
        assert_eq!(paths("m.onnx", Layout::Flat), ["m.onnx", "config.json", "m.onnx"]);
    }
}
