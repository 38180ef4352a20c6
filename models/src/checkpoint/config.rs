//! A model's configuration.

mod silent;
mod usage;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::map::read_json;
use crate::error::Error;
pub use usage::DefaultValue;
use usage::{Asked, is_empty};

/// A JSON object, and the file that it comes from. A key whose value is null counts as absent.
///
/// It remembers which keys were asked for, so that [`crate::Model::load`] can tell which ones nobody reads. A copy was asked
/// for none.
#[derive(Debug, Clone)]
pub struct Config {
    path: PathBuf,
    values: Map<String, Value>,
    /// Keys that were put here by [`Config::set`]: no mistake in the file where nobody asks for them.
    set: BTreeSet<String>,
    asked: Asked,
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NotAFile`], [`Error::JsonTooLong`], [`Error::Utf8`], and [`Error::Json`] if it is not a JSON object.
    pub fn read(path: &Path) -> Result<Config, Error> {
        let text = read_json(path, "configuration")?;
        let values = serde_json::from_str(&text).map_err(|reason| Error::Json {
            file: path.to_owned(),
            part: "configuration",
            reason,
        })?;
        Ok(Config::new(path, values))
    }

    /// A configuration that no file holds; errors name it `path`.
    pub fn new(path: impl Into<PathBuf>, values: Map<String, Value>) -> Config {
        Config { path: path.into(), values, set: BTreeSet::new(), asked: Asked::default() }
    }

    /// Puts a value in the place of the file's.
    pub fn set(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
        self.set.insert(key.to_owned());
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys and values. Nobody has asked for them by that.
    pub(crate) fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// The value of `key`, if it is there and not null, `[]` or `{}`.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.asked.note(key);
        self.present(key)
    }

    /// The value of `inner` in the object of `key`, if it is there and not null, `[]` or `{}`. From then on the object's other keys count as
    /// unused where nobody asks for them.
    pub fn inner_value(&self, key: &str, inner: &str) -> Option<&Value> {
        let object = self.value(key);
        self.asked.note(&format!("{key}.{inner}"));
        object?.get(inner).filter(|value| !is_empty(value))
    }

    fn present(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !is_empty(value))
    }

    /// All keys and values, and those of objects that were asked for by inner keys, named `key.inner`.
    fn entries(&self) -> impl Iterator<Item = (String, &Value)> {
        self.values.iter().flat_map(|(key, value)| {
            let inner = value.as_object().filter(|_| self.asked.has_inner(key)).into_iter().flatten();
            let inner = inner.map(move |(name, value)| (format!("{key}.{name}"), value));
            [(key.clone(), value)].into_iter().chain(inner)
        })
    }

    /// Counts keys as asked for that another branch of the same family reads.
    pub fn know(&self, keys: &[&str]) {
        keys.iter().for_each(|key| self.asked.note(key));
    }

    /// Notes what stands in for `key` where it is absent, for people to see. The methods that take a default do so themselves.
    pub fn note_default(&self, key: &str, default: impl Display) {
        if self.value(key).is_none() {
            self.asked.note_default(key, default.to_string());
        }
    }

    /// Forgets which keys were asked for.
    pub(crate) fn forget(&self) {
        self.asked.clear();
    }

    /// Whether `key` is there and not null.
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// A size: a number from 1 to `limit`. Limits keep products from overflowing, and allocations within reason.
    ///
    /// # Errors
    /// [`Error::Config`] where it is absent, no whole number, or out of range.
    pub fn size(&self, key: &str, limit: usize) -> Result<usize, Error> {
        let size = self.usize(key)?;
        self.bounded(key, size, limit)
    }

    /// As [`Config::size`], or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] where it is no whole number, or out of range.
    pub fn size_or(&self, key: &str, default: usize, limit: usize) -> Result<usize, Error> {
        let size = self.usize_or(key, default)?;
        self.bounded(key, size, limit)
    }

    /// A required size, which is repeated, or a list of `layers` of them.
    ///
    /// # Errors
    /// As [`Config::size`], and for a list of another length.
    pub fn size_or_list(&self, key: &str, layers: usize, limit: usize) -> Result<Vec<usize>, Error> {
        let sizes = self.usize_or_list(key, layers)?;
        sizes.into_iter().map(|size| self.bounded(key, size, limit)).collect()
    }

    /// `size`, which follows from `key`, if it is from 1 to `limit`.
    ///
    /// # Errors
    /// [`Error::Config`] where it is not.
    fn bounded(&self, key: &str, size: usize, limit: usize) -> Result<usize, Error> {
        match (1..=limit).contains(&size) {
            true => Ok(size),
            false => Err(self.rejects(key, format!("a number from 1 to {limit}"), size.to_string())),
        }
    }

    /// Refuses keys that are there although the model has no use for them: `expected` says why.
    ///
    /// # Errors
    /// [`Error::Config`] for the first one that is there.
    pub fn refuse(&self, keys: &[&str], expected: &str) -> Result<(), Error> {
        match keys.iter().find(|key| self.has(key)) {
            Some(key) => Err(self.invalid(key, expected)),
            None => Ok(()),
        }
    }

    /// An error of this file's `key` whose value, or what follows from it, makes no model.
    pub fn rejects(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::Config {
            file: self.path().to_owned(),
            key: key.to_owned(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    /// The error that says `key` should be `expected`, and what it is.
    pub fn invalid(&self, key: &str, expected: impl Into<String>) -> Error {
        let found = self.present(key).map_or_else(|| self.nothing_like(key), shorten);
        Error::Config { file: self.path.clone(), key: key.to_owned(), expected: expected.into(), found }
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        get: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        self.value(key).map(|value| get(value).ok_or_else(|| self.invalid(key, expected))).transpose()
    }

    /// A required integer from 0 to 2^24.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn usize(&self, key: &str) -> Result<usize, Error> {
        self.typed(key, INTEGER, integer)?.ok_or_else(|| self.invalid(key, INTEGER))
    }

    /// An integer from 0 to 2^24, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn usize_or(&self, key: &str, default: usize) -> Result<usize, Error> {
        self.note_default(key, default);
        Ok(self.typed(key, INTEGER, integer)?.unwrap_or(default))
    }

    /// A required number.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn f64(&self, key: &str) -> Result<f64, Error> {
        self.typed(key, NUMBER, Value::as_f64)?.ok_or_else(|| self.invalid(key, NUMBER))
    }

    /// A number, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn f64_or(&self, key: &str, default: f64) -> Result<f64, Error> {
        self.note_default(key, default);
        Ok(self.typed(key, NUMBER, Value::as_f64)?.unwrap_or(default))
    }

    /// What a norm adds to a variance, from 0 to 1, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn eps_or(&self, key: &str, default: f64) -> Result<f32, Error> {
        let eps = self.f64_or(key, default)?;
        match (0.0..=1.0).contains(&eps) {
            true => Ok(eps as f32),
            false => Err(self.rejects(key, "a number from 0 to 1", eps.to_string())),
        }
    }

    /// A truth value, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, Error> {
        self.note_default(key, default);
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A text, if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn str_opt(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a text", Value::as_str)
    }

    /// A required list of integers from 0 to 2^24.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn usize_list(&self, key: &str) -> Result<Vec<usize>, Error> {
        self.typed(key, INTEGERS, integers)?.ok_or_else(|| self.invalid(key, INTEGERS))
    }

    /// A required integer from 0 to 2^24, which is repeated, or a list of `layers` of them.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent, something else, or of another length.
    pub fn usize_or_list(&self, key: &str, layers: usize) -> Result<Vec<usize>, Error> {
        let expected = || self.invalid(key, format!("{INTEGER} or a list of {layers}"));
        let value = self.value(key).ok_or_else(expected)?;
        let list = match integer(value) {
            Some(one) => vec![one; layers],
            None => integers(value).ok_or_else(expected)?,
        };
        if list.len() == layers { Ok(list) } else { Err(expected()) }
    }
}

/// No size of a model is larger, and memory for as many numbers does no harm.
const LARGEST: usize = 1 << 24;
const INTEGER: &str = "an integer from 0 to 16777216";
const INTEGERS: &str = "a list of integers from 0 to 16777216";
const NUMBER: &str = "a number";

fn integer(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= LARGEST)
}

fn integers(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(integer).collect()
}

/// JSON text that fits a message.
fn shorten(value: &Value) -> String {
    const LIMIT: usize = 100;
    let text = value.to_string();
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
