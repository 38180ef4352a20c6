//! TopKRouter: selects the heads (or experts) that each token uses and computes their gates.

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
    /// How gates are computed from scores.
    pub enum Kind {
        /// MoH's two-stage routing.
        TwoStage,
        /// Softmax over all heads.
        Probabilities,
        /// Softmax over the selected heads.
        Renormalized,
        /// 1 for the heads with the largest query norms.
        QueryNorms,
    }
}

attributes! {
    /// TopKRouter's attributes.
    pub struct Attributes {
        /// 0: MoH's two-stage routing. 1: softmax over all heads. 2: softmax over the selected heads. 3: query norms.
        kind: Kind,
        /// Heads or experts.
        num_heads: usize,
        /// Routed heads per token; 0 only in kind 3 with shared heads, and in kind 0 if all heads, 2 or more, are shared.
        top_k: i64,
        /// Heads that every token uses, ascending; must be empty in kinds 1 and 2.
        shared_heads: Vec<i64>,
    }
}

inputs! {
    /// TopKRouter's input.
    pub struct Inputs {
        scores: T, "(batch, q_len, width)",
            "Scores; the width depends on kind and head counts. Kind 3: queries, (batch, q_len, num_heads * head_dim).";
    }
}

/// Checked attributes, with the heads split into shared and routed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Heads {
    /// How gates are computed from scores.
    pub kind: Kind,
    /// Heads that every token uses, ascending.
    pub shared: Vec<usize>,
    /// The other heads, ascending.
    pub routed: Vec<usize>,
    /// Routed heads per token.
    pub top_k: usize,
}

impl Heads {
    /// Checks the attributes.
    ///
    /// # Errors
    /// [`Error::Attribute`] naming the attribute that is out of range.
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
        // top_k = 0 requires shared heads; in kind 0 it requires that all heads are shared.
        let least = usize::from(shared.is_empty() || (kind == Kind::TwoStage && !routed.is_empty()));
        let top_k = usize::try_from(found).ok().filter(|k| (least..=routed.len()).contains(k));
        let top_k = top_k.ok_or_else(|| bad("top_k", format!("{least} to {}", routed.len()), found.to_string()))?;
        let heads = Heads { kind, shared, routed, top_k };
        if kind != Kind::QueryNorms && heads.columns() == 0 {
            let expected = "2 or more if all heads are shared".to_owned();
            return Err(bad("num_heads", expected, num_heads.to_string()));
        }
        Ok(heads)
    }

    /// Number of heads.
    pub fn count(&self) -> usize {
        self.shared.len() + self.routed.len()
    }

    /// Width of the scores. 0 for [`Kind::QueryNorms`], whose input is the queries.
    pub fn columns(&self) -> usize {
        self.shared_columns().end
    }

    /// The columns of the routed heads.
    pub fn routed_columns(&self) -> Range<usize> {
        0..if self.top_k > 0 && self.kind != Kind::QueryNorms { self.routed.len() } else { 0 }
    }

    /// The two columns that balance the shared and the routed part; empty unless both parts exist.
    pub fn balance_columns(&self) -> Range<usize> {
        let start = self.routed_columns().end;
        start..start + if start > 0 && !self.shared.is_empty() { 2 } else { 0 }
    }

    /// The columns of the shared heads; empty if there is only one, whose softmax is 1.
    pub fn shared_columns(&self) -> Range<usize> {
        let start = self.balance_columns().end;
        let scored = self.kind == Kind::TwoStage && self.shared.len() > 1;
        start..start + if scored { self.shared.len() } else { 0 }
    }
}

/// Sizes and attributes of a validated call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The attributes.
    pub heads: Heads,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Elements per token: of its scores, or of its queries in [`Kind::QueryNorms`].
    pub width: usize,
}

impl Problem {
    /// Width of one head's query; for [`Kind::QueryNorms`].
    pub fn head_dim(&self) -> usize {
        self.width / self.heads.count()
    }
}

impl Definition for TopKRouter {
    const NAME: &'static str = "TopKRouter";
    const DOC: &'static str = "Computes the gates of the heads (or experts) for every token. The heads in \
          `shared_heads` are on for all tokens. Of the others, the routed heads, the `top_k` with the largest \
          scores are on; ties go to the lower index, and a NaN score counts as -inf (the function body leaves NaN \
          to the runtime's TopK). All other gates are exactly 0. \
          Kind 0 (MoH, arXiv 2410.11842, equations 5 to 7): with R routed and S shared heads, both in ascending \
          order, `scores` concatenates R scores of the routed heads if top_k > 0, 2 balance scores if top_k > 0 and \
          S > 0, and S scores of the shared heads if S > 1. The gates of routed heads are `top_k * softmax` over \
          the selected scores, those of shared heads `S * softmax` over the shared scores. If there are both, the \
          shared gates are multiplied by `2 b_0` and the routed ones by `2 b_1`, where b is the softmax of the \
          balance scores. Kinds 1 and 2 (MoA, arXiv 2210.05144): one score per head, no shared heads; the gate of a \
          selected head is its softmax over all heads (kind 1) or over the selected heads (kind 2). Kind 3 \
          (MoH-LLaMA): `scores` holds the queries of all heads, concatenated; a head's score is the squared norm of \
          its query, and gates are 0 or 1. Everything is computed in float32. If the inputs of a softmax contain \
          NaN or +inf, or are all -inf, all of its gates are NaN, and its heads count as on. A score far below the \
          largest one (by 87 or more) may round to a gate of 0.";
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
