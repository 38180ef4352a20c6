//! The zip container of torch.save: entries stored as they are, and a directory of them at the end of the file.
//!
//! Source: PKWARE's APPNOTE.TXT 6.3.10, sections 4.3 to 4.5.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::ArchiveFault;

const END: [u8; 4] = *b"PK\x05\x06";
const END_LENGTH: usize = 22;
const END64: [u8; 4] = *b"PK\x06\x06";
const END64_LENGTH: usize = 56;
const LOCATOR64: [u8; 4] = *b"PK\x06\x07";
const LOCATOR64_LENGTH: usize = 20;
const DIRECTORY: [u8; 4] = *b"PK\x01\x02";
const DIRECTORY_LENGTH: usize = 46;
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const LOCAL_LENGTH: usize = 30;
/// Field of an entry that holds what 32 bits cannot.
const EXTRA_ZIP64: u16 = 1;

/// The directory of a zip file, each entry checked only when it is asked for.
pub(super) struct Archive<'a> {
    bytes: &'a [u8],
    entries: BTreeMap<&'a str, Entry>,
}

struct Entry {
    flags: u16,
    method: u16,
    stored: u64,
    size: u64,
    local: u64,
}

impl<'a> Archive<'a> {
    /// Reads the directory.
    pub(super) fn open(bytes: &'a [u8]) -> Result<Archive<'a>, ArchiveFault> {
        let (count, mut at) = find_directory(bytes)?;
        let mut entries = BTreeMap::new();
        for _ in 0..count {
            let what = "an entry of the directory";
            let fixed = record(bytes, at, what, DIRECTORY, DIRECTORY_LENGTH)?;
            let lengths = [28, 30, 32].map(|i| usize::from(u16_at(fixed, i)));
            let rest = slice(bytes, at, what, DIRECTORY_LENGTH + lengths.iter().sum::<usize>())?;
            let (name, extra) = rest[DIRECTORY_LENGTH..].split_at(lengths[0]);
            let name = std::str::from_utf8(name).map_err(|_| ArchiveFault::Name { at })?;
            let mut large = extra_field(&extra[..lengths[1]], EXTRA_ZIP64).unwrap_or_default();
            // The 64-bit values are there, in this order, for the fields whose 32 bits are all ones.
            let mut wide = |i: usize| match u32_at(fixed, i) {
                u32::MAX => take_u64(&mut large).unwrap_or(u64::from(u32::MAX)),
                n => u64::from(n),
            };
            let (size, stored, local) = (wide(24), wide(20), wide(42));
            let entry = Entry { flags: u16_at(fixed, 8), method: u16_at(fixed, 10), stored, size, local };
            if entries.insert(name, entry).is_some() {
                return Err(ArchiveFault::Duplicate { name: name.to_owned() });
            }
            at += rest.len() as u64;
        }
        Ok(Archive { bytes, entries })
    }

    /// The entries' names, sorted.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.entries.keys().copied()
    }

    /// Where in the file an entry's bytes are.
    pub(super) fn range(&self, name: &str) -> Result<Range<usize>, ArchiveFault> {
        const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
        let owned = || name.to_owned();
        let Some(entry) = self.entries.get(name) else { return Err(ArchiveFault::Missing { name: owned() }) };
        let &Entry { flags, method, stored, size, local } = entry;
        if flags & ENCRYPTED != 0 {
            return Err(ArchiveFault::Encrypted { name: owned() });
        }
        if method != 0 {
            return Err(ArchiveFault::Compressed { name: owned(), method });
        }
        if stored != size {
            return Err(ArchiveFault::Lengths { name: owned(), stored, size });
        }
        let header = record(self.bytes, local, "the header of an entry", LOCAL, LOCAL_LENGTH)?;
        let before = LOCAL_LENGTH as u64 + u64::from(u16_at(header, 26)) + u64::from(u16_at(header, 28));
        let data = local.checked_add(before).and_then(|start| Some((start, start.checked_add(size)?)));
        let range = data.and_then(|(start, end)| Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?));
        range.filter(|range| range.end <= self.bytes.len()).ok_or(ArchiveFault::Truncated {
            what: "an entry's data",
            at: local.saturating_add(before),
            length: self.bytes.len(),
        })
    }

    /// An entry's bytes.
    pub(super) fn read(&self, name: &str) -> Result<&'a [u8], ArchiveFault> {
        Ok(&self.bytes[self.range(name)?])
    }
}

/// Number of entries, and where the first one of the directory is.
fn find_directory(bytes: &[u8]) -> Result<(u64, u64), ArchiveFault> {
    // The end record is the last one, but for a comment of up to 65,535 bytes whose length it says.
    let ends_here = |&at: &usize| bytes[at..].starts_with(&END) && at + END_LENGTH + comment(bytes, at) == bytes.len();
    let last = bytes.len().checked_sub(END_LENGTH).ok_or(ArchiveFault::NoDirectory)?;
    let first = last.saturating_sub(usize::from(u16::MAX));
    let end = (first..=last).rev().find(ends_here).ok_or(ArchiveFault::NoDirectory)?;
    let fixed = &bytes[end..];
    let (disk, count, start) = (u16_at(fixed, 4), u16_at(fixed, 10), u32_at(fixed, 16));
    let (count, start) = if disk == u16::MAX || count == u16::MAX || start == u32::MAX {
        let locator = end.checked_sub(LOCATOR64_LENGTH).ok_or(ArchiveFault::NoDirectory)? as u64;
        let locator = record(bytes, locator, "the locator of the 64-bit directory", LOCATOR64, LOCATOR64_LENGTH)?;
        let end64 = record(bytes, u64_at(locator, 8), "the end of the 64-bit directory", END64, END64_LENGTH)?;
        if u32_at(end64, 16) != 0 || u32_at(end64, 20) != 0 {
            return Err(ArchiveFault::Parts);
        }
        (u64_at(end64, 32), u64_at(end64, 48))
    } else if disk != 0 || u16_at(fixed, 6) != 0 {
        return Err(ArchiveFault::Parts);
    } else {
        (u64::from(count), u64::from(start))
    };
    Ok((count, start))
}

fn comment(bytes: &[u8], end: usize) -> usize {
    usize::from(u16_at(&bytes[end..], 20))
}

/// `length` bytes of the file from `at` on.
fn slice<'a>(bytes: &'a [u8], at: u64, what: &'static str, length: usize) -> Result<&'a [u8], ArchiveFault> {
    let start = usize::try_from(at).ok();
    let range = start.and_then(|start| Some(start..start.checked_add(length)?));
    range.and_then(|range| bytes.get(range)).ok_or(ArchiveFault::Truncated { what, at, length: bytes.len() })
}

/// A record of fixed length that begins with `signature`.
fn record<'a>(
    bytes: &'a [u8],
    at: u64,
    what: &'static str,
    signature: [u8; 4],
    length: usize,
) -> Result<&'a [u8], ArchiveFault> {
    let record = slice(bytes, at, what, length)?;
    if record.starts_with(&signature) { Ok(record) } else { Err(ArchiveFault::Signature { what, at }) }
}

/// The contents of an extra field.
fn extra_field(mut extra: &[u8], id: u16) -> Option<&[u8]> {
    while extra.len() >= 4 {
        let (found, length) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let contents = extra.get(4..4 + length)?;
        if found == id {
            return Some(contents);
        }
        extra = &extra[4 + length..];
    }
    None
}

fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    let (value, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*value))
}

// The callers hold records whose length they have checked.

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
