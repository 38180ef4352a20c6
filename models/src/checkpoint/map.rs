//! Files in memory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::Error;

/// The longest JSON text that is read: what the safetensors format allows for a header.
pub(super) const JSON_LIMIT: u64 = 100_000_000;

/// A whole file, mapped.
pub(super) struct Map {
    path: PathBuf,
    bytes: Mmap,
}

impl Map {
    /// Maps a file.
    #[expect(unsafe_code, reason = "there is no safe way to map a file")]
    pub(super) fn open(path: &Path) -> Result<Map, Error> {
        let file = open(path)?;
        // SAFETY: the mapping is private and read-only, and its length is the file's at this moment. That nobody writes to or
        // truncates the file while it is mapped is asked of the user in the module's documentation: no system call can ensure it.
        let bytes = unsafe { Mmap::map(&file) }.map_err(|reason| Error::Io { file: path.to_owned(), reason })?;
        Ok(Map { path: path.to_owned(), bytes })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
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
