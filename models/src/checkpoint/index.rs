//! Which shard holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use super::map::read_json;
use crate::error::Error;

/// The tensors of an index file, each with its shard.
pub(super) struct Index {
    shards: BTreeMap<String, PathBuf>,
}

impl Index {
    /// The shards, each once, sorted.
    pub(super) fn shards(&self) -> BTreeSet<&Path> {
        self.shards.values().map(PathBuf::as_path).collect()
    }

    /// Tensors and their shards.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.shards.iter().map(|(tensor, shard)| (tensor.as_str(), shard.as_path()))
    }
}

/// Reads an index; shards are named relative to its folder.
pub(super) fn read(file: &Path) -> Result<Index, Error> {
    let text = read_json(file, "index")?;
    let raw: RawIndex =
        serde_json::from_str(&text).map_err(|reason| Error::Json { file: file.to_owned(), part: "index", reason })?;
    if raw.weight_map.0.is_empty() {
        return Err(Error::NoTensors { file: file.to_owned() });
    }
    let mut shards = BTreeMap::new();
    for (tensor, shard) in raw.weight_map.0 {
        if shard.is_empty() || !Path::new(&shard).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::ShardPath { file: file.to_owned(), shard });
        }
        shards.insert(tensor, file.with_file_name(shard));
    }
    Ok(Index { shards })
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: WeightMap,
}

/// A tensor may be listed once only, which a plain map would not notice.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

struct WeightMapVisitor;

impl<'de> Visitor<'de> for WeightMapVisitor {
    type Value = WeightMap;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor and file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut names = BTreeMap::new();
        while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
            if names.insert(tensor.clone(), shard).is_some() {
                return Err(A::Error::custom(format_args!("tensor {tensor:?} is listed twice")));
            }
        }
        Ok(WeightMap(names))
    }
}
