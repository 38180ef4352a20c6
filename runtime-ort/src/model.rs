//! A loaded model.

use crate::backend::{Backend, Loaded};
use crate::element::ElementType;
use crate::error::{Error, Result};
use crate::header;
use crate::info::{self, TensorInfo};
use crate::interrupt::Interrupt;
use crate::options::{Notice, Options};
use crate::value::Value;
use moh_operators::{DOMAIN, VERSION};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The name that exported models have in their folder.
pub const MODEL_FILE: &str = "model.onnx";

/// Folders below an exported model's folder that an export may put the model into: transformers.js's, and a version in a
/// Triton repository.
const MODEL_FOLDERS: [&str; 2] = ["onnx", "1"];

/// As [`Model::files_folder`], of the .onnx file `model`.
fn files_folder(model: &Path) -> PathBuf {
    let own = model.parent().filter(|own| !own.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let has_config = |folder: &Path| folder.join("config.json").is_file();
    // Of "." the name is known only then.
    let absolute = std::path::absolute(own).unwrap_or_else(|_| own.to_owned());
    let below = absolute.file_name().is_some_and(|name| MODEL_FOLDERS.iter().any(|folder| name == *folder));
    let above = absolute.parent().filter(|above| below && !has_config(own) && has_config(above));
    above.unwrap_or(own).to_owned()
}

/// Gets the name, the operator and the time of a node that has run.
pub type OnNode<'a> = dyn FnMut(&str, &str, Duration) + 'a;

/// An exported model in a runtime, ready to run.
pub struct Model {
    path: PathBuf,
    files: PathBuf,
    backend: Backend,
    inputs: Vec<TensorInfo>,
    outputs: Vec<TensorInfo>,
    /// Rows to choose from, by the inputs that do.
    rows: BTreeMap<String, u64>,
    metadata: BTreeMap<String, String>,
    notices: Vec<Notice>,
    profiling: bool,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("path", &self.path).field("runtime", &self.runtime_name()).finish_non_exhaustive()
    }
}

impl Model {
    /// The folder of the files that go along with the model, such as config.json: the model's own, or the one above, where the
    /// model lies in a folder `onnx` or, in a Triton repository, `1`; as it was when the model was loaded.
    pub fn files_folder(&self) -> &Path {
        &self.files
    }

    /// Loads the model in `path`: an .onnx file with its external data beside it, or a folder that holds
    /// [`MODEL_FILE`], maybe in a folder `onnx` or `1`.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Read`] or [`Error::Malformed`] for the file, [`Error::Link`] for weights in a checkpoint, [`Error::OrtLibrary`], [`Error::OrtMissing`]
    /// or [`Error::OpsLibrary`] for the libraries, [`Error::Load`] or [`Error::Unsupported`] for what the runtime refuses.
    pub fn load(path: impl AsRef<Path>, options: &Options) -> Result<Model> {
        let path = find_model(path.as_ref())?;
        let header = header::read(&path)?;
        if let Some(found) = header.opset(DOMAIN).filter(|&found| found > VERSION.unsigned_abs()) {
            let reason = format!("it uses version {found} of the {DOMAIN} operators, this program knows {VERSION}");
            return Err(Error::Unsupported { path, reason });
        }
        header.links.iter().try_for_each(|link| link.check(&path))?;
        let Loaded { model, inputs, outputs, metadata, notices } = Backend::load(&path, &header, options)?;
        let profiling = options.profile.is_some();
        let files = files_folder(&path);
        Ok(Model { path, files, backend: model, inputs, outputs, rows: header.rows, metadata, notices, profiling })
    }

    /// The .onnx file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The inputs, in the model's order.
    pub fn inputs(&self) -> &[TensorInfo] {
        &self.inputs
    }

    /// The outputs, in the model's order.
    pub fn outputs(&self) -> &[TensorInfo] {
        &self.outputs
    }

    /// The model's metadata properties.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// `onnxruntime` or `tract`.
    pub fn runtime_name(&self) -> &'static str {
        self.backend.name()
    }

    /// What the user may want to know about how the model runs.
    pub fn notices(&self) -> &[Notice] {
        &self.notices
    }

    /// Runs the model on every input, by name; gives its outputs in the order of [`Model::outputs`].
    ///
    /// # Errors
    /// [`Error::Inputs`] for inputs that do not fit, [`Error::Run`] where the runtime fails.
    pub fn run<N: Into<String>>(&mut self, inputs: impl IntoIterator<Item = (N, Value)>) -> Result<Vec<Value>> {
        let given = inputs.into_iter().map(|(name, value)| (name.into(), value)).collect();
        let ordered = info::in_order(&self.path, &self.inputs, &self.rows, given)?;
        self.backend.run(ordered, &[])
    }

    /// As [`Model::run`], until another thread breaks the run off: an operator that has begun is computed to its end.
    ///
    /// # Errors
    /// As [`Model::run`]; [`Error::Interrupted`] for a run that was broken off.
    pub fn run_until(&mut self, inputs: Vec<(String, Value)>, interrupt: &Interrupt) -> Result<Vec<Value>> {
        let ordered = info::in_order(&self.path, &self.inputs, &self.rows, inputs)?;
        let broken_off = || Error::Interrupted { path: self.path.clone() };
        let outputs = self.backend.run_until(ordered, interrupt);
        outputs.map_err(|error| if interrupt.is_interrupted() { broken_off() } else { error })
    }

    /// Zeros where [`Model::run_in_place`] can write.
    ///
    /// # Errors
    /// [`Error::Length`] where the number of elements is beyond what memory can hold, [`Error::Run`] where the runtime has no memory for them,
    /// [`Error::ElementType`] for a type that the runtime does not have.
    pub fn zeros(&self, ty: ElementType, shape: impl Into<Vec<usize>>) -> Result<Value> {
        self.backend.zeros(ty, shape.into())
    }

    /// As [`Model::run`]; the outputs of `shared` take the memory of their inputs, (input's name, output's number), if nobody else
    /// holds a clone of the value and a run of this model or [`Model::zeros`] has made it. The model must not read such an input after it has written
    /// the output, and the two must have the same shape: a cache that is updated in place. A run that fails may have changed it.
    ///
    /// # Errors
    /// As [`Model::run`]; [`Error::Run`] for an output of another shape than its input.
    pub fn run_in_place(&mut self, inputs: Vec<(String, Value)>, shared: &[(&str, usize)]) -> Result<Vec<Value>> {
        let pairs = self.pairs(shared);
        let ordered = info::in_order(&self.path, &self.inputs, &self.rows, inputs)?;
        self.backend.run(ordered, &pairs)
    }

    /// As [`Model::run_in_place`]; `on_node` gets every node's name, operator and time. onnxruntime tells them in its profile only.
    ///
    /// # Errors
    /// As [`Model::run_in_place`].
    pub fn run_timed(
        &mut self,
        inputs: Vec<(String, Value)>,
        shared: &[(&str, usize)],
        on_node: &mut OnNode<'_>,
    ) -> Result<Vec<Value>> {
        let pairs = self.pairs(shared);
        let ordered = info::in_order(&self.path, &self.inputs, &self.rows, inputs)?;
        match &mut self.backend {
            Backend::Tract(model) => model.run_timed(ordered, on_node),
            backend => backend.run(ordered, &pairs),
        }
    }

    /// The positions of inputs and of the outputs that may take their memory.
    fn pairs(&self, shared: &[(&str, usize)]) -> Vec<(usize, usize)> {
        let position = |name: &str| self.inputs.iter().position(|input| input.name == name);
        shared.iter().filter_map(|&(input, output)| Some((position(input)?, output))).collect()
    }

    /// Ends the profile that [`Options::profile`] began and gives its path.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where none was begun, or it was ended before; [`Error::Run`] where it cannot be written.
    pub fn end_profiling(&mut self) -> Result<PathBuf> {
        match std::mem::take(&mut self.profiling).then(|| self.backend.end_profiling()).flatten() {
            Some(profile) => profile,
            None => {
                Err(Error::Unsupported { path: self.path.clone(), reason: "no profile is being written".to_owned() })
            }
        }
    }
}

/// The model file that `path` means: itself, or what an export has put into that folder.
///
/// # Errors
/// [`Error::NotFound`], or [`Error::Read`] for what the system says.
pub fn find_model(path: &Path) -> Result<PathBuf> {
    let below = || MODEL_FOLDERS.iter().map(|folder| path.join(folder).join(MODEL_FILE)).find(|file| file.is_file());
    let file = match path.is_dir() {
        true => {
            Some(path.join(MODEL_FILE)).filter(|file| file.exists()).or_else(below).unwrap_or(path.join(MODEL_FILE))
        }
        false => path.to_owned(),
    };
    match file.try_exists() {
        Ok(true) => Ok(file),
        Ok(false) => Err(Error::NotFound { path: file, what: "model", hint: instead(path) }),
        Err(source) => Err(Error::Read { path: file, source }),
    }
}

/// What a folder without [`MODEL_FILE`] holds, and what to do with it.
fn instead(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    let with = |endings: &[&str]| {
        let fits = |name: &&String| endings.iter().any(|ending| name.ends_with(ending));
        names.iter().filter(fits).take(3).cloned().collect::<Vec<String>>().join(", ")
    };
    match (with(&[".onnx"]), with(header::CHECKPOINTS)) {
        (models, _) if !models.is_empty() => format!("; the folder holds {models}: name the file"),
        (_, weights) if !weights.is_empty() => format!("; the folder holds {weights}: export it with moh-export first"),
        _ => String::new(),
    }
}
