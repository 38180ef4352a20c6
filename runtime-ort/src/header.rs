//! The few facts that are wanted of a model before a runtime reads it: the ModelProto's outermost fields, and of the graph which
//! inputs are rows of which tables.

mod tables;

use crate::error::{Error, Result};
use crate::links::Link;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::Path;

/// ModelProto's fields (onnx.proto3).
const GRAPH: u64 = 7;
const OPSET_IMPORT: u64 = 8;
const METADATA: u64 = 14;
/// OperatorSetIdProto's fields.
const DOMAIN: u64 = 1;
const VERSION: u64 = 2;
/// StringStringEntryProto's fields.
const KEY: u64 = 1;
const VALUE: u64 = 2;
/// Far more than a domain's name and a number need, or what is said of a link.
const LONGEST: u64 = 1 << 16;

/// What a model says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    /// Domains and versions of the operators that it uses.
    pub(crate) opsets: Vec<(String, u64)>,
    /// Files of a checkpoint that hold its weights.
    pub(crate) links: Vec<Link>,
    /// How many rows there are to choose from, by the inputs that choose rows of a constant, such as tokens.
    pub(crate) rows: BTreeMap<String, u64>,
}

impl Header {
    /// The version of `domain` that the model uses, if it does.
    pub(crate) fn opset(&self, domain: &str) -> Option<u64> {
        self.opsets.iter().find(|(name, _)| name == domain).map(|&(_, version)| version)
    }
}

/// Reads the header of the model in `path`.
///
/// # Errors
/// [`Error::Read`], or [`Error::Malformed`] where the file is no ONNX model.
pub(crate) fn read(path: &Path) -> Result<Header> {
    let io = |source| Error::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let metadata = file.metadata().map_err(io)?;
    let scanned = match metadata.is_file() {
        true => scan(&mut Message::new(BufReader::new(file), metadata.len())),
        false => Err(malformed("not a regular file")),
    };
    scanned.map_err(|source| match source.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            let reason = what_else(path).map_or_else(|| source.to_string(), str::to_owned);
            Error::Malformed { path: path.to_owned(), expected: "an ONNX model", reason }
        }
        _ => io(source),
    })
}

/// The links that the model in `path` says it has.
///
/// # Errors
/// [`Error::Read`] or [`Error::Malformed`] for the model.
pub fn links(path: &Path) -> Result<Vec<Link>> {
    Ok(read(path)?.links)
}

/// Endings of files that hold weights, not models.
pub(crate) const CHECKPOINTS: &[&str] = &[".safetensors", ".pth", ".pt", ".bin", ".ckpt"];

/// What people often name in a model's place, and what to do.
fn what_else(path: &Path) -> Option<&'static str> {
    const LFS: &[u8] = b"version https://git-lfs";
    let name = path.to_string_lossy();
    if CHECKPOINTS.iter().any(|ending| name.ends_with(ending)) {
        return Some("it is a checkpoint: export it with moh-export first");
    }
    let mut start = [0; LFS.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    (read.is_ok() && start == LFS).then_some("it is a Git LFS pointer: `git lfs pull` fetches the model")
}

fn malformed(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

fn scan<R: Read + Seek>(message: &mut Message<R>) -> io::Result<Header> {
    let (mut opsets, mut links, mut graph) = (Vec::new(), Vec::new(), None);
    while let Some(field) = message.next()? {
        match field {
            Field { number: GRAPH, value: Payload::Bytes(len) } => {
                graph = Some(message.within(len, tables::rows)?);
            }
            Field { number: OPSET_IMPORT, value: Payload::Bytes(len) } => opsets.push(import(&message.bytes(len)?)?),
            Field { number: METADATA, value: Payload::Bytes(len) } if len <= LONGEST => {
                let (key, value) = property(&message.bytes(len)?)?;
                links.extend(Link::parse(&key, &value).transpose()?);
            }
            Field { value: Payload::Bytes(len), .. } => message.skip(len)?,
            Field { .. } => {}
        }
    }
    match (graph, opsets.is_empty()) {
        (Some(rows), false) => Ok(Header { opsets, links, rows }),
        (None, _) => Err(malformed("it has no graph")),
        (Some(_), true) => Err(malformed("it imports no operators")),
    }
}

/// A key and its value.
fn property(bytes: &[u8]) -> io::Result<(String, String)> {
    let mut message = Message::new(Cursor::new(bytes), bytes.len() as u64);
    let (mut key, mut value) = (String::new(), String::new());
    while let Some(field) = message.next()? {
        let Field { number, value: Payload::Bytes(len) } = field else { continue };
        let text = String::from_utf8(message.bytes(len)?).map_err(|_| malformed("a property is not UTF-8"))?;
        match number {
            KEY => key = text,
            VALUE => value = text,
            _ => {}
        }
    }
    Ok((key, value))
}

fn import(bytes: &[u8]) -> io::Result<(String, u64)> {
    let mut message = Message::new(Cursor::new(bytes), bytes.len() as u64);
    let (mut domain, mut version) = (String::new(), 0);
    while let Some(field) = message.next()? {
        match field {
            Field { number: DOMAIN, value: Payload::Bytes(len) } => {
                domain = String::from_utf8(message.bytes(len)?).map_err(|_| malformed("a domain is not UTF-8"))?;
            }
            Field { number: VERSION, value: Payload::Number(number) } => version = number,
            Field { value: Payload::Bytes(len), .. } => message.skip(len)?,
            Field { .. } => {}
        }
    }
    Ok((domain, version))
}

/// A protobuf message that is read field by field.
struct Message<R> {
    input: R,
    left: u64,
}

struct Field {
    number: u64,
    value: Payload,
}

enum Payload {
    /// A varint, or 0 for the fixed-size types, which no field of interest has.
    Number(u64),
    /// So many bytes follow.
    Bytes(u64),
}

impl<R: Read + Seek> Message<R> {
    fn new(input: R, left: u64) -> Message<R> {
        Message { input, left }
    }

    fn next(&mut self) -> io::Result<Option<Field>> {
        if self.left == 0 {
            return Ok(None);
        }
        let key = self.varint()?;
        let number = key >> 3;
        let value = match key & 7 {
            0 => Payload::Number(self.varint()?),
            1 => self.skip(8).map(|()| Payload::Number(0))?,
            2 => Payload::Bytes(self.varint()?),
            5 => self.skip(4).map(|()| Payload::Number(0))?,
            _ => return Err(malformed("it is not a protobuf message")),
        };
        match number {
            0 => Err(malformed("it is not a protobuf message")),
            _ => Ok(Some(Field { number, value })),
        }
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let mut byte = [0];
            self.take(1)?;
            self.input.read_exact(&mut byte)?;
            number |= u64::from(byte[0] & 0x7F) << shift;
            if byte[0] & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(malformed("it is not a protobuf message"))
    }

    /// What `read` makes of the message of the next `len` bytes, to whose end it reads.
    fn within<T>(&mut self, len: u64, read: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
        self.take(len)?;
        let rest = std::mem::replace(&mut self.left, len);
        let found = read(self)?;
        self.skip(self.left)?;
        self.left = rest;
        Ok(found)
    }

    fn bytes(&mut self, len: u64) -> io::Result<Vec<u8>> {
        if len > LONGEST {
            return Err(malformed("a name in it is too long"));
        }
        self.take(len)?;
        let mut bytes = Vec::new();
        (&mut self.input).take(len).read_to_end(&mut bytes)?;
        if bytes.len() as u64 == len { Ok(bytes) } else { Err(malformed("it is truncated")) }
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        /// What is read sooner than a buffer is filled anew.
        const NEAR: u64 = 1 << 10;
        self.take(len)?;
        if len <= NEAR {
            let read = io::copy(&mut (&mut self.input).take(len), &mut io::sink())?;
            return if read == len { Ok(()) } else { Err(malformed("it is truncated")) };
        }
        let distance = i64::try_from(len).map_err(|_| malformed("it is truncated"))?;
        self.input.seek(SeekFrom::Current(distance)).map(|_| ())
    }

    fn take(&mut self, len: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(len).ok_or_else(|| malformed("it is truncated"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// ir_version 10, producer "x", an empty graph, opsets "" 21 and "ai.moh" 1.
    const MODEL: &[u8] = b"\x08\x0a\x12\x01x\x3a\x00\x42\x04\x0a\x00\x10\x15\x42\x0a\x0a\x06ai.moh\x10\x01";

    fn scan_bytes(bytes: &[u8]) -> io::Result<Header> {
        scan(&mut Message::new(Cursor::new(bytes), bytes.len() as u64))
    }

    #[test]
    fn opsets_are_read_and_the_graph_is_skipped() {
        let header = scan_bytes(MODEL).unwrap();
        assert_eq!(header.opset(""), Some(21));
        assert_eq!(header.opset("ai.moh"), Some(1));
        assert_eq!(header.opset("ai.onnx.ml"), None);
    }

    #[test]
    fn links_are_among_the_metadata() {
        let entry = |key: &str, value: &str| {
            let text = |number: u8, text: &str| [&[number << 3 | 2, text.len() as u8], text.as_bytes()].concat();
            let both = [text(1, key), text(2, value)].concat();
            [&[14 << 3 | 2, both.len() as u8], both.as_slice()].concat()
        };
        let model = |key: &str, value: &str| [MODEL.to_vec(), entry("moh.family", "x"), entry(key, value)].concat();
        let header = scan_bytes(&model("moh.link.w", "bytes=3 header_sha256=ab")).unwrap();
        let link = Link { file: "w".to_owned(), bytes: 3, header: "ab".to_owned(), contents: None };
        assert_eq!(header.links, [link]);
        let error = scan_bytes(&model("moh.link.w", "bytes=3")).unwrap_err();
        assert!(error.to_string().contains("\"moh.link.w\" is malformed"), "{error}");
    }

    /// A download that was broken off, of a file whose graph comes last.
    #[test]
    fn a_graph_longer_than_the_file() {
        let model = b"\x08\x0a\x42\x04\x0a\x00\x10\x15\x3a\x03\x0a\x01x";
        assert_eq!(scan_bytes(model).unwrap().opset(""), Some(21));
        for len in 11..model.len() {
            assert_eq!(scan_bytes(&model[..len]).unwrap_err().to_string(), "it is truncated", "{len} bytes");
        }
    }

    #[test]
    fn no_prefix_and_no_damage_panics() {
        for len in 0..MODEL.len() {
            let _ = scan_bytes(&MODEL[..len]);
        }
        for i in 0..MODEL.len() {
            for byte in 0..=255 {
                let mut damaged = MODEL.to_vec();
                damaged[i] = byte;
                let _ = scan_bytes(&damaged);
            }
        }
        assert!(scan_bytes(b"").is_err());
        assert!(scan_bytes(b"hello, world").is_err());
        assert!(scan_bytes(&[0xFF; 64]).is_err());
    }
}
