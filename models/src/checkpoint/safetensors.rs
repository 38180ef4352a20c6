//! The safetensors container: 8 bytes of header length, a JSON header, the tensors' bytes without gaps.
//!
//! Source: the format section of <https://github.com/huggingface/safetensors>.
//! Read here and not by the `safetensors` crate, which accepts a name that occurs twice, and whose errors name no tensor.

use std::collections::{BTreeMap, btree_map::Entry};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::map::{JSON_LIMIT, Source};
use super::{Container, Weight, WeightType};
use crate::error::Error;

const LENGTH: usize = 8;
const METADATA: &str = "__metadata__";

/// Reads a file's header and checks all that it says.
pub(super) fn read(file: &Path) -> Result<Container, Error> {
    let source = Arc::new(Source::open(file)?);
    let header = header(&source)?;
    let start = LENGTH as u64 + header.len() as u64;
    let available = usize::try_from(source.length() - start).unwrap_or(usize::MAX);
    let header: Header = serde_json::from_str(&header).map_err(|reason| Error::Json {
        file: file.to_owned(),
        part: "header",
        reason,
    })?;
    if header.tensors.is_empty() {
        return Err(Error::NoTensors { file: file.to_owned() });
    }
    let mut places = Vec::with_capacity(header.tensors.len());
    for (name, entry) in header.tensors {
        places.push(Place::check(file, name, entry, available)?);
    }
    places.sort_by_key(|place| (place.begin, place.end));
    check_cover(file, &places, available)?;
    let weight = |p: Place| Weight::stored(p.name, p.shape, p.dtype, Arc::clone(&source), start + p.begin as u64);
    let tensors = places.into_iter().map(weight).collect();
    Ok(Container { tensors, metadata: header.metadata, ..Container::default() })
}

/// The header's text.
fn header(source: &Source) -> Result<String, Error> {
    let file = || source.path().to_owned();
    let Some(rest) = source.length().checked_sub(LENGTH as u64) else {
        return Err(Error::TooShort { file: file(), found: source.length() as usize });
    };
    let mut length = [0; LENGTH];
    source.read(0, &mut length)?;
    let expected = u64::from_le_bytes(length);
    if expected > rest {
        return Err(Error::HeaderLength { file: file(), expected, found: usize::try_from(rest).unwrap_or(usize::MAX) });
    }
    if expected > JSON_LIMIT {
        return Err(Error::JsonTooLong { file: file(), found: expected, limit: JSON_LIMIT });
    }
    let mut text = vec![0; expected as usize];
    source.read(LENGTH as u64, &mut text)?;
    String::from_utf8(text).map_err(|e| Error::Utf8 { file: file(), part: "header", reason: e.utf8_error() })
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
