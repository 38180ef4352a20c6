//! Which of a file's dictionaries holds the weights.

use std::collections::BTreeMap;
use std::path::Path;

use super::pickle::{Node, Pickle, Value};
use crate::error::Error;

/// Keys below which training code keeps a model's state dict.
const KEYS: [&str; 5] = ["model", "state_dict", "model_state_dict", "module", "ema"];

/// DiT's training code keeps the weights and their moving average, which is the one to sample with.
const DIT: ([&str; 2], &str, &str) =
    (["final_layer.adaLN_modulation.1.weight", "t_embedder.mlp.0.weight"], "model", "ema");

/// A dictionary of tensors, and the key that it was below.
pub(super) struct State<'a> {
    pub(super) key: Option<&'a str>,
    /// The keys of other dictionaries of tensors with the same names.
    pub(super) others: Vec<&'a str>,
    pub(super) entries: BTreeMap<&'a str, Value<'a>>,
}

/// Chooses the dictionary below `key`, or the only one that holds weights.
pub(super) fn choose<'a>(file: &Path, pickle: &Pickle<'a>, key: Option<&str>) -> Result<State<'a>, Error> {
    if let Some(Node::Opaque(class)) = pickle.node(pickle.root()) {
        return Err(Error::NotAStateDict { file: file.to_owned(), found: class.to_string() });
    }
    let root = entries(pickle, pickle.root());
    let nested: Vec<&str> =
        root.iter().filter(|(_, value)| holds_tensors(pickle, **value)).map(|(key, _)| *key).collect();
    let owned = |keys: &[&str]| keys.iter().map(|key| (*key).to_owned()).collect::<Vec<String>>();
    let below = |key: &'a str| {
        let chosen = entries(pickle, root[key]);
        // Averages of the weights, for one; an optimizer's state has other names.
        let alike = |other: &&str| {
            let names = || entries(pickle, root[*other]).into_keys();
            *other != key && chosen.keys().next().is_some_and(|name| names().any(|other| other.ends_with(name)))
        };
        State { key: Some(key), others: nested.iter().copied().filter(alike).collect(), entries: chosen }
    };

    if let Some(wanted) = key {
        let found = nested.iter().find(|key| **key == wanted);
        return found.map(|key| below(key)).ok_or_else(|| Error::WeightsKey {
            file: file.to_owned(),
            key: wanted.to_owned(),
            keys: owned(&nested),
        });
    }
    let usual: Vec<&str> = nested.iter().copied().filter(|key| KEYS.contains(key)).collect();
    match *usual {
        [only] => Ok(below(only)),
        // Random states are tensors beside a model; a state dict's own entries hold no dictionaries.
        [] if holds_tensors(pickle, pickle.root()) => Ok(State { key: None, others: Vec::new(), entries: root }),
        [] => Err(Error::NoStateDict { file: file.to_owned(), keys: owned(&nested) }),
        _ => {
            let (names, model, average) = DIT;
            let is_dit = |key: &str| {
                let state = entries(pickle, root[key]);
                names.iter().all(|name| state.keys().any(|key| key.ends_with(name)))
            };
            if usual.len() == 2 && usual.contains(&model) && usual.contains(&average) && is_dit(model) {
                return Ok(below(average));
            }
            Err(Error::AmbiguousWeights { file: file.to_owned(), keys: owned(&usual) })
        }
    }
}

/// A dictionary's values; of a key that occurs twice the last one, as in Python.
fn entries<'a>(pickle: &Pickle<'a>, value: Value<'a>) -> BTreeMap<&'a str, Value<'a>> {
    pickle.named(value).collect()
}

fn holds_tensors<'a>(pickle: &Pickle<'a>, value: Value<'a>) -> bool {
    pickle.named(value).any(|(_, value)| matches!(pickle.node(value), Some(Node::Tensor(_) | Node::Array(_))))
}
