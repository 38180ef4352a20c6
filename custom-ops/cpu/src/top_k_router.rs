//! TopKRouter on a CPU. A tile has one token per vector lane, so that no operation crosses lanes.

use crate::host::{Host, Scratch};
use crate::isa::{Isa, Job};
use crate::kernel::{self, CpuOperator, Work};
use crate::workers::{Shared, share};
use moh_operators::top_k_router::{Heads, Kind, Problem};
use moh_operators::{Element, Error, TopKRouter};
use std::ops::Range;

/// Scores per work item: enough to be worth a thread.
const NUMBERS: usize = 1 << 14;
/// Up to this many scores, ranks are computed by comparing every pair; beyond, by partial sorting.
const PAIRS: usize = 64;

impl CpuOperator for TopKRouter {
    type Output<T: Element> = f32;

    fn run<I: Isa, T: Element>(call: kernel::Call<'_, Self, I, T>) -> Result<Work, Error> {
        route(call.isa, call.problem, call.inputs.scores, call.output, call.host)
    }
}

fn route<I: Isa, T: Element>(
    isa: I,
    problem: &Problem,
    scores: &[T],
    gates: &mut [f32],
    host: &dyn Host,
) -> Result<Work, Error> {
    let (width, num_heads) = (problem.width, problem.heads.count());
    let tokens = (NUMBERS / width.max(1)).next_multiple_of(I::LANES).max(I::LANES);
    let gates = Shared(gates.as_mut_ptr());
    let columns = Columns::new(&problem.heads);
    let work = |memory: &mut Scratch<'_>, item: usize| {
        let tokens = item * tokens..((item + 1) * tokens).min(problem.tokens);
        let scores = &scores[tokens.start * width..tokens.end * width];
        // SAFETY: there are num_heads gates for every token, and no token is in two items.
        let gates = unsafe { gates.slice(tokens.start * num_heads, tokens.len() * num_heads) };
        isa.vectorize(Rows { problem, columns: &columns, scores, gates, memory: memory.as_mut_slice() });
        0
    };
    // A tile's scores and ranks, and a buffer to sort one token's scores.
    let make = || Scratch::new::<f32>(host, columns.count * 2 * I::LANES + 2 * columns.routed.len());
    share(host, problem.tokens.div_ceil(tokens), make, work)?;
    Ok(Work::default())
}

/// Column ranges of the parts in a tile: as in the input scores, except that [`Kind::QueryNorms`] has one column per
/// routed head.
struct Columns {
    routed: Range<usize>,
    balance: Range<usize>,
    shared: Range<usize>,
    count: usize,
}

impl Columns {
    fn new(heads: &Heads) -> Columns {
        let (balance, shared) = (heads.balance_columns(), heads.shared_columns());
        let routed = match heads.kind {
            Kind::QueryNorms => 0..heads.routed.len(),
            _ => heads.routed_columns(),
        };
        Columns { count: routed.end.max(shared.end), routed, balance, shared }
    }
}

/// The tokens of a work item.
struct Rows<'a, T> {
    problem: &'a Problem,
    columns: &'a Columns,
    scores: &'a [T],
    gates: &'a mut [f32],
    memory: &'a mut [f32],
}

impl<T: Element> Job for Rows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Rows { problem, columns, scores, gates, memory } = self;
        let (width, num_heads) = (problem.width, problem.heads.count());
        let (values, memory) = memory.split_at_mut(columns.count * I::LANES);
        let (ranks, order) = memory.split_at_mut(columns.count * I::LANES);
        for (scores, gates) in scores.chunks(width * I::LANES).zip(gates.chunks_mut(num_heads * I::LANES)) {
            let mut tile = Tile { isa, heads: &problem.heads, columns, values, ranks };
            match problem.heads.kind {
                Kind::QueryNorms => tile.norms(scores, problem.head_dim()),
                _ => tile.load(scores, width),
            }
            tile.rank(order);
            tile.weigh();
            tile.store(gates);
        }
    }
}

/// One token per vector lane: column c of lane l is element `c * LANES + l`.
struct Tile<'a, I> {
    isa: I,
    heads: &'a Heads,
    columns: &'a Columns,
    values: &'a mut [f32],
    /// For each routed column, the number of columns that precede it in the order of selection.
    ranks: &'a mut [f32],
}

impl<I: Isa> Tile<'_, I> {
    #[inline(always)]
    fn column(&self, column: usize) -> I::V {
        let values = &self.values[column * I::LANES..][..I::LANES];
        // SAFETY: LANES floats.
        unsafe { self.isa.load(values.as_ptr()) }
    }

    #[inline(always)]
    fn set(&mut self, column: usize, x: I::V) {
        let values = &mut self.values[column * I::LANES..][..I::LANES];
        // SAFETY: LANES floats.
        unsafe { self.isa.store(values.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load<T: Element>(&mut self, scores: &[T], width: usize) {
        for (lane, row) in scores.chunks_exact(width).enumerate() {
            for (x, value) in row.iter().zip(self.values[lane..].iter_mut().step_by(I::LANES)) {
                *value = x.to_f32();
            }
        }
    }

    /// Computes the squared norms of the routed heads' queries.
    #[inline(always)]
    fn norms<T: Element>(&mut self, queries: &[T], dim: usize) {
        let isa = self.isa;
        let whole = dim / I::LANES * I::LANES;
        for (lane, row) in queries.chunks_exact(dim * self.heads.count()).enumerate() {
            for (column, &head) in self.heads.routed.iter().enumerate() {
                let query = &row[head * dim..][..dim];
                let mut sum = isa.splat(0.0);
                for part in query[..whole].chunks_exact(I::LANES) {
                    // SAFETY: LANES elements.
                    let x = unsafe { isa.widen(part.as_ptr()) };
                    sum = isa.fma(x, x, sum);
                }
                // SAFETY: fewer than LANES elements are left.
                let x = unsafe { isa.widen_part(query[whole..].as_ptr(), dim - whole) };
                self.values[column * I::LANES + lane] = isa.sum(isa.fma(x, x, sum));
            }
        }
    }

    #[inline(always)]
    fn rank(&mut self, order: &mut [f32]) {
        let routed = self.columns.routed.len();
        self.ranks.fill(0.0);
        // All or none are selected, whatever the ranks.
        if self.heads.top_k == 0 || self.heads.top_k == routed {
            return;
        }
        match routed {
            ..=PAIRS => self.compare_pairs(),
            _ => (0..I::LANES).for_each(|lane| self.sort(lane, order)),
        }
    }

    /// The lower column precedes the higher one unless its score is less.
    #[inline(always)]
    fn compare_pairs(&mut self) {
        let (isa, routed) = (self.isa, self.columns.routed.len());
        let (one, lowest) = (isa.splat(1.0), isa.splat(f32::NEG_INFINITY));
        for second in 0..routed {
            let score = isa.max(self.column(second), lowest);
            let mut rank = isa.splat(second as f32);
            for first in 0..second {
                let less = isa.finite_max(isa.keep_less(isa.max(self.column(first), lowest), score, one));
                rank = isa.sub(rank, less);
                let ranks = &mut self.ranks[first * I::LANES..][..I::LANES];
                // SAFETY: LANES floats.
                unsafe { isa.store(ranks.as_mut_ptr(), isa.add(isa.load(ranks.as_ptr()), less)) }
            }
            let ranks = &mut self.ranks[second * I::LANES..][..I::LANES];
            // SAFETY: LANES floats.
            unsafe { isa.store(ranks.as_mut_ptr(), rank) }
        }
    }

    /// Sets ranks to 0 for the selected columns and to `top_k` for the others. `order` has room for two floats per
    /// column.
    #[inline(always)]
    fn sort(&mut self, lane: usize, order: &mut [f32]) {
        let top_k = self.heads.top_k;
        let (pairs, _) = order.as_chunks_mut::<2>();
        for (column, pair) in pairs.iter_mut().enumerate() {
            let score = self.values[column * I::LANES + lane];
            *pair = [if score.is_nan() { f32::NEG_INFINITY } else { score }, f32::from_bits(column as u32)];
        }
        let first = |a: &[f32; 2], b: &[f32; 2]| {
            let scores = b[0].partial_cmp(&a[0]).unwrap_or(std::cmp::Ordering::Equal);
            scores.then(a[1].to_bits().cmp(&b[1].to_bits()))
        };
        if top_k < pairs.len() {
            pairs.select_nth_unstable_by(top_k, first);
        }
        for pair in pairs.iter().skip(top_k) {
            self.ranks[pair[1].to_bits() as usize * I::LANES + lane] = top_k as f32;
        }
    }

    /// Converts scores to gates. Columns of routed heads that are not selected hold meaningless values.
    #[inline(always)]
    fn weigh(&mut self) {
        let (isa, columns) = (self.isa, self.columns);
        let (shared, top_k) = (self.heads.shared.len() as f32, self.heads.top_k as f32);
        let (mut of_shared, mut of_routed) = (isa.splat(shared), isa.splat(top_k));
        match self.heads.kind {
            Kind::TwoStage => {}
            Kind::Probabilities | Kind::Renormalized => of_routed = isa.splat(1.0),
            Kind::QueryNorms => return self.values.fill(1.0),
        }
        let first = columns.balance.start;
        if !columns.balance.is_empty() {
            self.softmax(columns.balance.clone(), isa.splat(2.0), None);
            of_shared = isa.mul(of_shared, self.column(first));
            of_routed = isa.mul(of_routed, self.column(first + 1));
            if columns.shared.is_empty() {
                // A single shared head has no column; its gate is stored in the first balance column.
                self.set(first, of_shared);
            }
        }
        let selected = (self.heads.kind != Kind::Probabilities).then(|| isa.splat(top_k));
        self.softmax(columns.routed.clone(), of_routed, selected);
        self.softmax(columns.shared.clone(), of_shared, None);
    }

    /// Replaces the columns, or those whose rank is less than `below`, by `factor` times their softmax.
    #[inline(always)]
    fn softmax(&mut self, columns: Range<usize>, factor: I::V, below: Option<I::V>) {
        let isa = self.isa;
        let lowest = isa.splat(f32::NEG_INFINITY);
        if let Some(below) = below {
            for column in columns.clone() {
                // SAFETY: LANES floats.
                let rank = unsafe { isa.load(self.ranks[column * I::LANES..][..I::LANES].as_ptr()) };
                self.set(column, isa.keep_less(rank, below, self.column(column)));
            }
        }
        let mut max = lowest;
        for column in columns.clone() {
            max = isa.max(self.column(column), max);
        }
        let (log2_e, mut sum) = (isa.splat(std::f32::consts::LOG2_E), isa.splat(0.0));
        for column in columns.clone() {
            let power = isa.exp2(isa.mul(isa.sub(self.column(column), max), log2_e));
            sum = isa.add(sum, power);
            self.set(column, power);
        }
        let factor = isa.div(factor, sum);
        for column in columns {
            self.set(column, isa.mul(self.column(column), factor));
        }
    }

    #[inline(always)]
    fn store(&self, gates: &mut [f32]) {
        let (heads, columns) = (self.heads, self.columns);
        let top_k = heads.top_k as f32;
        // With one shared head, its gate is in the first balance column.
        let shared = if columns.shared.is_empty() { columns.balance.start } else { columns.shared.start };
        for (lane, row) in gates.chunks_exact_mut(heads.count()).enumerate() {
            match heads.kind {
                Kind::QueryNorms => heads.shared.iter().for_each(|&head| row[head] = 1.0),
                _ => {
                    for (column, &head) in (shared..).zip(&heads.shared) {
                        row[head] = self.values[column * I::LANES + lane];
                    }
                }
            }
            if heads.top_k == 0 {
                heads.routed.iter().for_each(|&head| row[head] = 0.0);
                continue;
            }
            for (column, &head) in heads.routed.iter().enumerate() {
                let at = column * I::LANES + lane;
                row[head] = if self.ranks[at] < top_k { self.values[at] } else { 0.0 };
            }
        }
    }
}
