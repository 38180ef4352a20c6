//! Files: everything is prepared in a folder beside the output, then moved into place.
//!
//! What is prepared vanishes unless it is committed: with the error that ends an export, on a signal where the program calls
//! [`abandon`], and after a death that nothing can be done at (SIGKILL, a power cut) in the next export into that folder. A lock
//! on a file in each staging folder tells live runs from dead ones.

use crate::error::Error;
use crate::place::{Layout, Place};
use crate::weights::links::is_link_name;
use moh_runtime::Digest;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What the names of staging folders begin with.
const PREFIX: &str = ".moh-export-";

/// The file in a staging folder that its run holds a lock on.
const LOCK: &str = ".lock";

/// The folder in which an export is prepared; it and what is in it vanish unless the export is committed.
pub struct Staging {
    folder: PathBuf,
    place: Place,
    /// The models to commit.
    models: Vec<String>,
    /// Files beside the model that are of the one before, and not of this one.
    replaced: Vec<String>,
    /// The names of links to files of the checkpoint.
    links: Vec<String>,
    /// What the export reads.
    inputs: Vec<PathBuf>,
    /// SHA-256 of prepared files, where that is wanted.
    digests: Option<BTreeMap<PathBuf, String>>,
    /// Released by the system when the run ends, however it ends.
    _lock: File,
    /// Dropped after the staging folder is gone: only then are they empty.
    _made: NewFolders,
}

/// Folders that were made for an output, outermost first; those that are still empty in the end vanish.
struct NewFolders(Vec<PathBuf>);

/// What this process has made and not committed.
struct Prepared {
    staging: Vec<PathBuf>,
    /// Folders of outputs, outer ones first.
    made: Vec<PathBuf>,
}

static PREPARED: Mutex<Prepared> = Mutex::new(Prepared { staging: Vec::new(), made: Vec::new() });

/// Whoever holds this may make, rename and remove what is listed.
fn prepared() -> MutexGuard<'static, Prepared> {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what this process's exports have prepared, for a program that a signal is about to end. An export that is moving its
/// files into place finishes first; others wait for as long as the result lives.
#[must_use = "exports go on when it is dropped"]
pub fn abandon() -> impl Sized {
    let mut prepared = prepared();
    for folder in std::mem::take(&mut prepared.staging) {
        // Under another name nothing can be added to it meanwhile. It begins as the old one, so that it is swept where this fails.
        let mut gone = folder.clone().into_os_string();
        gone.push("-abandoned");
        let renamed = fs::rename(&folder, &gone).is_ok();
        remove_staging(if renamed { Path::new(&gone) } else { &folder });
    }
    remove_empty(&std::mem::take(&mut prepared.made));
    prepared
}

/// Removes those of `folders`, outermost first, that are empty.
fn remove_empty(folders: &[PathBuf]) {
    for folder in folders.iter().rev() {
        // Refused where it holds something.
        let _ = fs::remove_dir(folder);
    }
}

impl NewFolders {
    /// Makes `folder` and what leads to it.
    fn make(folder: &Path) -> Result<NewFolders, Error> {
        let mut prepared = prepared();
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = folder.ancestors().take_while(missing).collect();
        let mut made = NewFolders(Vec::new());
        for path in missing.into_iter().rev() {
            match fs::create_dir(path) {
                Ok(()) => {}
                // Another export made it meanwhile.
                Err(e) if e.kind() == ErrorKind::AlreadyExists && path.is_dir() => continue,
                Err(e) => {
                    // `made` takes the lock when it is dropped.
                    drop(prepared);
                    return Err(Error::io(path)(e));
                }
            }
            made.0.push(path.to_owned());
            prepared.made.push(path.to_owned());
        }
        Ok(made)
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        let mut prepared = prepared();
        remove_empty(&self.0);
        prepared.made.retain(|folder| !self.0.contains(folder));
    }
}

/// The right to put files into a folder: other exports wait for as long as it lives, as the files of two models would mix. Systems without
/// locks of folders do not wait.
pub struct Turn {
    _lock: Option<File>,
}

/// A new staging folder in `parent`, and its lock.
fn locked_folder(parent: &Path) -> Result<(PathBuf, File), Error> {
    loop {
        // What kind of error it is says as much as the whole text, which names a folder that nobody asked for.
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent);
        let folder = folder.map_err(|e| Error::io(parent)(e.kind().into()))?;
        let path = folder.path().join(LOCK);
        let lock = match File::create_new(&path) {
            Ok(lock) => lock,
            // Another run swept the folder before it was locked. So below.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            Err(e) => return Err(Error::io(parent)(e)),
        };
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => continue,
            // Where the file system has no locks, nobody takes this run for a dead one either.
            Ok(()) | Err(TryLockError::Error(_)) if path.exists() => return Ok((folder.keep(), lock)),
            Ok(()) | Err(TryLockError::Error(_)) => continue,
        }
    }
}

/// Removes a staging folder, the lock last: what is left of it by a death meanwhile is swept.
fn remove_staging(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| entry.file_name() != LOCK) {
        let is_folder = entry.file_type().is_ok_and(|ty| ty.is_dir());
        let _ = if is_folder { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) };
    }
    let _ = fs::remove_dir_all(folder);
}

/// Removes what runs that are gone left in `parent`.
fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if !named || !entry.file_type().is_ok_and(|ty| ty.is_dir()) {
            continue;
        }
        match File::options().write(true).open(entry.path().join(LOCK)) {
            Ok(lock) if lock.try_lock().is_ok() => remove_staging(&entry.path()),
            // Its run ended before it made the file, or is about to make it and then begins anew. Refused where it holds something.
            Err(e) if e.kind() == ErrorKind::NotFound => drop(fs::remove_dir(entry.path())),
            _ => {}
        }
    }
}

/// Whether it is a folder itself, not a link to one.
fn is_folder(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| found.is_dir())
}

impl Staging {
    /// Makes the output's folder, and a hidden one in it; removes what exports that are gone left there.
    ///
    /// # Errors
    /// [`Error::Io`] where that is not allowed or there is no room.
    pub fn new(output: &Path) -> Result<Staging, Error> {
        Staging::at(Place::new(output, Layout::Flat))
    }

    /// As [`Staging::new`], for files of any layout.
    ///
    /// # Errors
    /// As [`Staging::new`].
    pub fn at(place: Place) -> Result<Staging, Error> {
        let parent = place.folder.as_path();
        let made = match place.model_folder {
            "" => NewFolders::make(parent)?,
            below => NewFolders::make(&parent.join(below))?,
        };
        sweep(parent);
        let mut prepared = prepared();
        let locked = locked_folder(parent);
        if let Ok((folder, _)) = &locked {
            prepared.staging.push(folder.clone());
            // Before anybody can abandon it: later, it would make the folder again. Where it fails, so does the first file.
            let _ = fs::create_dir_all(folder.join(place.model_folder));
        }
        // `made` takes the lock where it is dropped.
        drop(prepared);
        let (folder, lock) = locked?;
        let models = vec![place.model.clone()];
        Ok(Staging {
            folder,
            place,
            models,
            replaced: Vec::new(),
            links: Vec::new(),
            inputs: Vec::new(),
            digests: None,
            _lock: lock,
            _made: made,
        })
    }

    /// Never removes these files, whatever they are called: the checkpoint may be what an export linked.
    pub(crate) fn keep<'a>(&mut self, files: impl Iterator<Item = &'a Path>) {
        self.inputs.extend(files.filter_map(|file| file.canonicalize().ok()));
    }

    /// Another model beside the present one, on the same weights: what [`Staging::model`] is from here on.
    pub(crate) fn add_model(&mut self, name: &str) {
        self.place.model = name.to_owned();
        if !self.models.iter().any(|model| model == name) {
            self.models.push(name.to_owned());
        }
    }

    /// A file beside the model that goes with the model before: it would be read in the place of this one.
    pub(crate) fn replace(&mut self, name: &str) {
        self.replaced.push(name.to_owned());
    }

    /// Where a file beside the model is prepared.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(self.place.model_folder).join(name)
    }

    /// Where a side file is prepared.
    pub fn side_path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Where the model is prepared: it has its final name, and finds its weights beside it.
    pub fn model(&self) -> PathBuf {
        self.path(&self.place.model)
    }

    /// Name of the weight file.
    pub fn data_name(&self) -> String {
        self.place.data.clone()
    }

    /// The model's path in the end.
    pub(crate) fn output(&self) -> PathBuf {
        self.place.output()
    }

    /// The path, in the end, of a file beside the model.
    pub(crate) fn beside_model(&self, name: &str) -> PathBuf {
        self.place.beside_model(name)
    }

    /// Writes a prepared file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn write(&mut self, path: PathBuf, bytes: &[u8]) -> Result<(), Error> {
        write_file(&path, bytes)?;
        if self.wants_digests() {
            let mut digest = Digest::default();
            digest.add(bytes);
            self.note(path, Some(digest.text()));
        }
        Ok(())
    }

    /// From here on, takes the SHA-256 of what is written.
    pub(crate) fn take_digests(&mut self) {
        self.digests = Some(BTreeMap::new());
    }

    pub(crate) fn wants_digests(&self) -> bool {
        self.digests.is_some()
    }

    /// Notes the SHA-256 of a prepared file, if it is known and wanted.
    pub(crate) fn note(&mut self, path: PathBuf, digest: Option<String>) {
        if let (Some(digests), Some(digest)) = (&mut self.digests, digest) {
            digests.insert(path, digest);
        }
    }

    /// A prepared link to a file of the checkpoint, and the SHA-256 of that file if it is known.
    pub(crate) fn add_link(&mut self, name: &str, digest: Option<String>) {
        self.links.push(name.to_owned());
        self.note(self.path(name), digest);
    }

    /// Says of an [`Error::Io`] on a prepared file where that file was to be.
    pub(crate) fn at_output(&self, error: Error) -> Error {
        match error {
            Error::Io { path, reason } => match path.strip_prefix(&self.folder) {
                Ok(name) => Error::Io { path: self.place.side(&name.to_string_lossy()), reason },
                Err(_) => Error::Io { path, reason },
            },
            other => other,
        }
    }

    /// Waits until no other export puts files into the output's folder.
    pub fn turn(&self) -> Turn {
        let folder = File::open(&self.place.folder).ok();
        Turn { _lock: folder.filter(|folder| folder.lock().is_ok()) }
    }

    /// Puts the prepared files in their places: at every instant there is the old model, the new one, or none.
    ///
    /// # Errors
    /// [`Error::Io`]; then there is no model file, unless the folder was removed meanwhile.
    pub fn commit(self, _turn: Turn, side_files: &[String]) -> Result<Vec<OutputFile>, Error> {
        let _uninterrupted = prepared();
        let beside = |name: &String| (self.path(name), self.place.beside_model(name));
        let data = self.data_name();
        let sides = side_files.iter().map(|name| (self.side_path(name), self.place.side(name)));
        let weights = [beside(&data)].into_iter().chain(self.links.iter().map(beside));
        let moves: Vec<(PathBuf, PathBuf)> = weights.chain(sides).chain(self.models.iter().map(beside)).collect();
        // Before anything is touched: no file takes a folder's name.
        if let Some((_, folder)) = moves.iter().find(|(from, to)| from.exists() && is_folder(to)) {
            return Err(Error::io(folder)(ErrorKind::IsADirectory.into()));
        }
        if let Some((_, missing)) = self.models.iter().map(beside).find(|(from, _)| !from.exists()) {
            return Err(Error::io(&missing)(ErrorKind::NotFound.into()));
        }
        for old in self.models.iter().chain(&self.replaced) {
            let path = self.place.beside_model(old);
            match fs::remove_file(&path) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io(&path)(e)),
                _ => {}
            }
        }
        if !self.path(&data).exists() {
            // Of the model before, which is gone.
            let _ = fs::remove_file(self.place.beside_model(&data));
        }
        self.remove_old_links(&data);
        let mut written = Vec::new();
        for (from, to) in moves {
            if from.exists() {
                fs::rename(&from, &to).map_err(Error::io(&to))?;
                let sha256 = self.digests.as_ref().and_then(|digests| digests.get(&from).cloned());
                written.push(OutputFile { path: to, bytes: 0, sha256 });
            }
        }
        // Whoever removes the folder meanwhile may have taken some of them.
        for file in &mut written {
            file.bytes = fs::metadata(&file.path).map_err(Error::io(&file.path))?.len();
        }
        Ok(written)
    }

    /// Gives the prepared folder, [`Staging::model`], the name `output`, which need not be UTF-8, at one instant.
    ///
    /// # Errors
    /// [`Error::FolderExists`] where something has that name by now; [`Error::Io`].
    pub(crate) fn commit_folder(self, output: &Path) -> Result<(), Error> {
        let _turn = self.turn();
        let _uninterrupted = prepared();
        // Without what may follow the name: nothing is renamed to `moh/.`.
        let path = output.with_file_name(output.file_name().unwrap_or_default());
        if path.symlink_metadata().is_ok() {
            return Err(Error::FolderExists { path });
        }
        fs::rename(self.model(), &path).map_err(Error::io(&path))
    }

    /// Removes the links of the model before that are none of this one's.
    fn remove_old_links(&self, data: &str) {
        let folder = self.beside_model("");
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { &folder };
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let old = |name: &str| is_link_name(data, name) && !self.links.iter().any(|link| link == name);
            let path = entry.path();
            let is_input = || path.canonicalize().is_ok_and(|path| self.inputs.contains(&path));
            if name.to_str().is_some_and(old) && !is_input() {
                let _ = fs::remove_file(path);
            }
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let mut prepared = prepared();
        remove_staging(&self.folder);
        prepared.staging.retain(|folder| *folder != self.folder);
    }
}

/// A file of the output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OutputFile {
    /// Its path.
    #[serde(serialize_with = "crate::text::path")]
    pub path: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of its bytes, computed while they were written; `None` where they were not read or not asked for.
    pub sha256: Option<String>,
}

/// Writes a whole file and syncs it.
///
/// # Errors
/// [`Error::Io`].
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_dead_runs_left_is_swept_and_live_runs_are_not() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for (folder, file) in [("dead", LOCK), ("foreign", "precious")] {
            fs::create_dir(at(&format!("{PREFIX}{folder}"))).unwrap();
            fs::write(at(&format!("{PREFIX}{folder}")).join(file), "").unwrap();
        }
        fs::write(at(&format!("{PREFIX}dead")).join("model.onnx_data"), "weights").unwrap();
        fs::create_dir(at(&format!("{PREFIX}unlocked"))).unwrap();
        fs::write(at(&format!("{PREFIX}file")), "no folder").unwrap();

        let live = Staging::new(&at("a.onnx")).unwrap();
        let other = Staging::new(&at("b.onnx")).unwrap();
        assert!(live.folder.is_dir() && other.folder.is_dir());
        let left = |name: &str| at(&format!("{PREFIX}{name}")).exists();
        assert!(!left("dead") && !left("unlocked"), "a dead run's folder is there");
        assert!(left("foreign") && left("file"), "no run of ours made these");
        drop((live, other));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn exports_into_a_folder_take_turns() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let staging = |text: &str| {
            let staging = Staging::new(&at("model.onnx")).unwrap();
            for name in ["model.onnx", "model.onnx_data"] {
                fs::write(staging.path(name), text).unwrap();
            }
            staging
        };
        let (first, second) = (staging("first"), staging("second"));
        let turn = first.turn();
        let other = std::thread::spawn(move || {
            let turn = second.turn();
            second.commit(turn, &[]).unwrap()
        });
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(!other.is_finished() && !at("model.onnx").exists(), "it did not wait");
        let written = first.commit(turn, &[]).unwrap();
        assert_eq!(written.iter().map(|file| file.bytes).collect::<Vec<_>>(), [5, 5]);
        other.join().unwrap();
        for name in ["model.onnx", "model.onnx_data"] {
            assert_eq!(fs::read_to_string(at(name)).unwrap(), "second");
        }
    }

    #[test]
    fn an_error_names_the_file_that_was_to_be() {
        let root = tempfile::tempdir().unwrap();
        let staging = Staging::new(&root.path().join("out/model.onnx")).unwrap();
        let full = || std::io::Error::from(ErrorKind::StorageFull);
        let error = staging.at_output(Error::io(staging.path("model.onnx_data"))(full()));
        assert!(
            error.to_string().starts_with(&root.path().join("out/model.onnx_data").display().to_string()),
            "{error}"
        );
        let error = staging.at_output(Error::io("elsewhere")(full()));
        assert!(error.to_string().starts_with("elsewhere"), "{error}");
    }
}
