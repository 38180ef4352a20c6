//! Shared by the two linear operators: RoutedProjection (tokens to heads) and RoutedCombine (heads to tokens).

use crate::attributes::{attributes, choices, name_of};
use crate::error::Error;
use crate::operator::{BodyValue, Builder, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, per_head, show};

choices! {
    /// Memory layout of the weight.
    pub enum WeightLayout {
        /// One matrix for all heads, (out, in) as in `nn.Linear`.
        OutIn,
        /// One matrix per head, (num_heads, in, out).
        PerHead,
    }
}

attributes! {
    /// The attributes of RoutedProjection and RoutedCombine.
    #[derive(Copy)]
    pub struct Attributes {
        /// Heads.
        num_heads: usize,
        /// 0: the weight is one matrix, (out, in) as in nn.Linear. 1: one matrix per head, (num_heads, in, out).
        weight_layout: WeightLayout,
    }
}

/// Sizes of a validated call of either operator. A block is the part of a row that belongs to one head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Heads.
    pub num_heads: usize,
    /// Width of a token: the last dimension of x in a projection, of the output in a combination.
    pub width: usize,
    /// Width of a head's block: of the output in a projection, of x in a combination.
    pub block: usize,
    /// Memory layout of the weight.
    pub weight_layout: WeightLayout,
}

impl Problem {
    /// Whether the weight has one (in, out) matrix per head; otherwise it is one (out, in) matrix.
    pub fn per_head(&self) -> bool {
        self.weight_layout == WeightLayout::PerHead
    }
}

/// Which of the two operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Tokens to heads.
    Projection,
    /// Heads to tokens.
    Combination,
}

/// Input shapes of either operator; `bias` is optional.
pub(crate) struct Shapes<'a> {
    pub(crate) x: PartialShape<'a>,
    pub(crate) weight: PartialShape<'a>,
    pub(crate) head_gates: PartialShape<'a>,
    pub(crate) bias: Option<PartialShape<'a>>,
}

/// Validates the input shapes and returns the output's.
pub(crate) fn infer(
    operator: &'static str,
    direction: Direction,
    attributes: &Attributes,
    shapes: &Shapes<'_>,
) -> Result<Vec<OutputDim>, Error> {
    let Attributes { num_heads: heads, weight_layout } = *attributes;
    let per_head_layout = weight_layout == WeightLayout::PerHead;
    let Shapes { x, weight, head_gates: gates, bias } = *shapes;
    let bad = |input, expected: String, found| Error::Shape { operator, input, expected, found: show(found) };
    let (mut batch, mut q_len) = (Agreed::default(), Agreed::default());
    // x's last dimension is the token width in a projection and heads * block in a combination.
    let (mut width, mut block) = (Agreed::default(), Agreed::default());
    let projection = direction == Direction::Projection;

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
        return Err(bad("x", format!("(batch, q_len, {last}) with num_heads = {heads}"), x));
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
        return Err(bad("weight", expected, weight));
    }

    let fits =
        gates.len() == 3 && batch.accept(gates[0]) && q_len.accept(gates[1]) && gates[2].is_none_or(|h| h == heads);
    if !fits {
        return Err(bad("head_gates", format!("({}, {}, {heads})", batch.show("batch"), q_len.show("q_len")), gates));
    }

    let blocks = block.0.and_then(|block| block.checked_mul(heads));
    let out = if projection { blocks } else { width.0 };
    if let Some(bias) = bias
        && !(bias.len() == 1 && Agreed(out).accept(bias[0]))
    {
        return Err(bad("bias", format!("({})", Agreed(out).show("width of the output")), bias));
    }
    let out = out.map_or(OutputDim::Unknown, OutputDim::Size);
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::SameAs { input: 0, axis: 1 }, out])
}

/// Sizes of a validated call, from x's last dimension and the weight's shape.
pub(crate) fn problem(direction: Direction, attributes: &Attributes, x: &[usize], weight: &[usize]) -> Problem {
    let Attributes { num_heads, weight_layout } = *attributes;
    let (width, block) = match (direction, weight_layout, weight) {
        (Direction::Projection, WeightLayout::PerHead, &[_, width, block]) => (width, block),
        (Direction::Combination, WeightLayout::PerHead, &[_, block, width]) => (width, block),
        (Direction::Projection, _, &[blocks, width, ..]) => (width, blocks / num_heads),
        (Direction::Combination, _, &[width, blocks, ..]) => (width, blocks / num_heads),
        _ => (0, 0),
    };
    Problem { tokens: x[..2].iter().product(), num_heads, width, block, weight_layout }
}

/// The function body variant that a node needs.
pub(crate) fn variant(attributes: &Attributes, has_bias: bool) -> Variant {
    let per_head = attributes.weight_layout == WeightLayout::PerHead;
    Variant { per_head, optional_inputs: usize::from(has_bias), ..Variant::default() }
}

/// In a body: `x` (batch, q_len, num_heads * dim) with the blocks of heads that are off set to 0.
pub(crate) fn masked(b: &mut Builder, x: &str, output: &str) -> String {
    let (copy, rest) = (b.ints(&[0, 0], "copy"), b.ints(&[-1], "rest"));
    let heads = b.int_attribute(name_of!(Attributes.num_heads), "num_heads_scalar");
    let one = b.ints(&[1], "one");
    let heads = b.node("Reshape", &[&heads, &one], "num_heads_list");
    let split = b.concat(&[&copy, &heads, &rest], "split_heads");
    let blocks = b.node("Reshape", &[x, &split], "blocks");
    let zero = b.float(0.0, "zero");
    let gates = b.node("Unsqueeze", &["head_gates", &rest], "gates_column");
    let off = b.node("Equal", &[&gates, &zero], "off");
    let zero = b.node("CastLike", &[&zero, x], "zero_like");
    let blocks = b.node("Where", &[&off, &zero, &blocks], "blocks_routed");
    let join = b.ints(&[0, 0, -1], "join_heads");
    b.node("Reshape", &[&blocks, &join], output)
}

/// In a body: the weight (a, b, ...) transposed.
pub(crate) fn transposed(b: &mut Builder, perm: &[i64], output: &str) -> String {
    b.with("Transpose", &["weight"], output, &[("perm", BodyValue::Ints(perm.to_vec()))])
}

/// The sizes that a weight of this shape implies, with 0 tokens.
pub(crate) fn of_weight(
    operator: &'static str,
    direction: Direction,
    attributes: &Attributes,
    weight: &[usize],
) -> Result<Problem, Error> {
    let heads = attributes.num_heads;
    let wide = match (direction, weight) {
        (Direction::Projection, &[_, width] | &[_, width, _]) | (Direction::Combination, &[_, width]) => width,
        (Direction::Combination, &[heads, block, _]) => heads.saturating_mul(block),
        // A width that passes validation of x, so that the error names the weight.
        _ => heads,
    };
    let x = [0, 0, wide.max(1)];
    let known = |shape: &[usize]| shape.iter().map(|&dim| Some(dim)).collect::<Vec<_>>();
    let shapes = [known(&x), known(weight), known(&[0, 0, heads])];
    let [x_shape, weight_shape, head_gates] = &shapes;
    infer(operator, direction, attributes, &Shapes { x: x_shape, weight: weight_shape, head_gates, bias: None })?;
    Ok(problem(direction, attributes, &x, weight))
}
