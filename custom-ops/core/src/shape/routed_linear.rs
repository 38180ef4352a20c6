//! Attributes and shapes of RoutedProjection and RoutedCombine.

use super::{Agreed, OutputDim, check_count, choice, count, per_head, show};
use crate::error::Error;
use crate::schema::{Attributes, Operator, ROUTED_COMBINE, ROUTED_PROJECTION};

/// A validated call of either operator. Blocks are what belongs to one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Width of a whole token: x's in a projection, the output's in a combination.
    pub width: usize,
    /// Width of a head's block: of the output in a projection, of x in a combination.
    pub block: usize,
    /// Whether the weight holds a matrix (in, out) for every head, rather than one matrix (out, in).
    pub per_head: bool,
}

impl Problem {
    /// Reads a validated call.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn new(attributes: &Attributes, inputs: &[Option<&[usize]>]) -> Result<Problem, Error> {
        let output = attributes.operator().output_shape(attributes, inputs)?;
        let num_heads = count(attributes, "num_heads")?;
        let x = inputs.first().copied().flatten().unwrap_or(&[0, 0, 0]);
        let (width, blocks) = match is_projection(attributes.operator()) {
            true => (x[2], output[2]),
            false => (output[2], x[2]),
        };
        Ok(Problem {
            tokens: x[0] * x[1],
            num_heads,
            width,
            block: blocks / num_heads,
            per_head: attributes.int("weight_layout") == 1,
        })
    }

    /// Of no tokens, read from the weight's shape alone.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn of_weight(attributes: &Attributes, weight: &[usize]) -> Result<Problem, Error> {
        let heads = count(attributes, "num_heads")?;
        let width = match (is_projection(attributes.operator()), weight) {
            (true, &[_, width] | &[_, width, _]) | (false, &[_, width]) => width,
            (false, &[heads, block, _]) => heads.saturating_mul(block),
            // Any that is accepted, so that the weight is found wrong.
            _ => heads,
        };
        Problem::new(attributes, &[Some(&[0, 0, width.max(1)]), Some(weight), Some(&[0, 0, heads])])
    }
}

fn is_projection(operator: &Operator) -> bool {
    *operator == ROUTED_PROJECTION
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer_projection(
    attributes: &Attributes,
    inputs: &[Option<&[Option<usize>]>],
) -> Result<Vec<OutputDim>, Error> {
    infer(&ROUTED_PROJECTION, attributes, inputs)
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer_combine(
    attributes: &Attributes,
    inputs: &[Option<&[Option<usize>]>],
) -> Result<Vec<OutputDim>, Error> {
    infer(&ROUTED_COMBINE, attributes, inputs)
}

fn infer(
    operator: &'static Operator,
    attributes: &Attributes,
    inputs: &[Option<&[Option<usize>]>],
) -> Result<Vec<OutputDim>, Error> {
    check_count(operator, inputs)?;
    let heads = count(attributes, "num_heads")?;
    let per_head_layout = choice(attributes, "weight_layout", 2)? == 1;
    let dims = |i: usize| inputs.get(i).copied().flatten().unwrap_or(&[]);
    let bad = |i: usize, expected: String| Error::Shape {
        operator: operator.name,
        input: operator.inputs[i].name,
        expected,
        found: show(dims(i)),
    };
    let (x, weight, gates) = (dims(0), dims(1), dims(2));
    let (mut batch, mut q_len) = (Agreed::default(), Agreed::default());
    // The width of a token, and that of a head's block; which of them x has depends on the operator.
    let (mut width, mut block) = (Agreed::default(), Agreed::default());
    let projection = is_projection(operator);

    let fits = x.len() == 3
        && batch.accept(x[0])
        && q_len.accept(x[1])
        && x[2] != Some(0)
        && match projection {
            true => width.accept(x[2]),
            false => per_head(x[2], heads).is_some_and(|d| block.accept(d)),
        };
    if !fits {
        let last = if projection { "width" } else { "num_heads * value_dim" };
        return Err(bad(0, format!("(batch, q_len, {last}) with num_heads = {heads}")));
    }

    let names = if projection { ["width", "head_dim"] } else { ["width", "value_dim"] };
    let shown = [width.show(names[0]), block.show(names[1])];
    let fits = match (weight, per_head_layout, projection) {
        (&[blocks, w], false, true) | (&[w, blocks], false, false) => {
            w != Some(0) && width.accept(w) && per_head(blocks, heads).is_some_and(|d| block.accept(d))
        }
        (&[h, w, d], true, true) | (&[h, d, w], true, false) => {
            h.is_none_or(|h| h == heads) && w != Some(0) && d != Some(0) && width.accept(w) && block.accept(d)
        }
        _ => false,
    };
    if !fits {
        let expected = match (per_head_layout, projection) {
            (false, true) => format!("({heads} * {}, {}) in layout 0", shown[1], shown[0]),
            (false, false) => format!("({}, {heads} * {}) in layout 0", shown[0], shown[1]),
            (true, true) => format!("({heads}, {}, {}) in layout 1", shown[0], shown[1]),
            (true, false) => format!("({heads}, {}, {}) in layout 1", shown[1], shown[0]),
        };
        return Err(bad(1, expected));
    }

    let fits =
        gates.len() == 3 && batch.accept(gates[0]) && q_len.accept(gates[1]) && gates[2].is_none_or(|h| h == heads);
    if !fits {
        return Err(bad(2, format!("({}, {}, {heads})", batch.show("batch"), q_len.show("q_len"))));
    }

    let blocks = block.0.and_then(|block| block.checked_mul(heads));
    let out = if projection { blocks } else { width.0 };
    if let Some(bias) = inputs.get(3).copied().flatten()
        && !(bias.len() == 1 && Agreed(out).accept(bias[0]))
    {
        return Err(bad(3, format!("({})", Agreed(out).show("width of the output"))));
    }
    let out = out.map_or(OutputDim::Unknown, OutputDim::Size);
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, out])
}
