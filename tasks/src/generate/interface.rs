//! The inputs and outputs that make a model a language model.

use crate::error::Result;
use moh_runtime::names::{ATTENTION_MASK, INPUT_IDS, LOGITS, PAST, POSITION_IDS, PRESENT};
use moh_runtime::{Dim, ElementType, Model, TensorInfo, Value};

/// What a language model takes and gives.
#[derive(Debug)]
pub(super) struct Interface {
    pub(super) cache: Vec<CacheEntry>,
    /// Position of the logits among the outputs.
    pub(super) logits: usize,
    pub(super) takes_positions: bool,
    /// Whether the cache may have room for more tokens than there are.
    pub(super) in_place: bool,
}

/// One tensor of the cache: (batch, heads, past, width) in, the same with the new tokens out.
#[derive(Debug)]
pub(super) struct CacheEntry {
    pub(super) input: String,
    /// Position of its successor among the outputs.
    pub(super) output: usize,
    pub(super) element_type: ElementType,
    pub(super) heads: usize,
    pub(super) width: usize,
}

impl Interface {
    /// Reads a model's inputs and outputs; says what is missing or unexpected.
    pub(super) fn of(
        inputs: &[TensorInfo],
        outputs: &[TensorInfo],
        in_place: bool,
    ) -> std::result::Result<Interface, String> {
        let output = |name: &str| outputs.iter().position(|output| output.name == name);
        for name in [INPUT_IDS, ATTENTION_MASK] {
            if !inputs.iter().any(|input| input.name == name) {
                return Err(format!("expected an input {name}, found {}", names(inputs)));
            }
        }
        let logits = output(LOGITS).ok_or_else(|| format!("expected an output {LOGITS}, found {}", names(outputs)))?;
        let mut cache = Vec::new();
        for input in inputs {
            match (input.name.as_str(), input.name.strip_prefix(PAST)) {
                (_, Some(entry)) => {
                    let present = format!("{PRESENT}{entry}");
                    let output = output(&present)
                        .ok_or_else(|| format!("expected an output {present} for the input {}", input.name))?;
                    cache.push(CacheEntry::of(input, output)?);
                }
                (INPUT_IDS | ATTENTION_MASK | POSITION_IDS, None) => {
                    if input.element_type != ElementType::I64 {
                        return Err(format!("input {}: expected int64, found {}", input.name, input.element_type));
                    }
                }
                (name, None) => return Err(format!("unexpected input {name}")),
            }
        }
        if cache.is_empty() {
            return Err(format!("expected inputs {PAST}* (a key-value cache), found {}", names(inputs)));
        }
        let takes_positions = inputs.iter().any(|input| input.name == POSITION_IDS);
        Ok(Interface { cache, logits, takes_positions, in_place })
    }

    /// The cache of sequences of `model` that have not begun, of this length: 0, or its capacity.
    pub(super) fn new_cache(&self, model: &Model, batch: usize, length: usize) -> Result<Vec<Value>> {
        Ok(self.cache.iter().map(|entry| entry.empty(model, batch, length)).collect::<moh_runtime::Result<_>>()?)
    }
}

impl CacheEntry {
    /// This tensor for `rows` sequences that have not begun, with room for `length` tokens each.
    pub(super) fn empty(&self, model: &Model, rows: usize, length: usize) -> moh_runtime::Result<Value> {
        model.zeros(self.element_type, [rows, self.heads, length, self.width])
    }

    fn of(input: &TensorInfo, output: usize) -> std::result::Result<CacheEntry, String> {
        match input.dims[..] {
            [_, Dim::Fixed(heads), Dim::Symbol(_), Dim::Fixed(width)] => {
                let element_type = input.element_type;
                Ok(CacheEntry { input: input.name.clone(), output, element_type, heads, width })
            }
            _ => Err(format!(
                "input {}: expected shape (batch, heads, past, width), found {}",
                input.name,
                input.shape()
            )),
        }
    }
}

fn names(infos: &[TensorInfo]) -> String {
    infos.iter().map(|info| info.name.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn info(name: &str, element_type: ElementType, dims: &[&str]) -> TensorInfo {
        let dim = |d: &&str| d.parse().map_or(Dim::Symbol((*d).to_owned()), Dim::Fixed);
        TensorInfo { name: name.to_owned(), element_type, dims: dims.iter().map(dim).collect() }
    }

    fn llama() -> (Vec<TensorInfo>, Vec<TensorInfo>) {
        let cache = ["b", "2", "past", "16"];
        let inputs = vec![
            info("input_ids", ElementType::I64, &["b", "t"]),
            info("attention_mask", ElementType::I64, &["b", "total"]),
            info("past_key_values.0.key", ElementType::F16, &cache),
        ];
        let outputs = vec![
            info("logits", ElementType::F32, &["b", "t", "100"]),
            info("present.0.key", ElementType::F16, &["b", "2", "total", "16"]),
        ];
        (inputs, outputs)
    }

    #[test]
    fn a_cache_entry_is_paired() {
        let (inputs, outputs) = llama();
        let interface = Interface::of(&inputs, &outputs, false).unwrap();
        let CacheEntry { output, element_type, heads, width, .. } = interface.cache[0];
        assert_eq!((output, element_type, heads, width), (1, ElementType::F16, 2, 16));
        assert!(!interface.takes_positions);
    }

    #[test]
    fn other_models_are_refused_by_name() {
        let refused = |change: &dyn Fn(&mut Vec<TensorInfo>, &mut Vec<TensorInfo>)| {
            let (mut inputs, mut outputs) = llama();
            change(&mut inputs, &mut outputs);
            Interface::of(&inputs, &outputs, false).unwrap_err()
        };
        assert!(refused(&|i, _| drop(i.remove(0))).starts_with("expected an input input_ids, found attention_mask"));
        assert!(refused(&|_, o| drop(o.remove(0))).starts_with("expected an output logits, found present.0.key"));
        assert!(refused(&|_, o| drop(o.remove(1))).starts_with("expected an output present.0.key"));
        assert!(refused(&|i, _| drop(i.remove(2))).contains("a key-value cache"));
        assert!(refused(&|i, _| i[0].name = "pixel_values".to_owned()).starts_with("expected an input input_ids"));
        assert!(refused(&|i, _| i.push(info("labels", ElementType::I64, &[]))).contains("unexpected input labels"));
        assert!(refused(&|i, _| i[0].element_type = ElementType::I32).contains("expected int64, found int32"));
        assert!(refused(&|i, _| i[2].dims.truncate(3)).contains("expected shape (batch, heads, past, width)"));
    }
}
