//! Aggregated attention with its gradients, without a copy of the windows, and nothing of heads that are off.

use super::rows::{made, made_of, per_task, sum};
use super::softmax::dot;
use candle_core::{Device, Result, Tensor};

/// Sizes of an aggregated attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    /// Rows and columns of the grid.
    pub(crate) grid: [usize; 2],
    pub(crate) window: usize,
    pub(crate) pooled: usize,
}

/// The numbers of the operator's inputs, in its order.
pub(crate) struct Numbers {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
    pub(crate) pooled_key: Vec<f32>,
    pub(crate) pooled_value: Vec<f32>,
    pub(crate) gates: Vec<f32>,
    pub(crate) query_embedding: Vec<f32>,
    pub(crate) query_scale: Vec<f32>,
    pub(crate) local_bias: Vec<f32>,
    pub(crate) pooled_bias: Vec<f32>,
    pub(crate) learnable_tokens: Vec<f32>,
    pub(crate) learnable_bias: Vec<f32>,
}

/// A forward, as its gradients need it.
pub(crate) struct Forward {
    sizes: Sizes,
    given: Numbers,
    query: Units,
    key: Units,
    pooled_key: Units,
    /// (batch, tokens, heads, cells + pooled): the softmax, 0 for heads that are off and cells outside of the grid.
    weights: Vec<f32>,
    /// (batch, tokens, heads * dim).
    output: Vec<f32>,
}

/// Rows of length 1, and what they were divided by: at least [`LEAST`].
struct Units {
    rows: Vec<f32>,
    norms: Vec<f32>,
}

const LEAST: f32 = 1e-12;

/// `count` rows of `width`, which `f` makes of zeros.
fn rows(count: usize, width: usize, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    made(
        count * width,
        width,
        #[inline(always)]
        |first, part| part.chunks_mut(width).enumerate().for_each(|(i, out)| f(first + i, out)),
    )
}

impl Units {
    fn of(x: &[f32], dim: usize) -> Units {
        let norms = made_of(
            x.len() / dim.max(1),
            1,
            per_task(dim),
            #[inline(always)]
            |first, part| {
                for (i, norm) in part.iter_mut().enumerate() {
                    let row = &x[(first + i) * dim..][..dim];
                    *norm = dot(row, row).sqrt().max(LEAST);
                }
            },
        );
        let rows = made(
            x.len(),
            dim,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(dim).enumerate() {
                    let (factor, x) = (1.0 / norms[first + i], &x[(first + i) * dim..][..dim]);
                    out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
                }
            },
        );
        Units { rows, norms }
    }

    #[inline(always)]
    fn row(&self, row: usize, dim: usize) -> &[f32] {
        &self.rows[row * dim..][..dim]
    }

    /// From the gradient of row `row` that of what it was made from.
    #[inline(always)]
    fn back(&self, row: usize, gradient: &mut [f32]) {
        let unit = self.row(row, gradient.len());
        let along = if self.norms[row] > LEAST { dot(unit, gradient) } else { 0.0 };
        let factor = 1.0 / self.norms[row];
        gradient.iter_mut().zip(unit).for_each(|(g, u)| *g = (*g - u * along) * factor);
    }
}

#[inline(always)]
fn add(to: &mut [f32], factor: f32, x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

impl Sizes {
    fn tokens(&self) -> usize {
        self.grid[0] * self.grid[1]
    }

    fn cells(&self) -> usize {
        self.window * self.window
    }

    /// Numbers of a row of weights.
    fn seen(&self) -> usize {
        self.cells() + self.pooled
    }

    /// The token in cell `cell` of the window around `token`.
    #[inline(always)]
    fn in_window(&self, token: usize, cell: usize) -> Option<usize> {
        let ([rows, columns], reach) = (self.grid, self.window / 2);
        let row = (token / columns + cell / self.window).wrapping_sub(reach);
        let column = (token % columns + cell % self.window).wrapping_sub(reach);
        (row < rows && column < columns).then_some(row * columns + column)
    }

    /// The row of head `head` of the pooled token `m` in batch `batch`.
    #[inline(always)]
    fn pooled_row(&self, batch: usize, m: usize, head: usize) -> usize {
        (batch * self.pooled + m) * self.heads + head
    }

    /// Where a token's numbers in a record begin: gradients of scores, factors of values, their gradients, the gradient of the
    /// query with its embedding, that of the query, of its scale, and of the gate.
    fn record(&self) -> Record {
        let factors = self.seen();
        let of_factors = factors + self.cells();
        let of_embedded = of_factors + self.cells();
        let of_query = of_embedded + self.dim;
        let of_scale = of_query + self.dim;
        Record { factors, of_factors, of_embedded, of_query, of_scale, of_gate: of_scale + 1, width: of_scale + 2 }
    }
}

#[derive(Debug, Clone, Copy)]
struct Record {
    factors: usize,
    of_factors: usize,
    of_embedded: usize,
    of_query: usize,
    of_scale: usize,
    of_gate: usize,
    width: usize,
}

impl Forward {
    pub(crate) fn new(sizes: Sizes, given: Numbers) -> Forward {
        let Sizes { heads, dim, .. } = sizes;
        let [query, key, pooled_key] = [&given.query, &given.key, &given.pooled_key].map(|x| Units::of(x, dim));
        let count = sizes.batch * sizes.tokens() * heads;
        let (weights, output) = (Vec::new(), Vec::new());
        let mut forward = Forward { sizes, query, key, pooled_key, weights, output, given };
        forward.weights = made(
            count * sizes.seen(),
            sizes.seen(),
            #[inline(always)]
            |first, part| {
                let mut scores = vec![0f32; dim];
                for (i, weights) in part.chunks_mut(sizes.seen()).enumerate() {
                    forward.weigh(first + i, &mut scores, weights);
                }
            },
        );
        forward.output = made(
            count * dim,
            dim,
            #[inline(always)]
            |first, part| {
                let mut factors = vec![0f32; sizes.cells()];
                for (i, output) in part.chunks_mut(dim).enumerate() {
                    forward.sum_values(first + i, &mut factors, output);
                }
            },
        );
        forward
    }

    /// (batch, tokens, heads * dim).
    pub(crate) fn output(&self, device: &Device) -> Result<Tensor> {
        let Sizes { batch, heads, dim, .. } = self.sizes;
        Tensor::from_slice(&self.output, (batch, self.sizes.tokens(), heads * dim), device)
    }

    /// Batch, token and head of a row.
    #[inline(always)]
    fn place(&self, row: usize) -> (usize, usize, usize) {
        let (heads, tokens) = (self.sizes.heads, self.sizes.tokens());
        (row / (heads * tokens), row / heads % tokens, row % heads)
    }

    /// The query that scores are made with.
    #[inline(always)]
    fn scaled_query(&self, row: usize, out: &mut [f32]) {
        let (dim, heads) = (self.sizes.dim, self.sizes.heads);
        let (_, token, head) = self.place(row);
        let scale = self.given.query_scale[token * heads + head];
        let embedding = &self.given.query_embedding[head * dim..][..dim];
        let query = self.query.row(row, dim).iter().zip(embedding);
        out.iter_mut().zip(query).for_each(|(out, (q, e))| *out = (q + e) * scale);
    }

    #[inline(always)]
    fn weigh(&self, row: usize, scaled: &mut [f32], weights: &mut [f32]) {
        if self.given.gates[row] == 0.0 {
            return;
        }
        let Sizes { heads, dim, pooled, .. } = self.sizes;
        let (batch, token, head) = self.place(row);
        let (cells, tokens) = (self.sizes.cells(), self.sizes.tokens());
        self.scaled_query(row, scaled);
        let (local, global) = weights.split_at_mut(cells);
        for (cell, score) in local.iter_mut().enumerate() {
            *score = match self.sizes.in_window(token, cell) {
                Some(other) => {
                    let key = self.key.row((batch * tokens + other) * heads + head, dim);
                    dot(scaled, key) + self.given.local_bias[head * cells + cell]
                }
                None => f32::NEG_INFINITY,
            };
        }
        let bias = &self.given.pooled_bias[(head * tokens + token) * pooled..][..pooled];
        for (m, score) in global.iter_mut().enumerate() {
            *score = dot(scaled, self.pooled_key.row(self.sizes.pooled_row(batch, m, head), dim)) + bias[m];
        }
        let most = super::softmax::most(weights);
        for weight in weights.iter_mut() {
            *weight = if *weight - most < -86.0 { 0.0 } else { super::rows::exp(*weight - most) };
        }
        let factor = 1.0 / super::softmax::sum(weights);
        weights.iter_mut().for_each(|weight| *weight *= factor);
    }

    /// What the window's values are multiplied by: weights, and the learnt tokens' part.
    #[inline(always)]
    fn factors(&self, row: usize, factors: &mut [f32]) {
        let (cells, dim) = (self.sizes.cells(), self.sizes.dim);
        let head = row % self.sizes.heads;
        factors.copy_from_slice(&self.given.learnable_bias[head * cells..][..cells]);
        add(factors, 1.0, &self.weights[row * self.sizes.seen()..][..cells]);
        for (d, q) in self.query.row(row, dim).iter().enumerate() {
            add(factors, *q, &self.given.learnable_tokens[(head * dim + d) * cells..][..cells]);
        }
    }

    #[inline(always)]
    fn sum_values(&self, row: usize, factors: &mut [f32], output: &mut [f32]) {
        let gate = self.given.gates[row];
        if gate == 0.0 {
            return;
        }
        let Sizes { heads, dim, .. } = self.sizes;
        let (batch, token, head) = self.place(row);
        self.factors(row, factors);
        for (cell, factor) in factors.iter().enumerate() {
            if let Some(other) = self.sizes.in_window(token, cell) {
                let at = (batch * self.sizes.tokens() + other) * heads + head;
                add(output, *factor, &self.given.value[at * dim..][..dim]);
            }
        }
        let weights = &self.weights[row * self.sizes.seen()..][self.sizes.cells()..self.sizes.seen()];
        for (m, weight) in weights.iter().enumerate() {
            let at = self.sizes.pooled_row(batch, m, head);
            add(output, *weight, &self.given.pooled_value[at * dim..][..dim]);
        }
        output.iter_mut().for_each(|x| *x *= gate);
    }

    /// The gradients of all inputs, in their order and as flat as they are given, from that of the output.
    pub(crate) fn back(&self, gradient: &[f32]) -> [Vec<f32>; 12] {
        let Sizes { batch, heads, dim, pooled, .. } = self.sizes;
        let (tokens, cells, seen, record) =
            (self.sizes.tokens(), self.sizes.cells(), self.sizes.seen(), self.sizes.record());
        let records = made(
            batch * tokens * heads * record.width,
            record.width,
            #[inline(always)]
            |first, part| {
                for (i, out) in part.chunks_mut(record.width).enumerate() {
                    self.back_of_row(first + i, gradient, out);
                }
            },
        );
        let of = |row: usize| &records[row * record.width..][..record.width];
        let count = batch * tokens * heads;
        let query = rows(
            count,
            dim,
            #[inline(always)]
            |row, out| out.copy_from_slice(&of(row)[record.of_query..][..dim]),
        );
        let gates = (0..count).map(|row| of(row)[record.of_gate]).collect();
        let key = rows(
            count,
            dim,
            #[inline(always)]
            |row, out| {
                let scaled = &mut vec![0f32; dim];
                self.seen_by(
                    row,
                    #[inline(always)]
                    |other, cell| {
                        self.scaled_query(other, scaled);
                        add(out, of(other)[cell], scaled);
                    },
                );
                self.key.back(row, out);
            },
        );
        let value = rows(
            count,
            dim,
            #[inline(always)]
            |row, out| {
                self.seen_by(
                    row,
                    #[inline(always)]
                    |other, cell| {
                        let factor = of(other)[record.factors + cell] * self.given.gates[other];
                        add(out, factor, &gradient[other * dim..][..dim]);
                    },
                );
            },
        );
        let mut pooled_key = self.of_pooled(
            #[inline(always)]
            |row, scaled, out| {
                self.scaled_query(row, scaled);
                for (score, out) in of(row)[cells..seen].iter().zip(out.chunks_mut(dim)) {
                    add(out, *score, scaled);
                }
            },
        );
        pooled_key.chunks_mut(dim).enumerate().for_each(|(row, out)| self.pooled_key.back(row, out));
        let pooled_value = self.of_pooled(
            #[inline(always)]
            |row, gated, out| {
                let gate = self.given.gates[row];
                gated.iter_mut().zip(&gradient[row * dim..][..dim]).for_each(|(out, g)| *out = gate * g);
                let weights = &self.weights[row * seen..][cells..seen];
                for (weight, out) in weights.iter().zip(out.chunks_mut(dim)) {
                    add(out, *weight, gated);
                }
            },
        );
        let of_scale = |at: usize| (0..batch).map(|b| of(b * tokens * heads + at)[record.of_scale]).sum();
        let query_scale = (0..tokens * heads).map(of_scale).collect();
        let pooled_bias = rows(
            heads * tokens,
            pooled,
            #[inline(always)]
            |at, out| {
                let (head, token) = (at / tokens, at % tokens);
                for b in 0..batch {
                    add(out, 1.0, &of((b * tokens + token) * heads + head)[cells..seen]);
                }
            },
        );
        // What a head has for all tokens: embedding, local bias, learnt bias, learnt tokens.
        let width = dim + 2 * cells + dim * cells;
        let shared = sum(
            count,
            record.width,
            heads * width,
            #[inline(always)]
            |first, end, sums| {
                for row in (first..end).filter(|&row| self.given.gates[row] != 0.0) {
                    let (record_of, sums) = (of(row), &mut sums[row % heads * width..][..width]);
                    let of_factors = &record_of[record.of_factors..][..cells];
                    add(&mut sums[..dim], 1.0, &record_of[record.of_embedded..][..dim]);
                    add(&mut sums[dim..dim + cells], 1.0, &record_of[..cells]);
                    add(&mut sums[dim + cells..dim + 2 * cells], 1.0, of_factors);
                    let learnt = sums[dim + 2 * cells..].chunks_mut(cells);
                    learnt.zip(self.query.row(row, dim)).for_each(|(out, q)| add(out, *q, of_factors));
                }
            },
        );
        let part = |from: usize, length: usize| {
            shared.chunks(width).flat_map(|head| head[from..from + length].iter().copied()).collect::<Vec<f32>>()
        };
        let learnable_tokens = part(dim + 2 * cells, dim * cells);
        let (query_embedding, local_bias, learnable_bias) = (part(0, dim), part(dim, cells), part(dim + cells, cells));
        [
            query,
            key,
            value,
            pooled_key,
            pooled_value,
            gates,
            query_embedding,
            query_scale,
            local_bias,
            pooled_bias,
            learnable_tokens,
            learnable_bias,
        ]
    }

    /// Calls `f` with the queries that see a token and are on, and with the cell where each sees it: they are in the window around it, at the
    /// mirrored cell.
    #[inline(always)]
    fn seen_by(&self, row: usize, mut f: impl FnMut(usize, usize)) {
        let (batch, token, head) = self.place(row);
        let (cells, tokens) = (self.sizes.cells(), self.sizes.tokens());
        for cell in 0..cells {
            if let Some(other) = self.sizes.in_window(token, cells - 1 - cell) {
                let other = (batch * tokens + other) * self.sizes.heads + head;
                if self.given.gates[other] != 0.0 {
                    f(other, cell);
                }
            }
        }
    }

    /// (batch, pooled, heads, dim): the sums over the rows that are on of what `f` adds to a head's (pooled, dim), with room for a row.
    fn of_pooled(&self, f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync) -> Vec<f32> {
        let Sizes { batch, heads, dim, pooled, .. } = self.sizes;
        let tokens = self.sizes.tokens();
        let by_head = made_of(
            batch * heads * pooled * dim,
            pooled * dim,
            1,
            #[inline(always)]
            |at, out| {
                let (batch, head, mut scratch) = (at / heads, at % heads, vec![0f32; dim]);
                for token in 0..tokens {
                    let row = (batch * tokens + token) * heads + head;
                    if self.given.gates[row] != 0.0 {
                        f(row, &mut scratch, out);
                    }
                }
            },
        );
        rows(batch * pooled * heads, dim, |row, out| {
            let (batch, m, head) = (row / (heads * pooled), row / heads % pooled, row % heads);
            out.copy_from_slice(&by_head[((batch * heads + head) * pooled + m) * dim..][..dim]);
        })
    }

    /// A token's record for one head.
    #[inline(always)]
    fn back_of_row(&self, row: usize, gradient: &[f32], out: &mut [f32]) {
        let gate = self.given.gates[row];
        if gate == 0.0 {
            return;
        }
        let Sizes { heads, dim, .. } = self.sizes;
        let (batch, token, head) = self.place(row);
        let (tokens, cells, seen, record) =
            (self.sizes.tokens(), self.sizes.cells(), self.sizes.seen(), self.sizes.record());
        let gradient = &gradient[row * dim..][..dim];
        let weights = &self.weights[row * seen..][..seen];
        self.factors(row, &mut out[record.factors..][..cells]);
        out[record.of_gate] = dot(gradient, &self.output[row * dim..][..dim]) / gate;
        // Gradients of the factors, which are those of the window's weights too, and of the pooled weights.
        for cell in 0..cells {
            if let Some(other) = self.sizes.in_window(token, cell) {
                let at = (batch * tokens + other) * heads + head;
                let along = gate * dot(gradient, &self.given.value[at * dim..][..dim]);
                (out[record.of_factors + cell], out[cell]) = (along, along);
            }
        }
        for m in 0..self.sizes.pooled {
            let at = self.sizes.pooled_row(batch, m, head);
            out[cells + m] = gate * dot(gradient, &self.given.pooled_value[at * dim..][..dim]);
        }
        let along = dot(weights, &out[..seen]);
        out[..seen].iter_mut().zip(weights).for_each(|(s, a)| *s = a * (*s - along));
        // The query's.
        let (head_of, tail) = out.split_at_mut(record.of_embedded);
        let (of_embedded, tail) = tail.split_at_mut(dim);
        for (cell, score) in head_of[..cells].iter().enumerate() {
            if let Some(other) = self.sizes.in_window(token, cell) {
                add(of_embedded, *score, self.key.row((batch * tokens + other) * heads + head, dim));
            }
        }
        for (m, score) in head_of[cells..seen].iter().enumerate() {
            add(of_embedded, *score, self.pooled_key.row(self.sizes.pooled_row(batch, m, head), dim));
        }
        let query = self.query.row(row, dim);
        let embedding = &self.given.query_embedding[head * dim..][..dim];
        tail[record.of_scale - record.of_query] = dot(of_embedded, query) + dot(of_embedded, embedding);
        let scale = self.given.query_scale[token * heads + head];
        of_embedded.iter_mut().for_each(|g| *g *= scale);
        let of_query = &mut tail[..dim];
        let of_factors = &head_of[record.of_factors..][..cells];
        for (d, (out, g)) in of_query.iter_mut().zip(&*of_embedded).enumerate() {
            *out = g + dot(of_factors, &self.given.learnable_tokens[(head * dim + d) * cells..][..cells]);
        }
        self.query.back(row, of_query);
    }
}
