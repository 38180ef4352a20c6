//! Names in a file that are the model's but for a prefix, and names that do not matter.

use std::collections::{BTreeMap, BTreeSet};

use super::{Checkpoint, Mismatch, Problem, Weight, pattern};
use crate::prefix::Prefix;

impl Checkpoint {
    /// Prefixes that may explain why tensors are missing, the likeliest first: those that turn a name of the files into the name
    /// of a missing tensor.
    pub(crate) fn prefixes(&self, mismatch: &Mismatch) -> Vec<Prefix> {
        /// Missing tensors that are looked at, and prefixes that are worth a try.
        const LOOKED_AT: usize = 50;
        const TRIED: usize = 8;
        let missing = mismatch.problems.iter().filter_map(|problem| match problem {
            Problem::Missing { tensor, .. } => Some(tensor.as_str()),
            _ => None,
        });
        let mut explained: BTreeMap<Prefix, usize> = BTreeMap::new();
        for missing in missing.take(LOOKED_AT) {
            for (name, weight) in &self.tensors {
                let prefix = |of: &str, suffix: &str| {
                    let prefix = of.strip_suffix(suffix).filter(|prefix| prefix.ends_with('.'))?;
                    Some(prefix.to_owned())
                };
                let removed = prefix(name, missing).map(Prefix::Removed);
                let found = removed.or_else(|| prefix(missing, name).map(Prefix::Added));
                if let Some(prefix) = found.filter(|_| !self.matches_ignored(weight)) {
                    *explained.entry(prefix).or_default() += 1;
                }
            }
        }
        let mut prefixes: Vec<(Prefix, usize)> = explained.into_iter().collect();
        prefixes.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        prefixes.into_iter().take(TRIED).map(|(prefix, _)| prefix).collect()
    }

    /// The same checkpoint with the model's names. What is no part of the model is left out.
    pub(crate) fn renamed(&self, prefix: &Prefix) -> Checkpoint {
        let tensor = |weight: &Weight| Some(weight.renamed(&prefix.apply(weight.name())?));
        let tensors = self.tensors.values().filter_map(tensor).map(|weight| (weight.name().to_owned(), weight));
        let unreadable = self.unreadable.iter().filter_map(|(name, why)| Some((prefix.apply(name)?, why.clone())));
        Checkpoint { tensors: tensors.collect(), unreadable: unreadable.collect(), ..self.clone() }
    }

    /// The tensors that are no part of the model once that is done to the names, but for those that are to be ignored.
    pub(crate) fn left_out(&self, prefix: &Prefix) -> Vec<String> {
        let left_out = |weight: &&Weight| prefix.apply(weight.name()).is_none() && !self.matches_ignored(weight);
        self.tensors.values().filter(left_out).map(|weight| weight.name().to_owned()).collect()
    }

    /// Lets tensors that the model has no use for be, if one of `patterns` says their name in the file or in the model; `*` stands
    /// for any text.
    pub fn ignore_unexpected(&mut self, patterns: &[String]) {
        self.ignore = patterns.to_vec();
    }

    fn matches_ignored(&self, weight: &Weight) -> bool {
        let names = [weight.name(), weight.place(0).tensor];
        self.ignore.iter().any(|ignored| names.iter().any(|name| pattern::matches(ignored, name)))
    }

    /// Whether a tensor that the model has no use for is to be ignored. Such tensors are remembered.
    pub(super) fn ignores(&self, weight: &Weight) -> bool {
        let ignored = self.matches_ignored(weight);
        if ignored {
            self.ignored.get().insert(weight.place(0).tensor.to_owned());
        }
        ignored
    }

    /// The tensors that were ignored, by their names in the files.
    pub(crate) fn ignored(&self) -> BTreeSet<String> {
        self.ignored.get().clone()
    }

    /// Remembers a tensor that the model's family has no use for.
    pub(super) fn pass_over(&self, weight: &Weight) {
        self.passed_over.get().insert(weight.name().to_owned());
    }

    /// The tensors that are the model's, in the order of their names: all that were neither ignored nor passed over.
    pub(crate) fn of_the_model(&self) -> Vec<&Weight> {
        let (ignored, passed_over) = (self.ignored(), self.passed_over.get());
        let is_own =
            |weight: &&Weight| !ignored.contains(weight.place(0).tensor) && !passed_over.contains(weight.name());
        self.tensors.values().filter(is_own).collect()
    }

    /// Forgets which keys were asked for, and which tensors were ignored or passed over.
    pub(crate) fn forget(&self) {
        self.config.forget();
        self.ignored.get().clear();
        self.passed_over.get().clear();
    }
}
