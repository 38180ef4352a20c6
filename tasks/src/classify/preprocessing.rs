//! How a picture becomes numbers, and the files that say so.

use crate::error::{Error, Result};
use crate::files::read_json;
use crate::image::{Filter, Picture};
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";
const PROCESSOR: &str = "preprocessor_config.json";

/// ImageNet's, which published classifiers of the families here are trained with.
const IMAGENET_MEAN: [f64; 3] = [0.485, 0.456, 0.406];
const IMAGENET_STD: [f64; 3] = [0.229, 0.224, 0.225];

/// How a picture is brought to the model's size before its middle is cut out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resize {
    /// The shorter side becomes so long; the longer one keeps the proportion.
    Shorter(usize),
    /// Both sides become the model's, whatever the proportion.
    Exact,
    /// Not at all.
    Keep,
}

/// Where a setting comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Our own keys in `config.json`.
    Config,
    /// Hugging Face's `preprocessor_config.json`.
    Processor,
    /// No file says it: as models are usually evaluated on ImageNet.
    ImageNet,
}

impl Origin {
    /// The file's name, or that it is a default.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Config => CONFIG,
            Origin::Processor => PROCESSOR,
            Origin::ImageNet => "default (ImageNet)",
        }
    }
}

/// Where each setting of a [`Preprocessing`] comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the settings")]
pub struct Origins {
    pub resize: Origin,
    pub filter: Origin,
    pub mean: Origin,
    pub std: Origin,
}

/// How a picture becomes `pixel_values`: resized, its middle cut out, each channel `(x - mean) / std` for x from 0 to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Preprocessing {
    /// The model's side.
    pub size: usize,
    /// How the picture is resized first.
    pub resize: Resize,
    /// How new pixels are made of old ones.
    pub filter: Filter,
    /// What is subtracted, a number a channel.
    pub mean: Vec<f32>,
    /// What is divided by, a number a channel.
    pub std: Vec<f32>,
    /// Where these come from.
    pub origins: Origins,
}

impl fmt::Display for Resize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resize::Shorter(side) => write!(f, "shorter side to {side} pixels, then the centre is cropped"),
            Resize::Exact => f.write_str("both sides to the model's size"),
            Resize::Keep => f.write_str("not resized, the centre is cropped, with black around what is smaller"),
        }
    }
}

/// A line for each setting, and where it comes from.
impl fmt::Display for Preprocessing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Preprocessing { size, resize, filter, mean, std, origins } = self;
        let list = |numbers: &[f32]| numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        writeln!(f, "  size           {size} x {size}  [the model]")?;
        writeln!(f, "  resize         {resize}  [{}]", origins.resize.name())?;
        writeln!(f, "  interpolation  {}  [{}]", filter.name(), origins.filter.name())?;
        writeln!(f, "  mean           {}  [{}]", list(mean), origins.mean.name())?;
        write!(f, "  std            {}  [{}]", list(std), origins.std.name())
    }
}

/// The keys of `config.json`, which are this project's own.
#[derive(Debug, Default, Deserialize)]
struct Own {
    #[serde(default)]
    image_mean: Value,
    #[serde(default)]
    image_std: Value,
    image_resize: Option<usize>,
    image_interpolation: Option<String>,
}

/// The keys of Hugging Face's `preprocessor_config.json`.
#[derive(Debug, Default, Deserialize)]
struct Processor {
    #[serde(default)]
    image_mean: Value,
    #[serde(default)]
    image_std: Value,
    do_normalize: Option<bool>,
    do_rescale: Option<bool>,
    rescale_factor: Option<f64>,
    rescale_offset: Option<bool>,
    do_flip_channel_order: Option<bool>,
    do_resize: Option<bool>,
    #[serde(default)]
    size: Value,
    resample: Option<u64>,
    crop_pct: Option<f64>,
    do_center_crop: Option<bool>,
    #[serde(default)]
    crop_size: Value,
}

impl Preprocessing {
    /// Reads how pictures are prepared for a model of `channels` channels and `size` by `size` pixels from the files in
    /// `folder`; one that is not there says nothing.
    ///
    /// `config.json`, which takes precedence: `image_mean` and `image_std`, a number or one a channel; `image_resize`, the
    /// shorter side's length before the middle is cut out; `image_interpolation`, `nearest`, `bilinear` or `bicubic`.
    /// `preprocessor_config.json`, with the meaning that Hugging Face gives them: `image_mean`, `image_std`,
    /// `do_normalize`, `do_rescale`, `rescale_factor`, `do_resize`, `size`, `resample`, `crop_pct`, `do_center_crop`, `crop_size`.
    /// Otherwise as ImageNet's models are evaluated: bicubic, 8/7 of the model's size, ImageNet's mean and std (of which a
    /// model of another number of channels than three takes the average).
    ///
    /// # Errors
    /// [`Error::Read`] or [`Error::Malformed`] for a file that is there, also where its numbers do not fit the model.
    pub fn from_folder(folder: &Path, channels: usize, size: usize) -> Result<Preprocessing> {
        let (own, processor) = (Source::in_folder(folder, CONFIG), Source::in_folder(folder, PROCESSOR));
        let (config, hf): (Own, Processor) = (read_json(&own.path)?, read_json(&processor.path)?);
        let factor = processor.factor(&hf)?;
        let statistics = |key, first: &Value, second: &Value, (default, plain): ([f64; 3], f64)| {
            if let Some(found) = own.numbers(key, first, channels)? {
                return Ok((found, Origin::Config));
            }
            let found = match hf.do_normalize {
                Some(false) => Some(vec![plain as f32; channels]),
                _ => processor.numbers(key, second, channels)?,
            };
            if let Some(found) = found {
                return Ok((found.into_iter().map(|x| (f64::from(x) / factor) as f32).collect(), Origin::Processor));
            }
            let average = default.iter().sum::<f64>() / 3.0;
            let usual = (0..channels).map(|c| if channels == 3 { default[c] } else { average } as f32).collect();
            Ok::<_, Error>((usual, Origin::ImageNet))
        };
        let (mean, mean_origin) = statistics("image_mean", &config.image_mean, &hf.image_mean, (IMAGENET_MEAN, 0.0))?;
        let (std, std_origin) = statistics("image_std", &config.image_std, &hf.image_std, (IMAGENET_STD, 1.0))?;
        if std.iter().any(|&s| s <= 0.0) {
            let source = if std_origin == Origin::Config { &own } else { &processor };
            return Err(source.rejects("image_std", "positive numbers", &format!("{std:?}")));
        }
        let (filter, filter_origin) = match (&config.image_interpolation, hf.resample) {
            (Some(name), _) => (own.filter(name)?, Origin::Config),
            (None, Some(number)) => (processor.resample(number)?, Origin::Processor),
            (None, None) => (Filter::Bicubic, Origin::ImageNet),
        };
        let (resize, resize_origin) = match config.image_resize {
            Some(side) if fits(side, size) => (Resize::Shorter(side), Origin::Config),
            Some(side) => return Err(own.rejects("image_resize", &expected(size), &side.to_string())),
            None => match processor.resize(&hf, size)? {
                Some(resize) => (resize, Origin::Processor),
                None => (Resize::Shorter(size * 8 / 7), Origin::ImageNet),
            },
        };
        let origins = Origins { resize: resize_origin, filter: filter_origin, mean: mean_origin, std: std_origin };
        Ok(Preprocessing { size, resize, filter, mean, std, origins })
    }

    /// The picture's part that the model sees, in the model's size and colours.
    pub fn seen(&self, picture: &Picture) -> Picture {
        let (size, filter) = (self.size, self.filter);
        let gray;
        let picture = if self.mean.len() == 3 {
            picture
        } else {
            gray = picture.to_gray();
            &gray
        };
        let resized = match self.resize {
            Resize::Shorter(side) => picture.with_shorter_side(side, filter),
            Resize::Exact => picture.resized(size, size, filter),
            Resize::Keep => picture.padded(size, size),
        };
        let fits = resized.width() >= size && resized.height() >= size;
        if fits { resized.cropped(size, size) } else { resized.resized(size, size, filter) }
    }

    /// Appends the picture as (channels, size, size) numbers.
    pub(super) fn append(&self, picture: &Picture, pixels: &mut Vec<f32>) {
        let ready = self.seen(picture);
        for (channel, (mean, std)) in self.mean.iter().zip(&self.std).enumerate() {
            pixels.extend(ready.plane(channel).map(|sample| (f32::from(sample) / 255.0 - mean) / std));
        }
    }
}

/// A file of settings, for messages.
struct Source {
    path: PathBuf,
}

impl Source {
    fn in_folder(folder: &Path, name: &str) -> Source {
        Source { path: folder.join(name) }
    }

    fn rejects(&self, key: &str, expected: &str, found: &str) -> Error {
        let reason = format!("{key}: expected {expected}, found {found}");
        Error::malformed(&self.path, "an image configuration", reason)
    }

    /// A number for every channel, or one for all; `None` for null.
    fn numbers(&self, key: &str, value: &Value, channels: usize) -> Result<Option<Vec<f32>>> {
        let all = match value {
            Value::Null => return Ok(None),
            Value::Array(list) => list.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>(),
            one => one.as_f64().map(|number| vec![number; channels]),
        };
        match all {
            Some(numbers) if numbers.len() == channels => Ok(Some(numbers.into_iter().map(|x| x as f32).collect())),
            _ => {
                Err(self.rejects(key, &format!("a number, or one for each of {channels} channels"), &value.to_string()))
            }
        }
    }

    /// What numbers from 0 to 1 are multiplied by before the mean is taken away: 1 unless the file says otherwise.
    fn factor(&self, hf: &Processor) -> Result<f64> {
        for (key, asked) in [("rescale_offset", hf.rescale_offset), ("do_flip_channel_order", hf.do_flip_channel_order)]
        {
            if asked == Some(true) {
                return Err(self.rejects(key, "false", "true"));
            }
        }
        match hf.rescale_factor {
            _ if hf.do_rescale == Some(false) => Ok(255.0),
            None => Ok(1.0),
            Some(factor) if factor > 0.0 && factor.is_finite() => Ok(factor * 255.0),
            Some(factor) => Err(self.rejects("rescale_factor", "a positive number", &factor.to_string())),
        }
    }

    fn filter(&self, name: &str) -> Result<Filter> {
        match name {
            "nearest" => Ok(Filter::Nearest),
            "bilinear" => Ok(Filter::Bilinear),
            "bicubic" => Ok(Filter::Bicubic),
            _ => Err(self.rejects("image_interpolation", "nearest, bilinear or bicubic", name)),
        }
    }

    /// Pillow's numbers of filters.
    fn resample(&self, number: u64) -> Result<Filter> {
        match number {
            0 => Ok(Filter::Nearest),
            2 => Ok(Filter::Bilinear),
            3 => Ok(Filter::Bicubic),
            _ => Err(self.rejects("resample", "0 (nearest), 2 (bilinear) or 3 (bicubic)", &number.to_string())),
        }
    }

    /// As ConvNeXT's processor has it: small models see the centre of a picture, `share` of its shorter side; others all of it.
    fn cropped(&self, share: f64, side: Option<usize>, size: usize, hf: &Processor) -> Result<Resize> {
        /// From this size on nothing is cropped.
        const LARGE: usize = 384;
        if side != Some(size) {
            return Err(self.rejects("size", &format!("the model's size, {size}"), &hf.size.to_string()));
        }
        let shorter = (size as f64 / share) as usize;
        match size < LARGE {
            _ if share <= 0.0 || !fits(shorter, size) => {
                Err(self.rejects("crop_pct", &format!("above 1/{LARGEST}, and at most 1"), &share.to_string()))
            }
            true => Ok(Resize::Shorter(shorter)),
            false => Ok(Resize::Exact),
        }
    }

    fn resize(&self, hf: &Processor, size: usize) -> Result<Option<Resize>> {
        let crops = hf.do_center_crop.unwrap_or(!hf.crop_size.is_null());
        if let (true, Some((height, width))) = (crops, sides(&hf.crop_size))
            && (height, width) != (size, size)
        {
            return Err(self.rejects("crop_size", &format!("the model's size, {size}"), &hf.crop_size.to_string()));
        }
        if hf.do_resize == Some(false) {
            return Ok(Some(Resize::Keep));
        }
        let shortest = hf.size.get("shortest_edge").unwrap_or(&hf.size).as_u64().map(|side| side as usize);
        if let Some(share) = hf.crop_pct {
            return self.cropped(share, shortest, size, hf).map(Some);
        }
        match (shortest, sides(&hf.size)) {
            (Some(side), _) if !fits(side, size) => Err(self.rejects("size", &expected(size), &hf.size.to_string())),
            (Some(side), _) if crops || hf.size.is_object() => Ok(Some(Resize::Shorter(side))),
            (Some(_), _) => Ok(Some(Resize::Exact)),
            (None, Some(found)) if found == (size, size) => Ok(Some(Resize::Exact)),
            (None, Some(_)) => Err(self.rejects("size", &format!("the model's size, {size}"), &hf.size.to_string())),
            (None, None) if hf.size.is_null() => Ok(None),
            (None, None) => Err(self.rejects("size", "shortest_edge, or height and width", &hf.size.to_string())),
        }
    }
}

/// More times the model's size than any picture is resized to before its middle is cut out: a bound for memory.
const LARGEST: usize = 8;

/// Whether pictures may be resized to a shorter side of `side` pixels for a model of `size`.
fn fits(side: usize, size: usize) -> bool {
    (size..=LARGEST.saturating_mul(size)).contains(&side)
}

fn expected(size: usize) -> String {
    format!("at least the model's size, {size}, and at most {LARGEST} times that")
}

/// Height and width.
fn sides(value: &Value) -> Option<(usize, usize)> {
    let side = |key: &str| value.get(key).and_then(Value::as_u64).map(|side| side as usize);
    match value.as_u64() {
        Some(side) => Some((side as usize, side as usize)),
        None => side("height").zip(side("width")),
    }
}

#[cfg(test)]
mod tests;
