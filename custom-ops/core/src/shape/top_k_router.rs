//! TopKRouter's attributes and shapes.

use super::{OutputDim, check_count, choice, count, per_head, show};
use crate::error::Error;
use crate::schema::{Attributes, TOP_K_ROUTER};
use std::ops::Range;

/// What gates are made of: the attribute's values, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

impl Kind {
    const ALL: [Kind; 4] = [Kind::TwoStage, Kind::Probabilities, Kind::Renormalized, Kind::QueryNorms];
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
    /// Reads the attributes.
    ///
    /// # Errors
    /// [`Error::Attribute`] naming the one that does not fit.
    pub fn read(attributes: &Attributes) -> Result<Heads, Error> {
        let kind = Kind::ALL[choice(attributes, "kind", Kind::ALL.len() as i64)? as usize];
        let num_heads = count(attributes, "num_heads")?;
        let list = attributes.ints("shared_heads");
        let bad = |attribute, expected: String, found: String| Error::Attribute {
            operator: TOP_K_ROUTER.name,
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
        let found = attributes.int("top_k");
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
    /// Reads a validated call.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn new(attributes: &Attributes, scores: &[usize]) -> Result<Problem, Error> {
        let output = TOP_K_ROUTER.output_shape(attributes, &[Some(scores)])?;
        Ok(Problem { heads: Heads::read(attributes)?, tokens: output[0] * output[1], width: scores[2] })
    }

    /// Elements of a query; of [`Kind::QueryNorms`].
    pub fn head_dim(&self) -> usize {
        self.width / self.heads.count()
    }
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer(attributes: &Attributes, inputs: &[Option<&[Option<usize>]>]) -> Result<Vec<OutputDim>, Error> {
    check_count(&TOP_K_ROUTER, inputs)?;
    let heads = Heads::read(attributes)?;
    let found = inputs.first().copied().flatten().unwrap_or(&[]);
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
        return Err(Error::Shape {
            operator: TOP_K_ROUTER.name,
            input: TOP_K_ROUTER.inputs[0].name,
            expected: format!("(batch, q_len, {width})"),
            found: show(found),
        });
    }
    let same = |axis| OutputDim::SameAs { input: 0, axis };
    Ok(vec![same(0), same(1), OutputDim::Size(heads.count())])
}
