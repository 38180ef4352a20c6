//! The safetensors container: 8 bytes of header length, a JSON header, the tensors' bytes without gaps.
//!
//! Source: the format section of <https://github.com/huggingface/safetensors>.
//! Read here and not by the `safetensors` crate, which accepts a name that occurs twice, and whose errors name no tensor.

use std::collections::{BTreeMap, btree_map::Entry};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::map::{JSON_LIMIT, Map};
use super::{Container, Weight, WeightType};
use crate::error::Error;

const LENGTH: usize = 8;
const METADATA: &str = "__metadata__";

/// Maps a file and checks all that its header says.
pub(super) fn read(file: &Path) -> Result<Container, Error> {
    let map = Arc::new(Map::open(file)?);
    let (header, data) = split(file, map.bytes())?;
    let header: Header =
        serde_json::from_str(header).map_err(|reason| Error::Json { file: file.to_owned(), part: "header", reason })?;
    if header.tensors.is_empty() {
        return Err(Error::NoTensors { file: file.to_owned() });
    }
    let mut places = Vec::with_capacity(header.tensors.len());
    for (name, entry) in header.tensors {
        places.push(Place::check(file, name, entry, data.len())?);
    }
    places.sort_by_key(|place| (place.begin, place.end));
    check_cover(file, &places, data.len())?;
    let start = map.bytes().len() - data.len();
    let weight = |p: Place| Weight::mapped(p.name, p.shape, p.dtype, Arc::clone(&map), start + p.begin..start + p.end);
    let tensors = places.into_iter().map(weight).collect();
    Ok(Container { tensors, metadata: header.metadata, ..Container::default() })
}

/// The header's text and the bytes after it.
fn split<'a>(file: &Path, bytes: &'a [u8]) -> Result<(&'a str, &'a [u8]), Error> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Err(Error::TooShort { file: file.to_owned(), found: bytes.len() });
    };
    let expected = u64::from_le_bytes(*length);
    let header_and_data = usize::try_from(expected).ok().and_then(|length| rest.split_at_checked(length));
    let Some((header, data)) = header_and_data else {
        return Err(Error::HeaderLength { file: file.to_owned(), expected, found: rest.len() });
    };
    if expected > JSON_LIMIT {
        return Err(Error::JsonTooLong { file: file.to_owned(), found: expected, limit: JSON_LIMIT });
    }
    let header =
        std::str::from_utf8(header).map_err(|reason| Error::Utf8 { file: file.to_owned(), part: "header", reason })?;
    Ok((header, data))
}

/// A tensor's checked type and place in the data.
struct Place {
    name: String,
    dtype: WeightType,
    shape: Vec<usize>,
    begin: usize,
    end: usize,
}

impl Place {
    fn check(file: &Path, name: String, entry: HeaderEntry, available: usize) -> Result<Place, Error> {
        let file = || file.to_owned();
        let HeaderEntry { dtype, shape, data_offsets: (begin, end) } = entry;
        let Some(dtype) = WeightType::parse(&dtype) else {
            return Err(Error::TensorType { file: file(), tensor: name, found: dtype });
        };
        if begin > end || end > available {
            return Err(Error::TensorOffsets { file: file(), tensor: name, begin, end, available });
        }
        let elements = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let Some(expected) = elements.and_then(|n| n.checked_mul(dtype.bytes())) else {
            return Err(Error::TensorOverflow { file: file(), tensor: name, shape });
        };
        if expected != end - begin {
            return Err(Error::TensorLength { file: file(), tensor: name, dtype, shape, expected, found: end - begin });
        }
        Ok(Place { name, dtype, shape, begin, end })
    }
}

/// Checks that the places, sorted, cover the data: no overlap (the graver fault, named first), no gap, nothing after the last.
fn check_cover(file: &Path, places: &[Place], available: usize) -> Result<(), Error> {
    let file = || file.to_owned();
    for pair in places.windows(2) {
        if pair[1].begin < pair[0].end {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(Error::TensorOverlap { file: file(), first, second });
        }
    }
    let ends = [0].into_iter().chain(places.iter().map(|place| place.end));
    let begins = places.iter().map(|place| place.begin).chain([available]);
    match ends.zip(begins).find(|(end, begin)| begin > end) {
        Some((begin, end)) => Err(Error::Gap { file: file(), begin, end }),
        None => Ok(()),
    }
}

/// A tensor as the header says.
#[derive(serde::Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The header. A name may occur once only, which a plain map would not notice.
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, HeaderEntry>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                header.metadata = map.next_value()?;
                continue;
            }
            match header.tensors.entry(name) {
                Entry::Vacant(vacant) => {
                    let entry = map.next_value();
                    let named = |e| A::Error::custom(format_args!("tensor {:?}: {e}", vacant.key()));
                    let entry = entry.map_err(named)?;
                    vacant.insert(entry);
                }
                Entry::Occupied(entry) => {
                    return Err(A::Error::custom(format_args!("tensor {:?} occurs twice", entry.key())));
                }
            }
        }
        Ok(header)
    }
}
