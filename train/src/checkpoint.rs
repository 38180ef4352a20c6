//! A training's folder, and the checkpoints in it, each of which appears as a whole or not at all.

use crate::error::{Error, Result};
use crate::history::{LOADS, STEPS};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Component, Path, PathBuf};

/// The weights, as the exporter reads them.
pub(crate) const MODEL: &str = "model.safetensors";
/// AdamW's moments.
pub(crate) const MOMENTS: &str = "optimizer.safetensors";
/// The folder of the averaged weights, a checkpoint of its own.
pub(crate) const AVERAGE: &str = "ema";
/// The step and the settings.
pub(crate) const STATE: &str = "training.json";
/// Of the losses, and of the heads' loads.
pub(crate) const PLOTS: [&str; 2] = ["loss.svg", "heads.svg"];

/// Whether a checkpoint may have a file of this name beside its own.
pub(crate) fn may_add(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
    plain && ![MODEL, MOMENTS, AVERAGE, STATE, STEPS, LOADS].contains(&name)
}

/// A training's folder, which nobody else trains in meanwhile.
#[derive(Debug)]
pub(crate) struct Run {
    folder: PathBuf,
    keep: usize,
    _lock: File,
}

impl Run {
    /// Makes the folder, and removes what a killed training left unfinished.
    pub(crate) fn open(folder: &Path, keep: usize) -> Result<Run> {
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let lock = File::open(folder).map_err(Error::io(folder))?;
        // File systems without locks do without.
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let busy = std::io::Error::new(std::io::ErrorKind::ResourceBusy, "another process trains in this folder");
            return Err(Error::io(folder)(busy));
        }
        let run = Run { folder: folder.to_owned(), keep, _lock: lock };
        for name in run.names()?.iter().filter(|name| is_unfinished(name)) {
            let path = folder.join(name);
            let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(Error::io(&path))?;
        }
        Ok(run)
    }

    fn names(&self) -> Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.folder).map_err(Error::io(&self.folder))?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<std::io::Result<_>>().map_err(Error::io(&self.folder))
    }

    /// Complete checkpoints with their steps, the last one last.
    fn checkpoints(&self) -> Result<Vec<(usize, PathBuf)>> {
        let step = |name: &String| Some((name.strip_prefix("step-")?.parse().ok()?, self.folder.join(name)));
        let mut found: Vec<(usize, PathBuf)> = self.names()?.iter().filter_map(step).collect();
        found.sort();
        Ok(found)
    }

    /// The last complete checkpoint.
    pub(crate) fn last(&self) -> Result<Option<PathBuf>> {
        Ok(self.checkpoints()?.pop().map(|(_, path)| path))
    }

    /// The complete checkpoint of `step`.
    pub(crate) fn at(&self, step: usize) -> Result<Option<PathBuf>> {
        Ok(self.checkpoints()?.into_iter().find(|(saved, _)| *saved == step).map(|(_, path)| path))
    }

    /// Makes the checkpoint of `step`, which `write` fills, and removes older ones than are to be kept.
    ///
    /// The folder takes its name when everything in it is on the disk.
    pub(crate) fn save(&self, step: usize, write: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let name = format!("step-{step:08}");
        let (unfinished, finished) = (self.folder.join(format!(".{name}.tmp")), self.folder.join(&name));
        let prepare = || {
            std::fs::create_dir(&unfinished).map_err(Error::io(&unfinished))?;
            write(&unfinished)?;
            sync_folder(&unfinished)?;
            std::fs::rename(&unfinished, &finished).map_err(Error::io(&finished))?;
            sync_folder(&self.folder)
        };
        if let Err(error) = prepare() {
            // The first error says what went wrong; what cannot be removed now is when the training goes on.
            let _ = std::fs::remove_dir_all(&unfinished);
            return Err(error.keeping(self.last()?));
        }
        self.prune()?;
        Ok(finished)
    }

    /// Removes older checkpoints than are to be kept.
    pub(crate) fn prune(&self) -> Result<()> {
        let checkpoints = self.checkpoints()?;
        for (step, old) in checkpoints.iter().take(checkpoints.len().saturating_sub(self.keep)) {
            // Under a name that is no checkpoint's, so that what remains of it after a kill is none either.
            let removed = self.folder.join(format!(".removed-{step:08}.tmp"));
            std::fs::rename(old, &removed).map_err(Error::io(old))?;
            std::fs::remove_dir_all(&removed).map_err(Error::io(&removed))?;
        }
        Ok(())
    }

    /// Puts a file into the training's folder, in one piece.
    pub(crate) fn put(&self, name: &str, text: &str) -> Result<()> {
        let (unfinished, path) = (self.folder.join(format!(".{name}.tmp")), self.folder.join(name));
        let written = write_file(&unfinished, text.as_bytes())
            .and_then(|()| std::fs::rename(&unfinished, &path).map_err(Error::io(path)));
        written.inspect_err(|_| {
            let _ = std::fs::remove_file(&unfinished);
        })
    }
}

/// Whether [`Run`] gives such a name to what is not complete, or not wanted any more.
fn is_unfinished(name: &str) -> bool {
    let Some(name) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")) else { return false };
    let of_a_step = |prefix: &str| {
        name.strip_prefix(prefix)
            .is_some_and(|step| !step.is_empty() && step.bytes().all(|digit| digit.is_ascii_digit()))
    };
    of_a_step("step-") || of_a_step("removed-") || PLOTS.contains(&name)
}

/// Waits until a folder's entries are on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io(folder))
}

/// Writes a file and waits until it is on the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(Error::io(path))
}

/// Writes tensors as safetensors and waits until they are on the disk.
pub(crate) fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    // safetensors puts a file that nobody else may read into its place: it gets the rights that others have.
    let rights = File::create(path).and_then(|file| Ok(file.metadata()?.permissions())).map_err(Error::io(path))?;
    let tensors: HashMap<&str, Tensor> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.detach())).collect();
    let written = candle_core::safetensors::save(&tensors, path);
    // candle's error hides the system's, which says that the disk is full.
    match (written, File::open(path).and_then(|file| file.set_permissions(rights).and_then(|()| file.sync_all()))) {
        (Ok(()), synced) => synced.map_err(Error::io(path)),
        (Err(error), _) => Err(Error::io(path)(std::io::Error::other(error.to_string()))),
    }
}

/// Reads all tensors of a file.
pub(crate) fn read_tensors(path: &Path, device: &Device) -> Result<BTreeMap<String, Tensor>> {
    let read = candle_core::safetensors::load(path, device);
    let tensors = read.map_err(|error| Error::Checkpoint { file: path.to_owned(), problem: error.to_string() })?;
    Ok(tensors.into_iter().collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_of_files_beside_the_weights() {
        for name in ["config.json", "tokenizer.json", "model-00002.safetensors"] {
            assert!(may_add(name), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/a", "../a", "a/", MODEL, MOMENTS, AVERAGE, STATE, STEPS, LOADS] {
            assert!(!may_add(name), "{name}");
        }
    }

    #[test]
    fn what_a_kill_left_goes_and_what_is_not_ours_stays() {
        let folder = tempfile::tempdir().unwrap();
        for name in
            [".step-00000003.tmp", ".removed-00000001.tmp", ".mine.tmp", "step-00000001", "step-00000002", "step-x"]
        {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        for name in [".loss.svg.tmp", ".step-.tmp", "notes.tmp"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        // Of the checkpoints, too many: it was killed before it removed them.
        let run = Run::open(folder.path(), 1).unwrap();
        assert_eq!(run.checkpoints().unwrap().len(), 2, "who opens a training may not be who goes on with it");
        run.prune().unwrap();
        let mut names = run.names().unwrap();
        names.sort();
        assert_eq!(names, [".mine.tmp", ".step-.tmp", "notes.tmp", "step-00000002", "step-x"]);
        let busy = Run::open(folder.path(), 1).unwrap_err().to_string();
        assert!(busy.contains("another process trains in this folder"), "{busy}");
        drop(run);
        Run::open(folder.path(), 1).unwrap();
    }

    #[test]
    fn a_checkpoint_has_its_name_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let run = Run::open(folder.path(), 2).unwrap();
        let saved = run.save(7, |unfinished| {
            assert_eq!(run.last()?, None, "{}", unfinished.display());
            write_file(&unfinished.join("x"), b"1")
        });
        assert_eq!(saved.unwrap(), folder.path().join("step-00000007"));
        let failed = run.save(8, |unfinished| write_file(&unfinished.join("no/such/folder"), b""));
        assert!(failed.is_err());
        assert_eq!(run.last().unwrap(), Some(folder.path().join("step-00000007")));
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_weights_as_they_may_other_files() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (weights, other) = (folder.path().join("w.safetensors"), folder.path().join("other"));
        let tensor = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        write_tensors(&weights, &BTreeMap::from([("x".to_owned(), tensor)])).unwrap();
        write_file(&other, b"").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&weights), mode(&other));
    }
}
