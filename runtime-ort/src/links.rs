//! Weight files that a model shares with the checkpoint that it was exported from.
//!
//! Such a model says in its metadata what the files have to be: their length, the SHA-256 of their safetensors headers and, where
//! that was asked for, of all their bytes. Length and header are compared whenever the model is loaded.

use crate::error::{Error, Result};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// What the keys in the metadata begin with; the file's name follows.
const KEY: &str = "moh.link.";

/// The longest header that the safetensors format allows.
const HEADER_LIMIT: u64 = 100_000_000;

/// Bytes that are read at a time.
const STEP: usize = 4 << 20;

/// SHA-256, as `sha256sum` prints it.
#[derive(Clone, Default)]
pub struct Digest(Sha256);

impl Digest {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all of them, in hexadecimal digits.
    pub fn text(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The digest of a file's bytes, and their number. `progress` is told how many of them were read.
    ///
    /// # Errors
    /// What the system says.
    pub fn of_file(path: &Path, progress: &mut dyn FnMut(u64)) -> io::Result<(String, u64)> {
        let (mut file, mut digest, mut length) = (File::open(path)?, Digest::default(), 0);
        let mut bytes = vec![0; STEP];
        loop {
            match file.read(&mut bytes)? {
                0 => return Ok((digest.text(), length)),
                count => {
                    digest.add(&bytes[..count]);
                    length += count as u64;
                    progress(length);
                }
            }
        }
    }
}

/// What a model says of a file of the checkpoint that holds its weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The file's name in the model's folder.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// The SHA-256 of its header: the length of the JSON text, and the text.
    pub header: String,
    /// The SHA-256 of all its bytes.
    pub contents: Option<String>,
}

impl Link {
    /// What is to be said of the safetensors file in `path`, whose name beside the model is `file`.
    ///
    /// # Errors
    /// What the system says, or that it is no safetensors file.
    pub fn new(path: &Path, file: String) -> io::Result<Link> {
        let (bytes, header) = length_and_header(path)?;
        Ok(Link { file, bytes, header, contents: None })
    }

    /// Key and value in the model's metadata.
    pub fn entry(&self) -> (String, String) {
        let contents = self.contents.as_ref().map_or(String::new(), |contents| format!(" contents_sha256={contents}"));
        let Link { file, bytes, header, .. } = self;
        (format!("{KEY}{file}"), format!("bytes={bytes} header_sha256={header}{contents}"))
    }

    /// The link that an entry of the metadata is about; `None` for other entries.
    pub(crate) fn parse(key: &str, value: &str) -> Option<io::Result<Link>> {
        let file = key.strip_prefix(KEY)?.to_owned();
        let field = |name: &str| value.split(' ').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
        let link = || {
            let (bytes, header) = (field("bytes")?.parse().ok()?, field("header_sha256")?.to_owned());
            // A name alone: a path could lead anywhere.
            let is_name = Path::new(&file).file_name().is_some_and(|name| name == file.as_str());
            let contents = field("contents_sha256").map(str::to_owned);
            is_name.then_some(Link { file, bytes, header, contents })
        };
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("its metadata {key:?} is malformed"));
        Some(link().ok_or_else(malformed))
    }

    /// Whether the file beside `model` has the length and the header that it had.
    ///
    /// # Errors
    /// [`Error::Link`] says what is wrong with it.
    pub fn check(&self, model: &Path) -> Result<()> {
        let path = model.with_file_name(&self.file);
        let wrong = |problem: String| Error::Link { path: model.to_owned(), file: path.clone(), problem };
        let (bytes, header) = length_and_header(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => wrong("it is missing".to_owned()),
            io::ErrorKind::InvalidData => wrong(e.to_string()),
            _ => Error::Read { path: path.clone(), source: e },
        })?;
        if bytes != self.bytes {
            return Err(wrong(format!("expected {} bytes, found {bytes}", self.bytes)));
        }
        if header != self.header {
            return Err(wrong("its header is another one, so it holds other tensors".to_owned()));
        }
        Ok(())
    }

    /// Whether the file beside `model` has the bytes that it had; `false` where the model does not say what they were. `progress` is
    /// told how many were read.
    ///
    /// # Errors
    /// [`Error::Link`] says what is wrong with it.
    pub fn check_contents(&self, model: &Path, progress: &mut dyn FnMut(u64)) -> Result<bool> {
        self.check(model)?;
        let Some(expected) = &self.contents else { return Ok(false) };
        let path = model.with_file_name(&self.file);
        let read = Digest::of_file(&path, progress);
        let (found, _) = read.map_err(|source| Error::Read { path: path.clone(), source })?;
        if found != *expected {
            let problem = format!("its bytes have changed: expected SHA-256 {expected}, found {found}");
            return Err(Error::Link { path: model.to_owned(), file: path, problem });
        }
        Ok(true)
    }
}

fn length_and_header(path: &Path) -> io::Result<(u64, String)> {
    let invalid = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let mut file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(invalid("it is not a regular file"));
    }
    let bytes = metadata.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| invalid("it is no safetensors file"))?;
    let count = u64::from_le_bytes(length);
    if count > HEADER_LIMIT || count.saturating_add(8) > bytes {
        return Err(invalid("it is no safetensors file"));
    }
    let mut digest = Digest::default();
    digest.add(&length);
    let mut text = vec![0; count as usize];
    file.read_exact(&mut text)?;
    digest.add(&text);
    Ok((bytes, digest.text()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs;

    /// The published digest of the empty message (FIPS 180-4).
    #[test]
    fn digests_are_those_of_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::default().text(), empty);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("abc"), "abc").unwrap();
        let (found, length) = Digest::of_file(&folder.path().join("abc"), &mut |_| ()).unwrap();
        assert_eq!((length, &found[..16]), (3, "ba7816bf8f01cfea"));
    }

    #[test]
    fn entries_are_read_as_they_are_written() {
        for contents in [None, Some("cd".to_owned())] {
            let link = Link { file: "m.safetensors".to_owned(), bytes: 7, header: "ab".to_owned(), contents };
            let (key, value) = link.entry();
            assert_eq!(Link::parse(&key, &value).unwrap().unwrap(), link);
        }
        assert!(Link::parse("moh.family", "moh-llama").is_none());
        for (key, value) in [
            ("moh.link.m", "bytes=x header_sha256=ab"),
            ("moh.link.m", "bytes=7"),
            ("moh.link.../m", "bytes=7 header_sha256=ab"),
            ("moh.link./m", "bytes=7 header_sha256=ab"),
            ("moh.link.", "bytes=7 header_sha256=ab"),
        ] {
            assert!(Link::parse(key, value).unwrap().is_err(), "{key} {value}");
        }
    }

    #[test]
    fn a_file_that_is_no_longer_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (model, file) = (folder.path().join("m.onnx"), folder.path().join("w"));
        let write = |header: &[u8], data: &[u8]| {
            fs::write(&file, [&(header.len() as u64).to_le_bytes(), header, data].concat()).unwrap();
        };
        write(b"{}", b"1234");
        let mut link = Link::new(&file, "w".to_owned()).unwrap();
        link.contents = Some(Digest::of_file(&file, &mut |_| ()).unwrap().0);
        let check = || link.check_contents(&model, &mut |_| ()).map_err(|e| e.to_string());
        assert_eq!(check(), Ok(true));
        let refused = |expected: &str| assert!(check().unwrap_err().contains(expected), "{:?}", check());
        write(b"{}", b"1235");
        link.check(&model).unwrap();
        refused("its bytes have changed");
        write(b"[]", b"1234");
        refused("its header is another one");
        write(b"{}", b"123");
        refused("expected 14 bytes, found 13");
        fs::write(&file, b"12").unwrap();
        refused("it is no safetensors file");
        fs::remove_file(&file).unwrap();
        refused("it is missing");
    }
}
