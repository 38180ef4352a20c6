//! Opens checkpoints, also without a configuration: for published models, presets have it.

use std::path::{Path, PathBuf};

use crate::checkpoint::{CONFIG, Checkpoint, Config, find_weights};
pub use crate::checkpoint::{PRESET_NAMES as NAMES, PRESETS, Preset};
use crate::error::Error;
use crate::families::Model;

/// Where a configuration comes from.
#[derive(Debug, Clone, Copy, Default)]
pub enum Source<'a> {
    /// `config.json` beside the weights; where there is none, the only preset whose tensors are those of the weights.
    #[default]
    Beside,
    /// A file.
    File(&'a Path),
    /// A preset, by its name.
    Preset(&'a str),
}

impl<'a> Source<'a> {
    /// The preset, else the file, else what is beside the weights.
    pub fn new(config: Option<&'a Path>, preset: Option<&'a str>) -> Source<'a> {
        preset.map(Source::Preset).or(config.map(Source::File)).unwrap_or_default()
    }
}

/// Opens weights with a configuration. `weights_key` is the key of the state dict in a file of torch.save that holds several;
/// `ignore` are patterns of unexpected tensors, see [`Checkpoint::ignore_unexpected`].
///
/// # Errors
/// As [`Checkpoint::open`], [`Error::UnknownPreset`], and without `config.json` [`Error::NoConfig`] or
/// [`Error::AmbiguousPreset`].
pub fn open(
    path: &Path,
    source: Source<'_>,
    weights_key: Option<&str>,
    ignore: &[String],
) -> Result<Checkpoint, Error> {
    let weights = find_weights(path)?;
    let beside = weights.with_file_name(CONFIG);
    let (config, preset) = match source {
        Source::File(file) => (Some(Config::read(file)?), None),
        Source::Beside if beside.exists() => (Some(Config::read(&beside)?), None),
        Source::Beside => (None, None),
        Source::Preset(name) => (None, Some(Preset::named(name)?)),
    };
    let configured = config.is_some();
    let config = config.unwrap_or_else(|| Config::new(&beside, serde_json::Map::new()));
    let mut checkpoint = Checkpoint::read(weights, config, weights_key)?;
    checkpoint.ignore_unexpected(ignore);
    if !configured {
        let preset = match preset {
            Some(preset) => preset,
            None => detect(&mut checkpoint, beside)?,
        };
        checkpoint.set_preset(preset)?;
    }
    Ok(checkpoint)
}

/// The only preset that weights without the configuration `config` are of.
fn detect(checkpoint: &mut Checkpoint, config: PathBuf) -> Result<&'static Preset, Error> {
    let mut fitting = Vec::new();
    for preset in PRESETS {
        checkpoint.set_config(preset.config()?);
        if let Some((key, value)) = preset.choice {
            checkpoint.configure(key, value);
        }
        let family = checkpoint.config().str_opt("family")?.unwrap_or_default().to_owned();
        if Model::read(checkpoint, &family).is_ok() {
            fitting.push(preset);
        }
    }
    match *fitting {
        [preset] if preset.twin.is_none() => Ok(preset),
        [] => Err(Error::NoConfig { config, known: NAMES.join(", ") }),
        _ => {
            let names = fitting.iter().flat_map(|preset| [Some(preset.name), preset.twin]).flatten();
            Err(Error::AmbiguousPreset { config, choices: names.collect::<Vec<_>>().join(", ") })
        }
    }
}
