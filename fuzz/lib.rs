//! What fuzz targets share: a folder whose files a target writes over and over, bytes as choices, and what the programs do with files.

#[path = "../examples/attack/choices.rs"]
pub mod choices;
#[path = "../examples/attack/nodes.rs"]
pub mod nodes;
#[path = "../examples/attack/onnx.rs"]
pub mod onnx;
#[path = "../examples/attack/panics.rs"]
mod panics;

use choices::Choices;
use moh_models::Checkpoint;
use moh_runtime::{Dim, Model, Options, RuntimeChoice, Tensor, Value};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Numbers in the inputs of a run: what is larger tells nothing new.
const MOST: usize = 1 << 18;

/// A folder of this process alone.
pub struct Folder(tempfile::TempDir);

/// The process's folder, in `MOH_FUZZ_HOME`; ci/fuzz.sh makes that in memory where the system has such a place, because every run writes files.
pub fn folder() -> &'static Folder {
    static FOLDER: OnceLock<Folder> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let place = std::env::var_os("MOH_FUZZ_HOME").map_or_else(std::env::temp_dir, PathBuf::from);
        Folder(tempfile::Builder::new().prefix("moh-fuzz-").tempdir_in(place).unwrap())
    })
}

impl Folder {
    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file.
    pub fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

/// Lets panics unwind that the program under test catches: tract's, not our own. Without it libFuzzer counts every panic as a finding.
pub fn panics_may_be_caught() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        std::panic::set_hook(Box::new(|_| ()));
        panics::end_the_process();
    });
}

/// Opens a checkpoint, and reads all of its tensors where it can be opened.
pub fn read_all(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path, None) else { return };
    for name in checkpoint.names() {
        let weight = checkpoint.get(name).unwrap();
        // Shapes are checked against the file's length, but views may share bytes.
        if weight.elements() <= MOST {
            let values = weight.to_f32();
            assert!(values.is_err() || values.is_ok_and(|values| values.len() == weight.elements()));
            let _ = weight.check_finite();
        }
    }
}

/// How the programs load a model in tract.
pub fn tract() -> Options {
    Options { runtime: RuntimeChoice::Tract, threads: Some(1), ..Options::default() }
}

/// Loads the model in tract, and runs it on zeros where it can be loaded; outputs have as many numbers as their shapes say.
pub fn run(path: &Path) {
    let Ok(mut model) = Model::load(path, &tract()) else { return };
    let _ = model.metadata();
    let mut inputs: Vec<(String, Value)> = Vec::new();
    let mut left = MOST;
    for input in model.inputs() {
        let size = |dim: &Dim| if let Dim::Fixed(size) = dim { *size } else { 2 };
        let shape: Vec<usize> = input.dims.iter().map(size).collect();
        let Some(count) = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).filter(|&n| n <= left) else {
            return;
        };
        left -= count;
        let Ok(zeros) = Tensor::zeros(input.element_type, shape) else { return };
        inputs.push((input.name.clone(), zeros.into()));
    }
    check(model.run(inputs));
}

/// Outputs hold what their shapes say.
pub fn check(outputs: moh_runtime::Result<Vec<Value>>) {
    for output in outputs.into_iter().flatten() {
        if let Ok(tensor) = output.to_tensor() {
            assert_eq!(tensor.data().len(), tensor.shape().iter().product::<usize>());
        }
    }
}

/// Makes a call, spoils it, and runs it in tract. There is an error, or an output that holds what its shape says.
pub fn attack(call: fn(&mut Choices<'_>) -> nodes::Call, choices: &mut Choices<'_>) {
    panics_may_be_caught();
    let mut call = call(choices);
    nodes::spoil(&mut call, choices);
    let Some((bytes, given)) = call.model(choices) else { return };
    let Ok(mut model) = Model::load(folder().put("model.onnx", &bytes), &tract()) else { return };
    check(model.run(given.into_iter().map(|(name, tensor)| (name, Value::from(tensor)))));
}
