//! What the linear layers between tokens and heads have in common: RoutedProjection makes the heads' blocks, RoutedCombine reads
//! them.

use crate::attributes::{attributes, choices, name_of};
use crate::error::Error;
use crate::operator::{BodyValue, Builder, Variant};
use crate::shape::{Agreed, OutputDim, PartialShape, per_head, show};

choices! {
    /// How the heads' matrices lie in the weight.
    pub enum WeightLayout {
        /// One matrix, (out, in) as `nn.Linear` stores it.
        OutIn,
        /// One matrix a head, (num_heads, in, out).
        PerHead,
    }
}

attributes! {
    /// The attributes of RoutedProjection and RoutedCombine.
    #[derive(Copy)]
    pub struct Attributes {
        /// Heads.
        num_heads: usize,
        /// 0: the weight is one matrix, (out, in) as nn.Linear stores it. 1: one matrix a head, (num_heads, in, out).
        weight_layout: WeightLayout,
    }
}

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
    /// How the weight lies.
    pub weight_layout: WeightLayout,
}

impl Problem {
    /// Whether the weight holds a matrix (in, out) for every head, rather than one matrix (out, in).
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

/// Shapes of either operator's inputs, of which `bias` may be absent.
pub(crate) struct Shapes<'a> {
    pub(crate) x: PartialShape<'a>,
    pub(crate) weight: PartialShape<'a>,
    pub(crate) head_gates: PartialShape<'a>,
    pub(crate) bias: Option<PartialShape<'a>>,
}

/// Validates shapes; gives the output's.
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
    // The width of a token, and that of a head's block; which of them x has depends on the operator.
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

/// Sizes of a validated call: x's last dimension and the weight's shape say the rest.
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

/// Which body a node needs.
pub(crate) fn variant(attributes: &Attributes, has_bias: bool) -> Variant {
    let per_head = attributes.weight_layout == WeightLayout::PerHead;
    Variant { per_head, optional_inputs: has_bias, ..Variant::default() }
}

/// A body's `x` (batch, q_len, num_heads * dim) with zeros in the blocks of the heads that are off.
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

/// Transposes a body's (a, b, ...) weight.
pub(crate) fn transposed(b: &mut Builder, perm: &[i64], output: &str) -> String {
    b.with("Transpose", &["weight"], output, &[("perm", BodyValue::Ints(perm.to_vec()))])
}

/// The problem of no tokens that a weight of this shape belongs to.
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
        // Any that is accepted, so that the weight is found wrong.
        _ => heads,
    };
    let x = [0, 0, wide.max(1)];
    let known = |shape: &[usize]| shape.iter().map(|&dim| Some(dim)).collect::<Vec<_>>();
    let shapes = [known(&x), known(weight), known(&[0, 0, heads])];
    let [x_shape, weight_shape, head_gates] = &shapes;
    infer(operator, direction, attributes, &Shapes { x: x_shape, weight: weight_shape, head_gates, bias: None })?;
    Ok(problem(direction, attributes, &x, weight))
}
