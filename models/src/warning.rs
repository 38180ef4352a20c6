//! What is probably not as the author of a checkpoint meant it, although a model can be made of it.

use std::fmt;
use std::path::PathBuf;

use crate::unused_key::UnusedKey;

/// Something to look at. The text names the file, and what was found in it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A key of the configuration that nobody reads, and that looks like an absent one.
    SimilarKey {
        /// The configuration file.
        file: PathBuf,
        /// The model's family.
        family: String,
        /// The key.
        key: UnusedKey,
    },
    /// Keys of the configuration that nobody reads, and that are not known to belong to other programs.
    UnusedKeys {
        /// The configuration file.
        file: PathBuf,
        /// The model's family.
        family: String,
        /// The keys.
        keys: Vec<String>,
    },
    /// A file with several state dicts.
    OtherWeights {
        /// The file.
        file: PathBuf,
        /// The key of the one that is used.
        chosen: String,
        /// The keys of the others.
        others: Vec<String>,
    },
    /// A tensor that the configuration says is another one, and that has other numbers.
    Tied {
        /// The file.
        file: PathBuf,
        /// Its name.
        tensor: String,
        /// The name of the one that is used in its place.
        used: String,
        /// The configuration's key that says so.
        key: &'static str,
    },
    /// Tensors without the prefix that all of the model's have.
    LeftOut {
        /// The file.
        file: PathBuf,
        /// Their names.
        tensors: Vec<String>,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::SimilarKey { file, family, key } => {
                write!(f, "{}: not read by family {family}: {key}", file.display())
            }
            Warning::UnusedKeys { file, family, keys } => {
                write!(f, "{}: not read by family {family}: {}", file.display(), listed(keys))
            }
            Warning::OtherWeights { file, chosen, others } => {
                write!(
                    f,
                    "{}: the weights are those of {chosen:?}; the file also has {}",
                    file.display(),
                    listed(others)
                )
            }
            Warning::Tied { file, tensor, used, key } => {
                let file = file.display();
                write!(
                    f,
                    "{file}: {tensor:?} is not used and differs from {used:?}, which {key:?}: true puts in its place"
                )
            }
            Warning::LeftOut { file, tensors } => {
                let count = tensors.len();
                write!(f, "{}: {count} tensors are no part of the model: {}", file.display(), listed(tensors))
            }
        }
    }
}

/// The names, of many the first ones.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let mut shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    if names.len() > SHOWN {
        shown.push(format!("and {} more", names.len() - SHOWN));
    }
    shown.join(", ")
}
