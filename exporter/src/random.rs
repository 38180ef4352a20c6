//! Checkpoints of random weights in any size, written by streaming: to measure a model before it is trained.

use crate::background::{self, Buffer, Output};
use crate::check_part;
use crate::error::Error;
use crate::graph::ElementType;
use crate::room;
use crate::side_files::json;
use crate::staging::OutputFile;
use crate::staging::{Staging, write_file};
use crate::weights::put;
use moh_models::families::Tensors;
use moh_models::families::moa::Part;
use moh_models::initial::{DEVIATION, constant, seed_of};
use moh_models::sample::Rng;
use moh_models::{Config, Model, Warning};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Numbers made at a time; even, because two are made of one draw.
const CHUNK: usize = 1 << 16;

/// Bytes that are worth handing to the thread that writes them.
const PART: usize = 4 << 20;

/// Names of tensors that a model whose parts share all embeddings has under another name already.
const SHARED: [&str; 2] = ["decoder.embed_tokens.weight", "decoder.output_projection.weight"];

/// The tensors of the model that `config` describes, and what is probably not as it was meant: of a model in parts those of `part`,
/// or of both.
///
/// # Errors
/// Those of the configuration, or a part of a model that has none.
pub fn plan(config: &Config, family: Option<&str>, part: Option<Part>) -> Result<(Tensors, Vec<Warning>), Error> {
    let in_parts = config.has("encoder_layers") && config.has("decoder_layers") && !config.has("part");
    let of = |part: Option<Part>| {
        let mut config = config.clone();
        if let Some(part) = part {
            config.set("part", part.name().into());
        }
        let (model, tensors) = Model::plan(&config, family)?;
        check_part(part, &model)?;
        Ok::<_, Error>((tensors, model.warnings().to_vec()))
    };
    if !in_parts || part.is_some() {
        return of(part);
    }
    let (mut tensors, warnings) = of(Some(Part::Encoder))?;
    let shared = config.bool_or("share_all_embeddings", false)?;
    let (rest, _) = of(Some(Part::Decoder))?;
    tensors.extend(rest.into_iter().filter(|(name, _)| !shared || !SHARED.contains(&name.as_str())));
    Ok((tensors, warnings))
}

/// The text of a configuration, `text`, with the family and the part that were chosen beside it: what is read of the checkpoint is
/// then what was written.
///
/// # Errors
/// [`Error::Io`] for a text that is no JSON object.
pub fn config(text: &str, family: Option<&str>, part: Option<Part>) -> Result<String, Error> {
    let object = serde_json::from_str(text).map_err(|e| Error::io(CONFIG)(e.into()))?;
    let keys = [("family", family), ("part", part.map(Part::name))];
    let keys = keys.into_iter().filter_map(|(key, value)| Some((key, value?.into())));
    Ok(json::with_keys(&object, text, keys.collect()))
}

/// A written checkpoint.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The files.
    pub files: Vec<OutputFile>,
    /// Numbers in it.
    pub parameters: usize,
    /// Their element type.
    #[serde(serialize_with = "crate::text::shown")]
    pub dtype: ElementType,
    /// What the numbers come from.
    pub seed: u64,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.files.iter().map(|file| format!("wrote {}", file.path.display())).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// Bytes of tensors from which on a checkpoint is written in several files, as transformers does.
const SHARD: u64 = 5_000_000_000;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// Writes the tensors and `config.json` with the text `config` into `folder`, which is made: `model.safetensors`, or several files
/// and `model.safetensors.index.json` where it would have more than 5 GB.
///
/// Norms are 1 and biases 0, everything else is uniform noise. The numbers of a tensor depend on `seed` and its name.
///
/// # Errors
/// [`Error::Exists`] unless `force`; [`Error::Io`]. Nothing is left then.
pub fn write(
    folder: &Path,
    config: &str,
    tensors: &Tensors,
    dtype: ElementType,
    seed: u64,
    force: bool,
) -> Result<Written, Error> {
    write_shards(folder, config, shards(tensors, dtype, SHARD), dtype, seed, force)
}

/// Files of up to `limit` bytes, or of one tensor.
fn shards(tensors: &Tensors, dtype: ElementType, limit: u64) -> Vec<&[(String, Vec<usize>)]> {
    let (mut shards, mut rest, mut at, mut bytes) = (Vec::new(), tensors.as_slice(), 0, 0);
    while at < rest.len() {
        bytes += bytes_of(&rest[at].1, dtype);
        if bytes > limit && at > 0 {
            let (full, left) = rest.split_at(at);
            shards.push(full);
            (rest, at, bytes) = (left, 0, 0);
        } else {
            at += 1;
        }
    }
    shards.push(rest);
    shards
}

fn bytes_of(shape: &[usize], dtype: ElementType) -> u64 {
    shape.iter().product::<usize>() as u64 * dtype.size() as u64
}

fn write_shards(
    folder: &Path,
    config: &str,
    shards: Vec<&[(String, Vec<usize>)]>,
    dtype: ElementType,
    seed: u64,
    force: bool,
) -> Result<Written, Error> {
    let count = shards.len();
    let shard = |i: usize| format!("model-{:05}-of-{count:05}.safetensors", i + 1);
    let (main, mut others) = match count {
        1 => (SINGLE, Vec::new()),
        _ => (INDEX, (0..count).map(shard).collect::<Vec<_>>()),
    };
    others.push(CONFIG.to_owned());
    // A single file would be read in the place of an index.
    let taken = [main, SINGLE].into_iter().chain(others.iter().map(String::as_str)).map(|name| folder.join(name));
    if let (false, Some(path)) = (force, taken.into_iter().find(|path| path.exists())) {
        return Err(Error::Exists { path });
    }
    let mut staging = Staging::new(&folder.join(main))?;
    if count > 1 {
        staging.replace(SINGLE);
    }
    let bytes: u64 = shards.iter().flat_map(|shard| shard.iter()).map(|(_, shape)| bytes_of(shape, dtype)).sum();
    let prepare = || {
        room::check(&staging.path(""), folder, bytes)?;
        for (i, tensors) in shards.iter().enumerate() {
            let name = if count == 1 { SINGLE.to_owned() } else { shard(i) };
            background::write(&staging.path(&name), None, |out| {
                header(tensors, dtype, &mut out.part)?;
                data(tensors, dtype, seed, out)
            })?;
        }
        if count > 1 {
            let named = shards.iter().enumerate().flat_map(|(i, tensors)| tensors.iter().map(move |of| (i, of)));
            let weight_map: BTreeMap<&str, String> =
                named.map(|(i, (tensor, _))| (tensor.as_str(), shard(i))).collect();
            let index = serde_json::json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
            write_file(&staging.path(INDEX), format!("{index:#}\n").as_bytes())?;
        }
        write_file(&staging.side_path(CONFIG), config.as_bytes())
    };
    prepare().map_err(|error| staging.at_output(error))?;
    let turn = staging.turn();
    let files = staging.commit(turn, &others)?;
    let parameters =
        shards.iter().flat_map(|shard| shard.iter()).map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(Written { files, parameters, dtype, seed })
}

/// The safetensors header: its length, then JSON, padded to 8 bytes.
pub(crate) fn header(tensors: &[(String, Vec<usize>)], dtype: ElementType, out: &mut Buffer) -> Result<(), Error> {
    let name = match dtype {
        ElementType::F16 => "F16",
        ElementType::BF16 => "BF16",
        _ => "F32",
    };
    let mut end = 0;
    let entry = |(tensor, shape): &(String, Vec<usize>)| {
        let begin = end;
        end += bytes_of(shape, dtype);
        (tensor.clone(), serde_json::json!({"dtype": name, "shape": shape, "data_offsets": [begin, end]}))
    };
    let entries: BTreeMap<String, serde_json::Value> = tensors.iter().map(entry).collect();
    let mut text = serde_json::to_vec(&entries).map_err(|e| Error::io("")(e.into()))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.put(&(text.len() as u64).to_le_bytes());
    out.put(&text);
    Ok(())
}

fn data(tensors: &[(String, Vec<usize>)], dtype: ElementType, seed: u64, out: &mut Output) -> Result<(), Error> {
    for (name, shape) in tensors {
        let elements: usize = shape.iter().product();
        let constant = constant(name);
        let mut rng = Rng::new(seed_of(seed, name));
        let mut values = vec![constant.unwrap_or(0.0); CHUNK.min(elements)];
        for start in (0..elements).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(elements - start)];
            if constant.is_none() {
                noise(&mut rng, values);
            }
            put(dtype, values, out.part.grow(values.len() * dtype.size()));
            if out.part.len() >= PART {
                out.hand_over()?;
            }
        }
    }
    Ok(())
}

/// Uniform noise of the wanted standard deviation: normal numbers would take most of the time.
fn noise(rng: &mut Rng, values: &mut [f32]) {
    let scale = DEVIATION * 3f32.sqrt() / (1u32 << 31) as f32;
    for pair in values.chunks_mut(2) {
        let bits = rng.bits();
        for (value, bits) in pair.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
            *value = bits.cast_signed() as f32 * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use moh_models::Checkpoint;

    fn tensors() -> Tensors {
        let tensor = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
        vec![
            tensor("a.weight", &[3, 5]),
            tensor("b.norm.weight", &[4]),
            tensor("b.weight", &[70_001]),
            tensor("c.bias", &[2]),
        ]
    }

    fn read(folder: &Path) -> Checkpoint {
        Checkpoint::open(folder, None).unwrap()
    }

    #[test]
    fn files_of_a_size() {
        let tensors = tensors();
        let lengths =
            |limit| shards(&tensors, ElementType::F32, limit).iter().map(|shard| shard.len()).collect::<Vec<_>>();
        assert_eq!(lengths(1 << 40), [4]);
        assert_eq!(lengths(1), [1, 1, 1, 1]);
        assert_eq!(lengths(76), [2, 1, 1]);
        assert_eq!(lengths(280_020), [2, 2]);
    }

    /// In one file or several, and in any type: a tensor's numbers are the same.
    #[test]
    fn numbers_depend_on_seed_and_name_alone() {
        let (root, tensors) = (tempfile::tempdir().unwrap(), tensors());
        let at = |name: &str| root.path().join(name);
        let write = |name: &str, seed, limit, dtype| {
            write_shards(&at(name), "{}", shards(&tensors, dtype, limit), dtype, seed, false).unwrap()
        };
        write("one", 1, 1 << 40, ElementType::F32);
        let several = write("several", 1, 76, ElementType::F32);
        let names: Vec<_> = several.files.iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect();
        let shard = |i| format!("model-0000{i}-of-00003.safetensors");
        assert_eq!(names, [&shard(1), &shard(2), &shard(3), "config.json", INDEX]);
        write("other", 2, 1 << 40, ElementType::F32);
        write("narrow", 1, 1 << 40, ElementType::BF16);
        let values = |folder: &str, name: &str| read(&at(folder)).get(name).unwrap().to_f32().unwrap();
        for (name, _) in &tensors {
            assert_eq!(values("one", name), values("several", name), "{name}");
            let near = |(a, b): (f32, f32)| (a - b).abs() <= a.abs() / 256.0;
            assert!(values("one", name).into_iter().zip(values("narrow", name)).all(near), "{name}");
        }
        assert_ne!(values("one", "b.weight"), values("other", "b.weight"));
        let noise = values("one", "b.weight");
        let spread = (noise.iter().map(|v| v * v).sum::<f32>() / noise.len() as f32).sqrt();
        assert!((spread - DEVIATION).abs() < DEVIATION / 50.0, "{spread}");
        assert_eq!((values("one", "b.norm.weight"), values("one", "c.bias")), (vec![1.0; 4], vec![0.0; 2]));
    }

    #[test]
    fn one_file_beside_an_index() {
        let (root, tensors) = (tempfile::tempdir().unwrap(), tensors());
        let write = |limit, force| {
            write_shards(root.path(), "{}", shards(&tensors, ElementType::F32, limit), ElementType::F32, 0, force)
        };
        write(1 << 40, false).unwrap();
        assert!(matches!(write(76, false), Err(Error::Exists { path }) if path.ends_with(SINGLE) ));
        write(76, true).unwrap();
        assert!(read(root.path()).path().ends_with(INDEX), "the old file would be read");
    }
}
