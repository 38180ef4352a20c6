//! What a checkpoint is: the family of its configuration, and the prefix of its tensors' names.

use super::{AnyFamily, Model, NAMES};
use crate::checkpoint::{Checkpoint, Prefix, WeightType};
use crate::error::Error;
use crate::ops::Result;
use crate::warning::Warning;

/// Reads `checkpoint` as family `name`, whose keys are then known.
fn read(name: &str, checkpoint: &Checkpoint) -> Result<AnyFamily> {
    read_with(checkpoint, &|checkpoint| AnyFamily::load(name, checkpoint))
}

fn read_with(checkpoint: &Checkpoint, load: &impl Fn(&Checkpoint) -> Result<AnyFamily>) -> Result<AnyFamily> {
    checkpoint.forget();
    checkpoint.config().know(&["family"]);
    load(checkpoint)
}

/// Reads `checkpoint` as family `name`, under the names in the files or without a prefix of theirs.
pub(super) fn load(
    name: &str,
    checkpoint: &Checkpoint,
    load: impl Fn(&Checkpoint) -> Result<AnyFamily>,
) -> Result<Model> {
    let mismatch = match read_with(checkpoint, &load) {
        Ok(family) => return model(name, family, checkpoint, None),
        Err(Error::Tensors(mismatch)) => mismatch,
        Err(error) => return Err(error),
    };
    // A misspelt key may be the reason.
    check_keys(name, checkpoint)?;
    let (mut found, mut best) = (Vec::new(), mismatch.clone());
    for prefix in checkpoint.prefixes(&mismatch) {
        let renamed = checkpoint.renamed(&prefix);
        match read_with(&renamed, &load) {
            Ok(family) => found.push((family, renamed, prefix)),
            // A list of what remains wrong says more than that every name is another.
            Err(Error::Tensors(other)) if other.problems.len() < best.problems.len().div_ceil(2) => {
                best = other;
                best.prefix = Some(prefix);
            }
            Err(Error::Tensors(_) | Error::Config { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    match found.len() {
        0 => Err(Error::Tensors(best)),
        1 => {
            let Some((family, renamed, prefix)) = found.pop() else { return Err(Error::Tensors(best)) };
            let mut model = model(name, family, &renamed, Some(prefix))?;
            let left_out = model.prefix.as_ref().map_or(Vec::new(), |prefix| checkpoint.left_out(prefix));
            if !left_out.is_empty() {
                model.warnings.push(Warning::LeftOut { file: checkpoint.path().to_owned(), tensors: left_out });
            }
            Ok(model)
        }
        _ => {
            let prefix = |prefix: Prefix| match prefix {
                Prefix::Removed(prefix) | Prefix::Added(prefix) => prefix,
            };
            let prefixes = found.into_iter().map(|(.., found)| prefix(found)).collect();
            Err(Error::AmbiguousPrefix { file: checkpoint.path().to_owned(), prefixes })
        }
    }
}

fn model(name: &str, family: AnyFamily, checkpoint: &Checkpoint, prefix: Option<Prefix>) -> Result<Model> {
    check_keys(name, checkpoint)?;
    let usage = checkpoint.config().usage();
    let file = || checkpoint.config().path().to_owned();
    let mut warnings = Vec::new();
    if let (Some(chosen), false) = (checkpoint.weights_key(), checkpoint.other_keys().is_empty()) {
        let (file, others) = (checkpoint.path().to_owned(), checkpoint.other_keys().to_vec());
        warnings.push(Warning::OtherWeights { file, chosen: chosen.to_owned(), others });
    }
    let family_name = || name.to_owned();
    warnings.extend(usage.similar.into_iter().map(|key| Warning::SimilarKey {
        file: file(),
        family: family_name(),
        key,
    }));
    if !usage.unknown.is_empty() {
        warnings.push(Warning::UnusedKeys { file: file(), family: family_name(), keys: usage.unknown });
    }
    warnings.extend(family.warning().cloned());
    let weights = checkpoint.of_the_model();
    let largest = weights.iter().max_by_key(|weight| weight.elements());
    Ok(Model {
        tensors: weights.iter().map(|weight| (weight.name().to_owned(), weight.shape().to_vec())).collect(),
        weight_type: largest.map_or(WeightType::F32, |weight| weight.dtype()),
        name: family_name(),
        family,
        prefix,
        ignored: checkpoint.ignored().into_iter().collect(),
        defaults: usage.defaults,
        warnings,
    })
}

/// Refuses keys that look as if they were to change which heads are used, and that nobody has read.
fn check_keys(name: &str, checkpoint: &Checkpoint) -> Result<()> {
    let keys = checkpoint.config().usage().decisive;
    match keys.is_empty() {
        true => Ok(()),
        false => {
            let file = checkpoint.config().path().to_owned();
            Err(Error::UnusedKeys { file, family: name.to_owned(), keys })
        }
    }
}

/// The family that the configuration names.
pub(super) fn configured_family(checkpoint: &Checkpoint) -> Result<String> {
    let config = checkpoint.config();
    if let Some(name) = config.str_opt("family")? {
        return Ok(name.to_owned());
    }
    // A published MoH-LLaMA has neither weights nor keys of its own: to guess would be silently wrong.
    let fitting = fitting(checkpoint).into_iter().map(|(name, _)| name.to_owned()).collect();
    Err(Error::NoFamily { file: config.path().to_owned(), known: NAMES.join(", "), fitting })
}

/// The families that the configuration fits, with the keys that they read; only those whose tensors fit too, if any do. One that would
/// refuse a key that it does not read is none of them.
fn fitting(checkpoint: &Checkpoint) -> Vec<(&'static str, Vec<String>)> {
    let (mut whole, mut by_keys) = (Vec::new(), Vec::new());
    for &name in NAMES {
        // A part of a model is chosen with each export, and not by the configuration.
        let parts = ["encoder", "decoder"].map(|part| {
            let mut checkpoint = checkpoint.clone();
            if !checkpoint.config().has("part") {
                checkpoint.configure("part", part);
            }
            checkpoint
        });
        for checkpoint in parts {
            let loaded = read(name, &checkpoint);
            let used = checkpoint.config().used();
            match loaded {
                Ok(_) | Err(Error::Tensors(_)) if !checkpoint.config().usage().decisive.is_empty() => {}
                Ok(_) => whole.push((name, used)),
                Err(Error::Tensors(_) | Error::NotFinite { .. }) => by_keys.push((name, used)),
                Err(_) => continue,
            }
            break;
        }
    }
    if whole.is_empty() { by_keys } else { whole }
}

/// The error of reading `checkpoint` as family `name`, with what may be the reason.
pub(super) fn explained(error: Error, name: &str, checkpoint: &Checkpoint) -> Error {
    let config = checkpoint.config();
    match error {
        Error::Config { ref key, ref expected, ref found, .. } => {
            let absent = !key.contains(',') && !config.has(key);
            let _ = read(name, checkpoint);
            let own = config.used();
            let fitting = fitting(checkpoint);
            // A key that is refused may be what the others read.
            let shows = |other: &&String| *other != "part" && (*other == key || !own.contains(other));
            let mut keys: Vec<String> = fitting.iter().flat_map(|(_, keys)| keys).filter(shows).cloned().collect();
            let mut seen = std::collections::BTreeSet::new();
            keys.retain(|key| seen.insert(key.clone()));
            keys.sort_by_key(|other| other != key);
            keys.truncate(4);
            if fitting.is_empty() || fitting.iter().any(|(fits, _)| *fits == name) || (keys.is_empty() && !absent) {
                return error;
            }
            Error::WrongFamily {
                file: config.path().to_owned(),
                reason: format!("{name} ({key:?}: expected {expected}, found {found})"),
                fitting: fitting.into_iter().map(|(name, _)| name.to_owned()).collect(),
                keys,
            }
        }
        Error::Tensors(mut mismatch) => {
            let _ = read(name, checkpoint);
            for key in config.usage().similar {
                mismatch.hints.push(format!("{}: {key} is not read", config.path().display()));
            }
            let others = NAMES.iter().filter(|other| **other != name && AnyFamily::load(other, checkpoint).is_ok());
            let others: Vec<&str> = others.copied().collect();
            if !others.is_empty() {
                let others = others.join(" or ");
                mismatch.hints.push(format!("they are those of family {others}, not of {name}"));
            }
            Error::Tensors(mismatch)
        }
        error => error,
    }
}
