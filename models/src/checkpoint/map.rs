//! Files: read where and when something is wanted of them, or mapped.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use memmap2::Mmap;

use super::state::FileState;
use crate::error::Error;

/// The longest JSON text that is read: what the safetensors format allows for a header.
pub(super) const JSON_LIMIT: u64 = 100_000_000;

/// An open file. What is read of it does not stay in this process's memory, as pages of a map would.
pub(super) struct Source {
    path: PathBuf,
    state: FileState,
    file: Mutex<File>,
}

impl Source {
    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<Source, Error> {
        let file = open(path)?;
        let state = FileState::of(&file.metadata().map_err(|reason| Error::Io { file: path.to_owned(), reason })?);
        Ok(Source { path: path.to_owned(), state, file: Mutex::new(file) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length in bytes when it was opened.
    pub(super) fn length(&self) -> u64 {
        self.state.bytes()
    }

    /// Fills `out` with the bytes from `offset` on.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(out));
        // Asked afterwards: what was read was the file's before this.
        self.state.check(&file, &self.path)?;
        read.map_err(|reason| Error::Io { file: self.path.clone(), reason })
    }

    /// The whole file, mapped.
    #[expect(unsafe_code, reason = "there is no safe way to map a file")]
    pub(super) fn map(&self) -> Result<Mmap, Error> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the mapping is private and read-only, and its length is the file's at this moment. That nobody writes to or
        // truncates the file while it is mapped is asked of the user in the module's documentation: no system call can ensure it.
        unsafe { Mmap::map(&*file) }.map_err(|reason| Error::Io { file: self.path.clone(), reason })
    }
}

/// Reads a JSON file's text.
pub(super) fn read_json(path: &Path, part: &'static str) -> Result<String, Error> {
    let io = |reason| Error::Io { file: path.to_owned(), reason };
    let file = open(path)?;
    let found = file.metadata().map_err(io)?.len();
    if found > JSON_LIMIT {
        return Err(Error::JsonTooLong { file: path.to_owned(), found, limit: JSON_LIMIT });
    }
    let mut bytes = Vec::new();
    file.take(JSON_LIMIT).read_to_end(&mut bytes).map_err(io)?;
    String::from_utf8(bytes).map_err(|e| Error::Utf8 { file: path.to_owned(), part, reason: e.utf8_error() })
}

/// Opens a regular file. Asked before opening, because opening a pipe would wait for its writer.
fn open(path: &Path) -> Result<File, Error> {
    let io = |reason| Error::Io { file: path.to_owned(), reason };
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::NotAFile { file: path.to_owned() });
    }
    File::open(path).map_err(io)
}
