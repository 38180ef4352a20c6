//! A model's configuration.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::map::read_json;
use crate::error::Error;

/// A JSON object, and the file that it comes from. A key whose value is null counts as absent.
#[derive(Debug, Clone)]
pub struct Config {
    path: PathBuf,
    values: Map<String, Value>,
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
        Ok(Config { path: path.to_owned(), values })
    }

    /// A configuration that no file holds; errors name it `path`.
    pub fn new(path: impl Into<PathBuf>, values: Map<String, Value>) -> Config {
        Config { path: path.into(), values }
    }

    /// Puts a value in the place of the file's.
    pub fn set(&mut self, key: &str, value: Value) {
        self.values.insert(key.to_owned(), value);
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of `key`, if it is there and not null.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there and not null.
    pub fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// A size: a number from 1 to 2^24, so that products of two or three do not overflow.
    ///
    /// # Errors
    /// [`Error::Config`] where it is absent, no whole number, or out of range.
    pub fn positive(&self, key: &str) -> Result<usize, Error> {
        match self.usize(key)? {
            n @ 1..=0x100_0000 => Ok(n),
            n => Err(self.rejects(key, "a number from 1 to 16777216", n.to_string())),
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
        let found = self.value(key).map_or_else(|| "nothing".to_owned(), shorten);
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

    /// A required non-negative integer.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn usize(&self, key: &str) -> Result<usize, Error> {
        self.typed(key, INTEGER, integer)?.ok_or_else(|| self.invalid(key, INTEGER))
    }

    /// A non-negative integer, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn usize_or(&self, key: &str, default: usize) -> Result<usize, Error> {
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
        Ok(self.typed(key, NUMBER, Value::as_f64)?.unwrap_or(default))
    }

    /// A truth value, or `default` where there is none.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, Error> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A text, if there is one.
    ///
    /// # Errors
    /// [`Error::Config`] if it is something else.
    pub fn str_opt(&self, key: &str) -> Result<Option<&str>, Error> {
        self.typed(key, "a text", Value::as_str)
    }

    /// A required list of non-negative integers.
    ///
    /// # Errors
    /// [`Error::Config`] if it is absent or something else.
    pub fn usize_list(&self, key: &str) -> Result<Vec<usize>, Error> {
        self.typed(key, INTEGERS, integers)?.ok_or_else(|| self.invalid(key, INTEGERS))
    }

    /// A required non-negative integer, which is repeated, or a list of `layers` of them.
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

const INTEGER: &str = "a non-negative integer";
const INTEGERS: &str = "a list of non-negative integers";
const NUMBER: &str = "a number";

fn integer(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|n| usize::try_from(n).ok())
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
