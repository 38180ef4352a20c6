//! RoutedAggregatedAttention: TransNeXt's aggregated attention (a local window plus pooled tokens) with gated heads.

mod body;
mod reference;

use crate::attributes::attributes;
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader, inputs};
use crate::operator::{Body, Variant};
use crate::operator::{Definition, Example, Part};
use crate::shape::{Agreed, OutputDim, PartialShape, per_head, show};
use crate::tensor::Tensor;

/// The operator.
#[derive(Debug, Clone, Copy)]
pub struct RoutedAggregatedAttention;

attributes! {
    /// RoutedAggregatedAttention's attributes.
    #[derive(Copy)]
    pub struct Attributes {
        /// Heads.
        num_heads: usize,
        /// Rows of the grid.
        height: usize,
        /// Columns of the grid.
        width: usize,
        /// Side of the window around each token; odd.
        window: usize,
    }
}

inputs! {
    /// RoutedAggregatedAttention's inputs.
    pub struct Inputs {
        query: T, "(batch, height * width, num_heads * head_dim)", "Queries.";
        key: T, "(batch, height * width, num_heads * head_dim)", "Keys.";
        value: T, "(batch, height * width, num_heads * head_dim)", "Values.";
        pooled_key: T, "(batch, pooled, num_heads * head_dim)", "Keys of the pooled tokens.";
        pooled_value: T, "(batch, pooled, num_heads * head_dim)", "Values of the pooled tokens.";
        head_gates: F32, "(batch, height * width, num_heads)", "Any finite number; 0 switches the head off.";
        query_embedding: T, "(num_heads, head_dim)", "Added to the normalised queries.";
        query_scale: F32, "(height * width, num_heads)",
            "Factor applied to the scores: softplus(temperature) * ln(window cells inside the grid + pooled).";
        local_bias: T, "(num_heads, window * window)", "Added to the scores of the window.";
        pooled_bias: T, "(num_heads, height * width, pooled)", "Added to the scores of the pooled tokens.";
        learnable_tokens: T, "(num_heads, head_dim, window * window)",
            "Dot products with the normalised queries are added to the softmax weights of the window.";
        learnable_bias: T, "(num_heads, window * window)", "Added to the softmax weights of the window.";
    }
}

/// Sizes of a validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Batch size.
    pub batch: usize,
    /// Rows of the grid.
    pub height: usize,
    /// Columns of the grid.
    pub width: usize,
    /// Side of the window.
    pub window: usize,
    /// Pooled tokens.
    pub pooled: usize,
    /// Heads.
    pub num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Problem {
    /// Tokens of the grid.
    pub fn tokens(&self) -> usize {
        self.height * self.width
    }

    /// Cells of a window, including those outside the grid.
    pub fn cells(&self) -> usize {
        self.window * self.window
    }

    /// The token in cell `cell` of the window around `token`; `None` outside the grid.
    pub fn neighbour(&self, token: usize, cell: usize) -> Option<usize> {
        let reach = self.window / 2;
        let y = (token / self.width + cell / self.window).checked_sub(reach).filter(|&y| y < self.height)?;
        let x = (token % self.width + cell % self.window).checked_sub(reach).filter(|&x| x < self.width)?;
        Some(y * self.width + x)
    }
}

struct Grid {
    num_heads: usize,
    tokens: usize,
    cells: usize,
}

impl Grid {
    fn read(attributes: &Attributes) -> Result<Grid, Error> {
        let Attributes { num_heads, height, width, window } = *attributes;
        let bad = |attribute, expected: &str, found: usize| Error::Attribute {
            operator: RoutedAggregatedAttention::NAME,
            attribute,
            expected: expected.to_owned(),
            found: found.to_string(),
        };
        if window.is_multiple_of(2) {
            return Err(bad("window", "an odd number", window));
        }
        let tokens = height.checked_mul(width);
        let tokens = tokens.ok_or_else(|| bad("width", "a grid that fits in memory", width))?;
        let cells = window.checked_mul(window);
        let cells = cells.ok_or_else(|| bad("window", "a window that fits in memory", window))?;
        Ok(Grid { num_heads, tokens, cells })
    }
}

impl Definition for RoutedAggregatedAttention {
    const NAME: &'static str = "RoutedAggregatedAttention";
    const DOC: &'static str = "Aggregated attention (TransNeXt, arXiv 2311.17132) with heads gated per query token. \
          The tokens form a grid in row-major order; each attends to the cells of the window around it and to the \
          pooled tokens. Per head, with `unit(z) = z / max(|z|, 1e-12)` and `q = unit(query)`: scores `s = (q + \
          query_embedding) * query_scale`, `local_j = s . unit(key_j) + local_bias_j` for the window's cells j \
          inside the grid, in row-major order, and `pooled_m = s . unit(pooled_key_m) + pooled_bias_m`; weights `a \
          = softmax` over both; output `gate * (sum_j (a_j + q . learnable_tokens_j + learnable_bias_j) value_j + \
          sum_m a_m pooled_value_m)`. A gate of exactly 0 switches the head off for the token: it is not computed, \
          and its block of the output is exactly 0, even if inputs are NaN or infinite. Norms, scores and sums are \
          accumulated in float32.";
    const INPUTS: &'static [Operand] = Inputs::<List<'_, ()>>::OPERANDS;
    const OUTPUT: Operand = Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, height * width, num_heads * head_dim)",
        doc: "The heads' outputs, concatenated.",
    };
    const PART: Part = Part::Attention;

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
        Grid::read(attributes).map(drop)
    }

    fn infer(attributes: &Attributes, shapes: &Inputs<List<'_, PartialShape<'_>>>) -> Result<Vec<OutputDim>, Error> {
        let grid = Grid::read(attributes)?;
        let heads = grid.num_heads;
        let (mut batch, mut pooled, mut head_dim) = (Agreed::default(), Agreed::default(), Agreed::default());
        for (i, (operand, found)) in Self::INPUTS.iter().zip(shapes.list()).enumerate() {
            let found = found.unwrap_or_default();
            let known = (batch, pooled, head_dim);
            let is = |dim: Option<usize>, expected: usize| dim.is_none_or(|dim| dim == expected);
            let fits = match (i, found) {
                (0..=2, &[b, n, width]) => {
                    batch.accept(b) && is(n, grid.tokens) && per_head(width, heads).is_some_and(|d| head_dim.accept(d))
                }
                (3 | 4, &[b, m, width]) => {
                    batch.accept(b) && pooled.accept(m) && per_head(width, heads).is_some_and(|d| head_dim.accept(d))
                }
                (5, &[b, n, h]) => batch.accept(b) && is(n, grid.tokens) && is(h, heads),
                (6, &[h, d]) => is(h, heads) && d != Some(0) && head_dim.accept(d),
                (7, &[n, h]) => is(n, grid.tokens) && is(h, heads),
                (8 | 11, &[h, cells]) => is(h, heads) && is(cells, grid.cells),
                (9, &[h, n, m]) => is(h, heads) && is(n, grid.tokens) && pooled.accept(m),
                (10, &[h, d, cells]) => is(h, heads) && d != Some(0) && head_dim.accept(d) && is(cells, grid.cells),
                _ => false,
            };
            if !fits {
                let (batch, pooled, head_dim) =
                    (known.0.show("batch"), known.1.show("pooled"), known.2.show("head_dim"));
                let tokens = format!("height * width = {}", grid.tokens);
                let cells = format!("window * window = {}", grid.cells);
                let expected = match i {
                    0..=2 => format!("({batch}, {tokens}, {heads} * {head_dim})"),
                    3 | 4 => format!("({batch}, {pooled}, {heads} * {head_dim})"),
                    5 => format!("({batch}, {tokens}, {heads})"),
                    6 => format!("({heads}, {head_dim})"),
                    7 => format!("({tokens}, {heads})"),
                    9 => format!("({heads}, {tokens}, {pooled})"),
                    10 => format!("({heads}, {head_dim}, {cells})"),
                    _ => format!("({heads}, {cells})"),
                };
                let operator = Self::NAME;
                return Err(Error::Shape { operator, input: operand.name, expected, found: show(found) });
            }
        }
        // If the query's width is unknown, head_dim comes from another input.
        let width = match head_dim.0 {
            None => OutputDim::Unknown,
            Some(dim) => OutputDim::Size(dim.checked_mul(heads).ok_or_else(|| Error::Shape {
                operator: Self::NAME,
                input: "query_embedding",
                expected: "a width that fits in memory".to_owned(),
                found: format!("({heads}, {dim})"),
            })?),
        };
        Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::Size(grid.tokens), width])
    }

    fn problem(attributes: &Attributes, shapes: &Inputs<List<'_, &[usize]>>) -> Result<Problem, Error> {
        let Attributes { num_heads, height, width, window } = *attributes;
        let Inputs { query, pooled_key, .. } = *shapes;
        let (pooled, head_dim) = (pooled_key[1], query[2] / num_heads);
        Ok(Problem { batch: query[0], height, width, window, pooled, num_heads, head_dim })
    }

    fn variant(_: &Attributes, _: &Inputs<List<'_, PartialShape<'_>>>) -> Variant {
        Variant::default()
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
        let attributes = Attributes { num_heads: 2, height: 3, width: 4, window: 3 };
        let (tokens, pooled): (&[usize], &[usize]) = (&[2, 12, 8], &[2, 6, 8]);
        let shapes: [&[usize]; 12] = [
            tokens,
            tokens,
            tokens,
            pooled,
            pooled,
            &[2, 12, 2],
            &[2, 4],
            &[12, 2],
            &[2, 9],
            &[2, 12, 6],
            &[2, 4, 9],
            &[2, 9],
        ];
        vec![Example::new(attributes, &shapes)]
    }
}
