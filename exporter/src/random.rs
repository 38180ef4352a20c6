//! Checkpoints of random weights in any size, written by streaming: to measure a model before it is trained.

use crate::check_part;
use crate::error::Error;
use crate::graph::ElementType;
use crate::report::{files, with_lengths};
use crate::staging::{Staging, write_file};
use moh_models::families::Tensors;
use moh_models::families::moa::Part;
use moh_models::sample::Rng;
use moh_models::{Config, Model, Warning};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Numbers made at a time.
const CHUNK: usize = 1 << 18;

/// Standard deviation of the weights, that of LLaMA's initialisation.
const SPREAD: f32 = 0.02;

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

/// A written checkpoint.
#[derive(Debug, Serialize)]
pub struct Written {
    /// The files and their lengths.
    #[serde(serialize_with = "files")]
    pub files: Vec<(PathBuf, u64)>,
    /// Numbers in it.
    pub parameters: usize,
    /// Their element type.
    #[serde(serialize_with = "crate::report::shown")]
    pub dtype: ElementType,
    /// What the numbers come from.
    pub seed: u64,
}

impl fmt::Display for Written {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.files.iter().map(|(path, _)| format!("wrote {}", path.display())).collect();
        f.write_str(&lines.join("\n"))
    }
}

/// Writes `model.safetensors` with the tensors and `config.json` with the text `config` into `folder`, which is made.
///
/// Norms are 1 and biases 0, everything else is uniform noise; the same `seed` gives the same file.
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
    let (weights, config_path) = (folder.join("model.safetensors"), folder.join("config.json"));
    if let (false, Some(path)) = (force, [&weights, &config_path].into_iter().find(|path| path.exists())) {
        return Err(Error::Exists { path: path.clone() });
    }
    let staging = Staging::new(&weights)?;
    let prepare = || {
        let path = staging.model();
        let file = File::create(&path).map_err(Error::io(&path))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let written = header(tensors, dtype, &mut out).and_then(|()| data(tensors, dtype, seed, &mut out));
        written.and_then(|()| out.into_inner()?.sync_all()).map_err(Error::io(&path))?;
        write_file(&staging.side_path("config.json"), config.as_bytes())
    };
    prepare().map_err(|error| staging.at_output(error))?;
    let files = with_lengths(staging.commit(&["config.json".to_owned()])?);
    let parameters = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    Ok(Written { files, parameters, dtype, seed })
}

/// The safetensors header: its length, then JSON, padded to 8 bytes.
fn header(tensors: &Tensors, dtype: ElementType, out: &mut impl Write) -> std::io::Result<()> {
    let name = match dtype {
        ElementType::F16 => "F16",
        ElementType::BF16 => "BF16",
        _ => "F32",
    };
    let mut end = 0;
    let entry = |(tensor, shape): &(String, Vec<usize>)| {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.size();
        (tensor.clone(), serde_json::json!({"dtype": name, "shape": shape, "data_offsets": [begin, end]}))
    };
    let entries: BTreeMap<String, serde_json::Value> = tensors.iter().map(entry).collect();
    let mut text = serde_json::to_vec(&entries)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(&text)
}

fn data(tensors: &Tensors, dtype: ElementType, seed: u64, out: &mut impl Write) -> std::io::Result<()> {
    let (rng, mut bytes) = (&mut Rng::new(seed), Vec::new());
    for (name, shape) in tensors {
        let elements: usize = shape.iter().product();
        let constant = constant_of(name);
        for start in (0..elements).step_by(CHUNK) {
            bytes.clear();
            for _ in start..(start + CHUNK).min(elements) {
                // Uniform noise of that standard deviation: normal numbers would take most of the time.
                let value = constant.unwrap_or_else(|| SPREAD * 3f32.sqrt() * (2.0 * rng.uniform() - 1.0));
                match dtype {
                    ElementType::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
                    ElementType::BF16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                    _ => bytes.extend(value.to_le_bytes()),
                }
            }
            out.write_all(&bytes)?;
        }
    }
    Ok(())
}

/// The value of tensors that training starts from a constant.
fn constant_of(name: &str) -> Option<f32> {
    let (module, kind) = name.rsplit_once('.').unwrap_or(("", name));
    let is_norm = module.rsplit('.').next().is_some_and(|last| last.contains("norm"));
    match kind {
        "weight" if is_norm => Some(1.0),
        "bias" => Some(0.0),
        "temperature" => Some(0.5),
        _ => None,
    }
}
