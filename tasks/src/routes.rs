//! Which heads tokens use: what the gates of a model exported with `--output-gates` say.

mod svg;

pub use svg::{Subject, svg};

use crate::error::{Error, Result};
use moh_operators::GATES;
use moh_runtime::{Model, Value, names};

/// The gates of one attention layer for one sequence or image.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRoutes {
    /// Path of the attention module.
    pub path: String,
    /// Heads that every token uses, and, of the others, how many it chooses, if the model says it.
    pub planned: Option<(usize, usize)>,
    heads: usize,
    /// (tokens, heads).
    gates: Vec<f32>,
}

impl LayerRoutes {
    /// Gates (tokens, heads), 0 where a token does not use a head.
    ///
    /// # Errors
    /// [`Error::Gates`] where they do not make up whole tokens.
    pub fn new(path: &str, heads: usize, gates: Vec<f32>, planned: Option<(usize, usize)>) -> Result<LayerRoutes> {
        if heads == 0 || gates.is_empty() || !gates.len().is_multiple_of(heads) {
            return Err(Error::Gates { heads, found: gates.len() });
        }
        Ok(LayerRoutes { path: path.to_owned(), planned, heads, gates })
    }

    /// Number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.gates.len() / self.heads
    }

    /// Whether a token uses a head.
    pub fn uses(&self, token: usize, head: usize) -> bool {
        self.gate(token, head) != 0.0
    }

    /// The share of the tokens that use a head.
    pub fn share(&self, head: usize) -> f64 {
        let tokens = self.tokens();
        (0..tokens).filter(|&token| self.uses(token, head)).count() as f64 / tokens as f64
    }

    /// The share of all heads of all tokens that are used.
    pub fn active(&self) -> f64 {
        (0..self.heads).map(|head| self.share(head)).sum::<f64>() / self.heads as f64
    }

    /// The heads that all tokens share: as many as the model says, among those that all of these tokens use.
    pub fn shared(&self) -> Vec<usize> {
        let count = self.planned.map_or(0, |(shared, _)| shared);
        (0..self.heads).filter(|&head| self.share(head) == 1.0).take(count).collect()
    }

    /// A gate.
    pub fn gate(&self, token: usize, head: usize) -> f32 {
        self.gates[token * self.heads + head]
    }

    /// How unevenly tokens use the heads that they choose among: the standard deviation of the heads' shares over their mean, 0
    /// for an even load. `None` where there is no choice.
    pub fn imbalance(&self) -> Option<f64> {
        let shared = self.shared();
        let routed: Vec<f64> =
            (0..self.heads).filter(|head| !shared.contains(head)).map(|head| self.share(head)).collect();
        let mean = routed.iter().sum::<f64>() / routed.len() as f64;
        let all_alike = routed.iter().all(|&share| share == 0.0) || routed.iter().all(|&share| share == 1.0);
        let chosen = self.planned.is_none_or(|(shared, top_k)| top_k > 0 && shared + top_k < self.heads);
        if routed.len() < 2 || all_alike || !chosen {
            return None;
        }
        let variance = routed.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / routed.len() as f64;
        Some(variance.sqrt() / mean)
    }
}

/// Whether the model shows its gates.
///
/// # Errors
/// [`Error::Request`] saying how to export it, where it does not.
pub fn check(model: &Model) -> Result<()> {
    if model.outputs().iter().any(|output| output.name.starts_with(GATES)) {
        return Ok(());
    }
    let reason = format!("expected outputs {GATES}*, found none: moh-export writes them with `--output-gates`");
    Err(Error::Request { path: model.path().to_owned(), reason })
}

/// The layers' gates for the first sequence or image of a batch, read from all outputs of a run.
///
/// # Errors
/// As [`check`]; [`Error::Output`] for gates of an unexpected shape.
pub fn layers(model: &Model, outputs: &[Value]) -> Result<Vec<LayerRoutes>> {
    check(model)?;
    let named = model.outputs().iter().zip(outputs);
    let gates: Vec<(&str, &Value)> =
        named.filter_map(|(info, value)| Some((info.name.strip_prefix(GATES)?, value))).collect();
    let numbers = |key: &str| -> Option<Vec<usize>> {
        let list =
            model.metadata().get(key)?.split(',').map(|n| n.trim().parse().ok()).collect::<Option<Vec<usize>>>()?;
        (list.len() == gates.len()).then_some(list)
    };
    let (shared, top_k) = (numbers(names::NUM_SHARED_HEADS), numbers(names::TOP_K));
    let layer = |(i, (path, value)): (usize, &(&str, &Value))| {
        let bad = |found: String| Error::Output {
            path: model.path().to_owned(),
            runtime: model.runtime_name(),
            reason: format!("{GATES}{path}: expected numbers of shape (batch, tokens, heads), found {found}"),
        };
        let &[_, tokens, heads] = value.shape() else { return Err(bad(format!("{:?}", value.shape()))) };
        let first = value.data()?.range(0..tokens * heads).and_then(|gates| gates.to_f32());
        let first = first.ok_or_else(|| bad(format!("{} {:?}", value.element_type(), value.shape())))?;
        let planned = shared.as_ref().zip(top_k.as_ref()).map(|(shared, top_k)| (shared[i], top_k[i]));
        LayerRoutes::new(path, heads, first, planned).map_err(|_| bad(format!("{:?}", value.shape())))
    };
    gates.iter().enumerate().map(layer).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn layer(heads: usize, gates: &[f32], planned: Option<(usize, usize)>) -> LayerRoutes {
        LayerRoutes::new("attn", heads, gates.to_vec(), planned).unwrap()
    }

    #[test]
    fn shares_are_of_tokens() {
        // Head 0 is shared; of the others, every token takes one.
        let routes = layer(3, &[0.5, 1.0, 0.0, 0.5, 0.2, 0.0, 0.5, 0.0, 0.1, 0.5, 0.3, 0.0], Some((1, 1)));
        assert_eq!((routes.tokens(), routes.heads()), (4, 3));
        assert_eq!([0, 1, 2].map(|head| routes.share(head)), [1.0, 0.75, 0.25]);
        assert!((routes.active() - 2.0 / 3.0).abs() < 1e-12);
        assert!((routes.imbalance().unwrap() - 0.5).abs() < 1e-12);
        // Without the model's word, head 0 is one among three.
        let unplanned = layer(3, &[0.5, 1.0, 0.0, 0.5, 0.0, 0.1], None);
        assert!((unplanned.imbalance().unwrap() - (1.0f64 / 18.0).sqrt() * 1.5).abs() < 1e-12);
    }

    #[test]
    fn imbalance_needs_a_choice() {
        assert_eq!(layer(2, &[1.0, 1.0, 1.0, 1.0], Some((2, 0))).imbalance(), None);
        assert_eq!(layer(2, &[1.0, 1.0, 1.0, 1.0], Some((1, 1))).imbalance(), None);
        assert_eq!(layer(4, &[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], Some((0, 2))).imbalance(), Some(0.0));
        // All tokens choose the same head: as uneven as it gets.
        assert_eq!(layer(2, &[1.0, 0.0, 1.0, 0.0], Some((0, 1))).imbalance(), Some(1.0));
        assert!(LayerRoutes::new("a", 2, vec![1.0; 3], None).is_err());
        assert!(LayerRoutes::new("a", 0, vec![], None).is_err());
    }
}
