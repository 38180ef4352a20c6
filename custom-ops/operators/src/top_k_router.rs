//! TopKRouter: which heads (or experts) every token uses, and how much.

mod body;
mod reference;

use crate::attributes::{attributes, choices};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Variant};
use crate::operator::{Definition, Example, Part};
use crate::shape::{OutputDim, PartialShape, per_head, show};
use crate::tensor::Tensor;
use std::ops::Range;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct TopKRouter;

choices! {
    /// What gates are made of.
    pub enum Kind {
        /// MoH's two stages.
        TwoStage,
        /// The softmax over all heads.
        Probabilities,
        /// The softmax over the selected heads.
        Renormalized,
        /// 1, for the heads with the largest query norms.
        QueryNorms,
    }
}

attributes! {
    /// TopKRouter's attributes.
    pub struct Attributes {
        /// 0: MoH's two stages. 1: softmax over all. 2: softmax over the selected. 3: norms of queries.
        kind: Kind,
        /// Heads, or experts.
        num_heads: usize,
        /// Routed heads that a token uses; 0 only in kinds 0 and 3, beside shared heads.
        top_k: i64,
        /// Heads that every token uses, ascending; kinds 0 and 3 alone have any.
        shared_heads: Vec<i64>,
    }
}

inputs! {
    /// TopKRouter's input.
    pub struct Inputs {
        scores: T, "(batch, q_len, width)",
            "Scores, of the width that kind and head counts ask for; in kind 3 queries, (batch, q_len, num_heads * head_dim).";
    }
}

/// The attributes, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// What gates are made of.
    pub kind: Kind,
    /// Heads that every token uses, ascending.
    pub shared: Vec<usize>,
    /// The others, ascending.
    pub routed: Vec<usize>,
    /// How many of the others a token uses.
    pub top_k: usize,
}

impl Heads {
    /// Checks the attributes.
    ///
    /// # Errors
    /// [`Error::Attribute`] naming the one that does not fit.
    pub fn read(attributes: &Attributes) -> Result<Heads, Error> {
        let Attributes { kind, num_heads, top_k: found, shared_heads: ref list } = *attributes;
        let bad = |attribute, expected: String, found: String| Error::Attribute {
            operator: TopKRouter::NAME,
            attribute,
            expected,
            found,
        };
        let ascending = list.windows(2).all(|pair| pair[0] < pair[1]);
        let shared: Option<Vec<usize>> = list.iter().map(|&head| usize::try_from(head).ok()).collect();
        let shared = shared.filter(|shared| ascending && shared.last().is_none_or(|&head| head < num_heads));
        let expected = || format!("ascending heads below num_heads = {num_heads}");
        let shared = shared.ok_or_else(|| bad("shared_heads", expected(), format!("{list:?}")))?;
        if matches!(kind, Kind::Probabilities | Kind::Renormalized) && !shared.is_empty() {
            return Err(bad("shared_heads", format!("none in kind {}", kind as i64), format!("{list:?}")));
        }
        let mut is_shared = shared.iter().copied().peekable();
        let routed: Vec<usize> = (0..num_heads).filter(|head| is_shared.next_if_eq(head).is_none()).collect();
        // Without scores every head would have to be shared; kind 3 always has queries.
        let least = usize::from(shared.is_empty() || (kind == Kind::TwoStage && !routed.is_empty()));
        let top_k = usize::try_from(found).ok().filter(|k| (least..=routed.len()).contains(k));
        let top_k = top_k.ok_or_else(|| bad("top_k", format!("{least} to {}", routed.len()), found.to_string()))?;
        let heads = Heads { kind, shared, routed, top_k };
        if kind != Kind::QueryNorms && heads.columns() == 0 {
            let expected = "heads that a token chooses from, or two of them or more".to_owned();
            return Err(bad("num_heads", expected, num_heads.to_string()));
        }
        Ok(heads)
    }

    /// All heads.
    pub fn count(&self) -> usize {
        self.shared.len() + self.routed.len()
    }

    /// Columns of the scores: none in [`Kind::QueryNorms`], whose scores are not an input.
    pub fn columns(&self) -> usize {
        self.shared_columns().end
    }

    /// The columns of the routed heads.
    pub fn routed_columns(&self) -> Range<usize> {
        0..if self.top_k > 0 && self.kind != Kind::QueryNorms { self.routed.len() } else { 0 }
    }

    /// The two columns of the balance between the shared and the routed part, or none.
    pub fn balance_columns(&self) -> Range<usize> {
        let start = self.routed_columns().end;
        start..start + if start > 0 && !self.shared.is_empty() { 2 } else { 0 }
    }

    /// The columns of the shared heads; a single one has none.
    pub fn shared_columns(&self) -> Range<usize> {
        let start = self.balance_columns().end;
        let scored = self.kind == Kind::TwoStage && self.shared.len() > 1;
        start..start + if scored { self.shared.len() } else { 0 }
    }
}

/// A validated call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The attributes.
    pub heads: Heads,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Elements of a token's scores, or queries.
    pub width: usize,
}

impl Problem {
    /// Elements of a query; of [`Kind::QueryNorms`].
    pub fn head_dim(&self) -> usize {
        self.width / self.heads.count()
    }
}

impl Definition for TopKRouter {
    const NAME: &'static str = "TopKRouter";
    const DOC: &'static str = "The gates of the heads (or experts) of every token: those of `shared_heads` are on for all tokens, and of the others, \
          the routed ones, exactly the `top_k` with the largest scores, the first among equals. A score that is NaN counts as -inf. \
          All other gates are exactly 0. With R routed and S shared heads, both in ascending order, `scores` holds, one after the \
          other, in kind 0 (MoH, arXiv 2410.11842, equations 5 to 7): R scores of the routed heads if top_k > 0, 2 of the \
          balance if top_k > 0 and S > 0, S of the shared heads if S > 1. Gates of the routed part are \
          `top_k * softmax` over the selected scores, those of the shared part `S * softmax` over all of theirs; where there are \
          both parts, the shared one is multiplied by `2 b_0` and the routed one by `2 b_1`, with b the softmax of the balance. \
          In kinds 1 and 2 (MoA, arXiv 2210.05144), without shared heads: a score a head; the gate of a selected one is its softmax \
          over all heads (kind 1) or over the selected ones (kind 2). In kind 3 (MoH-LLaMA): queries, head by head, whose squared norm is \
          the score; gates are 0 and 1. Everything is computed in float32. Where a softmax \
          is over NaN, +inf or nothing but -inf, all of its gates are NaN, and its heads count as on; a score far below the largest \
          one (by 87 and more) may round to a gate of 0.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "head_gates",
        ty: ElementType::Float32,
        optional: false,
        shape: "(batch, q_len, num_heads)",
        doc: "The gates.",
    };
    const PART: Part = Part::Router;

    type Attributes = Attributes;
    type Inputs<R: Reader> = Inputs<R>;
    type Problem = Problem;

    fn inputs<R: Reader>(reader: &R) -> Result<Inputs<R>, R::Error> {
        Inputs::read(reader)
    }

    fn list<V: Copy>(inputs: &Inputs<List<'_, V>>) -> Vec<Option<V>> {
        inputs.list()
    }

    fn check(attributes: &Attributes) -> Result<(), Error> {
        Heads::read(attributes).map(drop)
    }

    fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let heads = Heads::read(attributes)?;
        let found = shapes.scores;
        let fits = match (found, heads.kind) {
            (&[_, _, width], Kind::QueryNorms) => per_head(width, heads.count()).is_some(),
            (&[_, _, width], _) => width.is_none_or(|width| width == heads.columns()),
            _ => false,
        };
        if !fits {
            let width = match heads.kind {
                Kind::QueryNorms => format!("{} * head_dim", heads.count()),
                _ => heads.columns().to_string(),
            };
            let expected = format!("(batch, q_len, {width})");
            return Err(Error::Shape { operator: Self::NAME, input: "scores", expected, found: show(found) });
        }
        let same = |axis| OutputDim::SameAs { input: 0, axis };
        Ok(vec![same(0), same(1), OutputDim::Size(heads.count())])
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let scores = shapes.scores;
        Ok(Problem { heads: Heads::read(attributes)?, tokens: scores[0] * scores[1], width: scores[2] })
    }

    fn variant(attributes: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant { kind: attributes.kind as i64, ..Variant::default() }
    }

    fn zeros(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>, _: usize) -> Option<Vec<usize>> {
        None
    }

    fn body(variant: Variant) -> Body {
        body::body(variant)
    }

    fn reference(problem: &Problem, inputs: &Inputs<List<'_, Tensor<'_>>>) -> Vec<f64> {
        reference::reference(problem, inputs)
    }

    fn examples() -> Vec<Example<Attributes>> {
        let example = |kind, top_k, shared: &[i64], width| {
            let attributes = Attributes { kind, num_heads: 6, top_k, shared_heads: shared.to_vec() };
            Example::new(attributes, &[&[2, 5, width]])
        };
        vec![
            example(Kind::TwoStage, 2, &[0, 1], 8),
            example(Kind::Probabilities, 3, &[], 6),
            example(Kind::Renormalized, 3, &[], 6),
            example(Kind::QueryNorms, 2, &[1], 24),
        ]
    }
}
