//! The key-value cache between the steps of a generation.

use super::LanguageModel;
use super::interface::Interface;
use super::prompts::Prompts;
use crate::error::Result;
use moh_runtime::Value;

/// Tokens that a cache in place has room for at first, besides the prompt's; it grows by doubling.
const ROOM: usize = 1024;

/// The cache's tensors, in the order of the interface.
pub(super) struct Cache {
    values: Vec<Value>,
    /// Tokens that it has room for, if it is updated in place.
    capacity: Option<usize>,
    /// The most tokens that there will be.
    most: usize,
}

impl Cache {
    /// The cache of prompts that will grow by at most `max_tokens`.
    pub(super) fn new(model: &LanguageModel, prompts: &Prompts, max_tokens: usize) -> Result<Cache> {
        let LanguageModel { model, interface } = model;
        // The last token is not put into the cache.
        let most = prompts.length().saturating_add(max_tokens.saturating_sub(1));
        let capacity = interface.in_place.then(|| most.min(prompts.length() + prompts.length().max(ROOM)));
        Ok(Cache { values: interface.new_cache(model, prompts.batch(), capacity.unwrap_or(0))?, capacity, most })
    }

    /// Tokens that it has room for, if it is updated in place.
    pub(super) fn capacity(&self) -> Option<usize> {
        self.capacity
    }

    /// Chooses a larger capacity where `tokens` do not fit; says whether it did.
    pub(super) fn grow(&mut self, tokens: usize) -> bool {
        match &mut self.capacity {
            Some(capacity) if tokens > *capacity => {
                *capacity = capacity.saturating_mul(2).min(self.most).max(tokens);
                true
            }
            _ => false,
        }
    }

    /// The tensors for the next run, which may write to them.
    pub(super) fn give(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.values)
    }

    /// Takes the tensors out of a run's outputs, where nobody else then holds them.
    pub(super) fn take(&mut self, interface: &Interface, outputs: Vec<Value>) {
        self.values = successors(interface, outputs);
    }
}

/// The cache after a run, out of its outputs.
pub(super) fn successors(interface: &Interface, outputs: Vec<Value>) -> Vec<Value> {
    let mut outputs: Vec<Option<Value>> = outputs.into_iter().map(Some).collect();
    interface.cache.iter().filter_map(|entry| outputs.get_mut(entry.output)?.take()).collect()
}
