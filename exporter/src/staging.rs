//! Files: everything is prepared in a folder beside the output, then moved into place.

use crate::error::Error;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The folder in which an export is prepared; it and what is in it vanish unless the export is committed.
pub struct Staging {
    folder: tempfile::TempDir,
    output: PathBuf,
    /// Dropped after `folder`: only then are they empty.
    _made: NewFolders,
}

/// Folders that were made for an output, outermost first; those that are still empty in the end vanish.
pub(crate) struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Makes `folder` and what leads to it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn make(folder: &Path) -> Result<NewFolders, Error> {
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = folder.ancestors().take_while(missing).collect();
        let mut made = NewFolders(Vec::new());
        for path in missing.into_iter().rev() {
            fs::create_dir(path).map_err(Error::io(path))?;
            made.0.push(path.to_owned());
        }
        Ok(made)
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            // Refused where it holds something.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Name of the weight file that belongs to a model file.
pub fn data_name(model: &Path) -> String {
    format!("{}_data", model.file_name().unwrap_or_default().to_string_lossy())
}

impl Staging {
    /// Makes the output's folder, and a hidden one in it.
    ///
    /// # Errors
    /// [`Error::Io`] where that is not allowed or there is no room.
    pub fn new(output: &Path) -> Result<Staging, Error> {
        let parent = match output.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let made = NewFolders::make(&parent)?;
        let folder = tempfile::Builder::new().prefix(".moh-export-").tempdir_in(&parent).map_err(Error::io(&parent))?;
        Ok(Staging { folder, output: output.to_owned(), _made: made })
    }

    /// Where `name` is prepared.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Where the model is prepared: it has its final name, and finds its weights beside it.
    pub fn model(&self) -> PathBuf {
        self.folder.path().join(self.output.file_name().unwrap_or_default())
    }

    /// Puts the prepared files in their places: at every instant there is the old model, the new one, or none.
    ///
    /// # Errors
    /// [`Error::Io`]; then there is no model file.
    pub fn commit(self, side_files: &[String]) -> Result<Vec<PathBuf>, Error> {
        let parent = self.output.parent().unwrap_or(Path::new("")).to_owned();
        match fs::remove_file(&self.output) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&self.output)(e)),
            _ => {}
        }
        let mut written = Vec::new();
        let data = data_name(&self.output);
        let model = self.output.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for name in [&data].into_iter().chain(side_files).chain([&model]) {
            let (from, to) = (self.path(name), parent.join(name));
            if from.exists() {
                fs::rename(&from, &to).map_err(Error::io(&to))?;
                written.push(to);
            }
        }
        Ok(written)
    }
}

/// Writes a whole file and syncs it.
///
/// # Errors
/// [`Error::Io`].
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))
}
