//! Which keys of a configuration nobody reads, and which defaults stand in for absent ones.

use std::fmt;
use std::sync::MutexGuard;

use serde_json::Value;

use super::Config;
use super::silent::is_silent;
use crate::checkpoint::record::Record;
use crate::unused_key::UnusedKey;

/// The keys that were asked for, in order, with the defaults of absent ones.
#[derive(Debug, Default, Clone)]
pub(super) struct Asked(Record<Vec<(String, Option<String>)>>);

impl Asked {
    fn keys(&self) -> MutexGuard<'_, Vec<(String, Option<String>)>> {
        self.0.get()
    }

    pub(super) fn note(&self, key: &str) {
        let mut keys = self.keys();
        if !keys.iter().any(|(asked, _)| asked == key) {
            keys.push((key.to_owned(), None));
        }
    }

    pub(super) fn note_default(&self, key: &str, default: String) {
        self.note(key);
        if let Some((_, noted)) = self.keys().iter_mut().find(|(asked, _)| asked == key) {
            *noted = Some(default);
        }
    }

    /// Whether keys inside the object of `key` were asked for.
    pub(super) fn has_inner(&self, key: &str) -> bool {
        let is_inner = |asked: &str| asked.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        self.keys().iter().any(|(asked, _)| is_inner(asked))
    }

    pub(super) fn clear(&self) {
        self.keys().clear();
    }
}

/// A key that is absent, and what stands in for it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct DefaultValue {
    /// The key.
    pub key: String,
    /// The default, as the configuration would say it.
    pub value: String,
}

impl fmt::Display for DefaultValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.key, self.value)
    }
}

/// How a model used its configuration.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    /// Unused keys that would decide which heads are computed: to go on would be wrong without anyone noticing.
    pub(crate) decisive: Vec<UnusedKey>,
    /// The other unused keys that look like an absent one.
    pub(crate) similar: Vec<UnusedKey>,
    /// All others but those that are known to belong to other programs.
    pub(crate) unknown: Vec<String>,
    /// Defaults of absent keys, those of heads and routing first.
    pub(crate) defaults: Vec<DefaultValue>,
}

impl Config {
    /// What was and what was not asked for.
    pub(crate) fn usage(&self) -> Usage {
        let entries: Vec<(String, &Value)> = self.entries().collect();
        let is_there = |key: &str| entries.iter().any(|(other, value)| other == key && !is_empty(value));
        let asked = self.asked.keys();
        let mut usage = Usage::default();
        for (key, value) in &entries {
            let was_set = self.set.contains(key);
            // Routing's, or a setting of generation: that one is among others.
            let is_routing = key == "top_k" && !["temperature", "top_p", "do_sample"].into_iter().any(is_there);
            let is_silent = is_silent(key) && !is_routing;
            if asked.iter().any(|(asked, _)| asked == key) || is_empty(value) || is_silent || was_set {
                continue;
            }
            // One that is there is not misspelt, unless the two differ in `_`, `-` and case alone.
            let candidates = asked.iter().filter(|(asked, _)| !is_there(asked) || plain(asked) == plain(key));
            let meant = nearest(key, candidates.map(|(key, default)| (key.as_str(), default.as_deref())));
            let unused = UnusedKey {
                key: key.clone(),
                meant: meant.map(|(meant, _)| meant.to_owned()),
                default: meant.and_then(|(_, default)| default).map(str::to_owned),
            };
            let ours = ["moh_", "moa_"].iter().any(|prefix| key.to_ascii_lowercase().starts_with(prefix));
            match meant {
                Some((meant, _)) if decides_heads(meant) => usage.decisive.push(unused),
                _ if ours => usage.decisive.push(unused),
                Some(_) => usage.similar.push(unused),
                None => usage.unknown.push(key.clone()),
            }
        }
        let defaults = asked.iter().filter_map(|(key, default)| Some((key, default.as_ref()?)));
        usage.defaults = defaults.map(|(key, value)| DefaultValue { key: key.clone(), value: value.clone() }).collect();
        usage.defaults.sort_by_key(|default| !decides_heads(&default.key));
        usage
    }

    /// Says that `key` is absent, and which other key may have been meant for it.
    pub(super) fn nothing_like(&self, key: &str) -> String {
        let asked = self.asked.keys();
        let unread = |other: &&String| !is_silent(other) && !asked.iter().any(|(asked, _)| asked == *other);
        match nearest(key, self.values.keys().filter(unread).map(|other| (other.as_str(), ()))) {
            Some((other, ())) => format!("nothing (but there is {other:?}: is it meant?)"),
            None => "nothing".to_owned(),
        }
    }

    /// The keys that are there and were asked for, in the order of asking.
    pub(crate) fn used(&self) -> Vec<String> {
        let present = |(key, _): &&(String, Option<String>)| self.present(key).is_some();
        self.asked.keys().iter().filter(present).map(|(key, _)| key.clone()).collect()
    }
}

/// Nothing is said by null, `[]` or `{}`.
pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
        _ => false,
    }
}

/// Whether a key says which heads or experts there are or are used. No list of keys, which new families would have to be added to.
fn decides_heads(key: &str) -> bool {
    ["head", "expert", "top_k", "moe_", "gates", "routed", "shared_fraction"].iter().any(|part| key.contains(part))
}

/// A key without what does not count.
fn plain(key: &str) -> String {
    key.replace(['_', '-'], "").to_lowercase()
}

/// The candidate that `key` was probably meant to be, or that was probably meant by it: a third of the letters may differ, and
/// case, `_` and `-` do not count.
fn nearest<'a, T>(key: &str, candidates: impl Iterator<Item = (&'a str, T)>) -> Option<(&'a str, T)> {
    let key = plain(key);
    let distances = candidates.filter_map(|(candidate, value)| {
        let other = plain(candidate);
        let limit = (key.len().min(other.len()) / 3).max(1);
        // Far apart in length is far apart; it also bounds what long keys cost.
        let close = key.len().abs_diff(other.len()) <= limit && key.len() < 100;
        let distance = close.then(|| strsim::osa_distance(&key, &other))?;
        (distance <= limit).then_some((distance, (candidate, value)))
    });
    distances.min_by_key(|(distance, _)| *distance).map(|(_, nearest)| nearest)
}
