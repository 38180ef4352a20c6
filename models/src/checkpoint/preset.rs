//! The published models' configurations, which their checkpoints come without.

use std::path::PathBuf;

use super::Config;
use crate::error::Error;

/// A published model.
#[derive(Debug)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// The text of its `config.json`.
    pub config: &'static str,
    /// Another model whose tensors have the same names and shapes: weights alone do not say which of them they are.
    pub(crate) twin: Option<&'static str>,
    /// A key that users choose, and a value for it to compare tensors with.
    pub(crate) choice: Option<(&'static str, &'static str)>,
    /// The size of the vocabulary, where tensors say it otherwise.
    vocabulary: Option<usize>,
}

macro_rules! presets {
    ($($name:literal $(twin $twin:literal)? $(choice $key:literal $value:literal)? $(vocabulary $size:literal)?,)+) => {
        /// Every published model.
        ///
        /// MoH: the tables of arXiv 2410.11842 and <https://github.com/SkyworkAI/MoH>. MoA: arXiv 2210.05144, the models for
        /// WMT14 with 8 of 8 experts of width 128 and 16 of 32 of width 256, and <https://github.com/yikangshen/MoA>.
        ///
        /// The language models `moh-llm-s` and `moh-llm-b` have the published sizes, 186 and 881 million parameters. No code came
        /// with them: that half of their heads are shared and a quarter chosen, as in MoH-LLaMA3-8B, is this project's choice.
        pub const PRESETS: &[Preset] = &[$(Preset {
            name: $name,
            config: include_str!(concat!("../presets/", $name, ".json")),
            twin: presets!(@twin $($twin)?),
            choice: presets!(@choice $($key $value)?),
            vocabulary: presets!(@vocabulary $($size)?),
        }),+];

        /// Their names.
        pub const NAMES: &[&str] = &[$($name),+];
    };
    (@twin) => { None };
    (@twin $twin:literal) => { Some($twin) };
    (@vocabulary) => { None };
    (@vocabulary $size:literal) => { Some($size) };
    (@choice) => { None };
    (@choice $key:literal $value:literal) => { Some(($key, $value)) };
}

presets! {
    "moh-vit-small-75",
    "moh-vit-small-80",
    "moh-vit-base-50",
    "moh-vit-base-75",
    "moh-dit-s-75",
    "moh-dit-s-90",
    "moh-dit-b-75",
    "moh-dit-b-90",
    "moh-dit-l-75",
    "moh-dit-l-90",
    "moh-dit-xl-75",
    "moh-dit-xl-90",
    "moh-llama3-8b" twin "LLaMA3-8B",
    "moh-llm-s",
    "moh-llm-b",
    "moa-base" choice "part" "encoder" vocabulary 37000,
    "moa-big" choice "part" "encoder" vocabulary 37000,
}

impl Preset {
    /// The preset of that name.
    ///
    /// # Errors
    /// [`Error::UnknownPreset`].
    pub fn named(name: &str) -> Result<&'static Preset, Error> {
        let unknown = || Error::UnknownPreset { found: name.to_owned(), known: NAMES.join(", ") };
        PRESETS.iter().find(|preset| preset.name == name).ok_or_else(unknown)
    }

    /// The configuration.
    ///
    /// # Errors
    /// [`Error::Json`] never, because the tests read every preset.
    pub fn config(&self) -> Result<Config, Error> {
        self.parse(self.config)
    }

    /// The configuration of a model without a checkpoint, and its text: with the size of the vocabulary, which the tensors of a
    /// checkpoint say.
    ///
    /// # Errors
    /// [`Error::Json`] never, because the tests read every preset.
    pub fn complete(&self) -> Result<(Config, String), Error> {
        let text = match self.vocabulary {
            Some(size) => self.config.replacen('{', &format!("{{\n  \"vocab_size\": {size},"), 1),
            None => self.config.to_owned(),
        };
        Ok((self.parse(&text)?, text))
    }

    fn parse(&self, text: &str) -> Result<Config, Error> {
        let file = PathBuf::from(format!("preset {}", self.name));
        let values = serde_json::from_str(text);
        let values = values.map_err(|reason| Error::Json { file: file.clone(), part: "configuration", reason })?;
        Ok(Config::new(file, values))
    }
}
