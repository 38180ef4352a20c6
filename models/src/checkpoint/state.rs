//! Whether a file is still what it was.

use crate::error::Error;
use std::fs::{File, Metadata};
use std::path::Path;
use std::time::SystemTime;

/// A file's length and time of modification, which show that it was written to.
///
/// A file that another took the place of stays what it was for those who have it open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    bytes: u64,
    /// `None` where the system does not tell.
    modified: Option<SystemTime>,
}

impl FileState {
    /// That of an open file, or of one to be opened.
    pub fn of(metadata: &Metadata) -> FileState {
        FileState { bytes: metadata.len(), modified: metadata.modified().ok() }
    }

    /// The file's length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Checks that the open file, whose path is `path`, is as it was.
    ///
    /// # Errors
    /// [`Error::Changed`] and [`Error::Io`].
    pub fn check(&self, file: &File, path: &Path) -> Result<(), Error> {
        let now = file.metadata().map_err(|reason| Error::Io { file: path.to_owned(), reason })?;
        match FileState::of(&now) == *self {
            true => Ok(()),
            false => Err(Error::Changed { file: path.to_owned(), expected: self.bytes, found: now.len() }),
        }
    }
}
