//! RoutedAggregatedAttention's attributes and shapes.

use super::{Agreed, OutputDim, check_count, count, per_head, show};
use crate::error::Error;
use crate::schema::{Attributes, ROUTED_AGGREGATED_ATTENTION};

/// A validated call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// Images.
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

    /// Cells of a window, inside the grid or not.
    pub fn cells(&self) -> usize {
        self.window * self.window
    }

    /// The token in cell `cell` of the window around `token`, if it is inside the grid.
    pub fn neighbour(&self, token: usize, cell: usize) -> Option<usize> {
        let reach = self.window / 2;
        let y = (token / self.width + cell / self.window).checked_sub(reach).filter(|&y| y < self.height)?;
        let x = (token % self.width + cell % self.window).checked_sub(reach).filter(|&x| x < self.width)?;
        Some(y * self.width + x)
    }

    /// Reads a validated call.
    ///
    /// # Errors
    /// As [`crate::Operator::output_shape`].
    pub fn new(attributes: &Attributes, inputs: &[Option<&[usize]>]) -> Result<Problem, Error> {
        let output = ROUTED_AGGREGATED_ATTENTION.output_shape(attributes, inputs)?;
        let grid = Grid::read(attributes)?;
        let pooled = inputs.get(3).copied().flatten().unwrap_or(&[0, 0, 0])[1];
        let Grid { num_heads, height, width, window, .. } = grid;
        Ok(Problem { batch: output[0], height, width, window, pooled, num_heads, head_dim: output[2] / num_heads })
    }
}

struct Grid {
    num_heads: usize,
    height: usize,
    width: usize,
    window: usize,
    tokens: usize,
    cells: usize,
}

impl Grid {
    fn read(attributes: &Attributes) -> Result<Grid, Error> {
        let (num_heads, height, width) =
            (count(attributes, "num_heads")?, count(attributes, "height")?, count(attributes, "width")?);
        let window = count(attributes, "window")?;
        let bad = |attribute, expected: &str, found: usize| Error::Attribute {
            operator: ROUTED_AGGREGATED_ATTENTION.name,
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
        let cells = cells.ok_or_else(|| bad("window", "one that fits in memory", window))?;
        Ok(Grid { num_heads, height, width, window, tokens, cells })
    }
}

/// See [`crate::Operator::infer`].
pub(crate) fn infer(attributes: &Attributes, inputs: &[Option<&[Option<usize>]>]) -> Result<Vec<OutputDim>, Error> {
    check_count(&ROUTED_AGGREGATED_ATTENTION, inputs)?;
    let grid = Grid::read(attributes)?;
    let heads = grid.num_heads;
    let (mut batch, mut pooled, mut head_dim) = (Agreed::default(), Agreed::default(), Agreed::default());
    for (i, operand) in ROUTED_AGGREGATED_ATTENTION.inputs.iter().enumerate() {
        let found = inputs.get(i).copied().flatten().unwrap_or(&[]);
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
            let (batch, pooled, head_dim) = (known.0.show("batch"), known.1.show("pooled"), known.2.show("head_dim"));
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
            let operator = ROUTED_AGGREGATED_ATTENTION.name;
            return Err(Error::Shape { operator, input: operand.name, expected, found: show(found) });
        }
    }
    // Where the query's width is unknown, that of another input may say it.
    let width = match head_dim.0 {
        None => OutputDim::Unknown,
        Some(dim) => OutputDim::Size(dim.checked_mul(heads).ok_or_else(|| Error::Shape {
            operator: ROUTED_AGGREGATED_ATTENTION.name,
            input: "query_embedding",
            expected: "a width that fits in memory".to_owned(),
            found: format!("({heads}, {dim})"),
        })?),
    };
    Ok(vec![OutputDim::SameAs { input: 0, axis: 0 }, OutputDim::Size(grid.tokens), width])
}
