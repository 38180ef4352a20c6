//! RoutedProjection and RoutedCombine on a matrix unit. A worker splits the rows of the tokens that use a head itself: other heads have
//! other rows. Where it has many heads it splits all rows once, and copies those of a head.

use super::{HeadLinear, Tensors};
use crate::epilogue::OfRow;
use crate::gemm::Matrix;
use crate::host::{Host, Unwritten};
use crate::isa::unit::TILE;
use crate::isa::{Isa, MatrixUnit};
use crate::matrix::{self, Left, PackRows, Parts, Product, ROWS, Right, WIDTH, Worker, with_parts};
use crate::packed::Packed;
use crate::selection::{Run, Selection};
use crate::settings::Precision;
use crate::terms::{terms_at, unit_for};
use crate::workers::{Shared, share};
use moh_operators::routed_projection::Problem;
use moh_operators::{Element, Error, Float};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens from which splitting weights and rows into parts takes less time than the products save, unless weights are packed: of a call, and of each head on
/// average, those that no token of a chunk uses apart.
const TOKENS: usize = 64;
const TOKENS_OF_HEAD: usize = 32;
/// What an item takes besides its columns, in blocks of them: the same rows are split, or copied, again in each.
const FIXED: f32 = 0.8;
/// How often rows are split at least, for each worker, if all of a chunk are split at once and copied.
const SPLIT_ALL: f32 = 1.5;
/// Tokens of an item at least, if fewer than a chunk's are taken for want of items.
const LEAST_TOKENS: usize = 64;

/// Computes the output of `O`; `None` where vectors do it better, or where an element is not finite, and may have to be by the
/// definition: an infinity is no sum of several terms.
pub(crate) fn run<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    unit: MatrixUnit,
    problem: &Problem,
    tensors: &Tensors<'_, T>,
    output: Shared<T>,
    host: &dyn Host,
) -> Result<Option<u64>, Error> {
    let Some(weight) = tensors.weight.plain() else { return Ok(None) };
    let Some(unit) = unit_for::<T>(Some(unit), host.precision()) else { return Ok(None) };
    if problem.tokens == 0 || problem.width == 0 || problem.block == 0 {
        return Ok(None);
    }
    let chunk = problem.tokens.div_ceil(problem.tokens.div_ceil(ROWS));
    let selection = &Selection::new(tensors.gates, problem.num_heads, chunk)?;
    let lists = (0..problem.tokens.div_ceil(chunk))
        .flat_map(|chunk| (0..problem.num_heads).map(move |head| selection.tokens(chunk, head).len()));
    let (used, heads) = lists.filter(|&len| len > 0).fold((0, 0), |(used, heads), len| (used + len, heads + 1));
    let is_for_few = with_parts!(T, host.precision(), |P| {
        tensors.weight.blocks::<P>(O::size(problem)).is_some() && matrix::is_for_few::<T, P>(unit)
    });
    if !is_for_few && (problem.tokens < TOKENS || used < TOKENS_OF_HEAD * heads) {
        return Ok(None);
    }
    // A projection's numbers do not depend on what is multiplied together.
    let items = problem.tokens.div_ceil(chunk) * (problem.num_heads * problem.block).div_ceil(WIDTH);
    let (chunk, selection) = match (host.parallelism() * 2).div_ceil(items) {
        parts @ 2.. if O::HEADS == Heads::Columns => {
            let chunk = chunk.div_ceil(parts).next_multiple_of(2 * TILE).max(LEAST_TOKENS).min(chunk);
            (chunk, &Selection::new(tensors.gates, problem.num_heads, chunk)?)
        }
        _ => (chunk, selection),
    };
    let matrix = O::matrix(problem, weight);
    with_parts!(T, host.precision(), |P| {
        let [inner, columns] = O::size(problem);
        let weight = &match tensors.weight.blocks::<P>([inner, columns]) {
            Some(start) => Right::Blocks { start, inner },
            None => Right::Matrix(&matrix),
        };
        let finite = AtomicBool::new(true);
        let call = Call { isa, unit, problem, tensors, weight, selection, chunk, output, finite };
        let macs = call.share::<P, O>(host)?;
        Ok(call.finite.into_inner().then_some(macs))
    })
}

/// Packs the weight beside the tensor, unless a head's numbers would have far fewer bits than by themselves: see [`alike`].
pub(super) fn pack<I: Isa, T: Element, O: HeadLinear>(
    isa: I,
    problem: &Problem,
    shape: &[usize],
    weight: &[T],
    precision: Precision,
) -> Result<Option<Packed>, Error> {
    let (size, matrix) = (O::size(problem), O::matrix(problem, weight));
    let of_digits = T::FLOAT == Float::F32 && terms_at(precision, T::FLOAT) > 1;
    if O::HEADS == Heads::Inner
        && of_digits
        && !with_parts!(T, precision, |P| alike::<T, P>(&matrix, size, problem.block))
    {
        return Ok(None);
    }
    // SAFETY: the weight's length has been checked against its shape, from which `problem` was made.
    with_parts!(T, precision, |P| unsafe { Packed::in_parts::<I, T, P>(isa, &matrix, size, shape) })
}

/// Whether heads, ranges of `block` inner indices, that share a block of the packed weight, and so a column's scale, have numbers alike: a head must not be
/// rounded by what another one has, which a token may not use. Of 24 bits a head may lose 8, of 16 bits 4.
fn alike<T: Element, P: Parts>(weight: &Matrix<T>, [inner, columns]: [usize; 2], block: usize) -> bool {
    let depth = matrix::depth::<P>(inner) * P::INNER;
    let times = if P::COUNT > 2 { 256.0 } else { 16.0 };
    let largest = |inner: Range<usize>, column: usize| {
        // SAFETY: the weight has these inner indices and columns.
        let at = |i: usize| unsafe { weight.at(i, &(column..column + 1)).read() };
        inner.map(|i| at(i).to_f32().abs()).fold(0.0, f32::max)
    };
    (0..columns).all(|column| {
        (0..inner).step_by(depth).all(|start| {
            let end = inner.min(start + depth);
            let heads = (start / block..end.div_ceil(block))
                .map(|head| largest((head * block).max(start)..((head + 1) * block).min(end), column))
                .filter(|&largest| largest > 0.0);
            let (least, most) = heads.fold((f32::INFINITY, 0.0f32), |(least, most), x| (least.min(x), most.max(x)));
            least * times >= most
        })
    })
}

/// What one of the two operators does on a matrix unit.
pub(crate) struct Call<'a, I, T> {
    isa: I,
    unit: MatrixUnit,
    problem: &'a Problem,
    tensors: &'a Tensors<'a, T>,
    weight: &'a Right<'a, T>,
    selection: &'a Selection,
    /// Tokens per chunk. RoutedCombine's are independent of the number of workers, because the rounding of its results depends on them.
    chunk: usize,
    output: Shared<T>,
    finite: AtomicBool,
}

/// Some columns of some heads for the tokens of a chunk.
pub(crate) struct Item {
    chunk: usize,
    /// Empty for RoutedCombine, which has all heads in every item.
    heads: Range<usize>,
    columns: Range<usize>,
}

/// Whether heads are blocks of columns, or ranges of the inner dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heads {
    Columns,
    Inner,
}

/// Tiles of all rows of a chunk, in parts `P`.
struct All<'h, P> {
    /// The chunk that has been split.
    chunk: Option<usize>,
    /// Whether any head uses a row.
    used: Vec<bool>,
    tiles: Unwritten<'h>,
    parts: PhantomData<P>,
}

impl<'h, P: Parts> All<'h, P> {
    /// For chunks of up to `rows` rows.
    fn new(rows: usize, width: usize, host: &'h dyn Host) -> Result<All<'h, P>, Error> {
        let floats = rows.div_ceil(TILE).saturating_mul(P::ROWS).saturating_mul(matrix::blocks::<P>(width));
        Ok(All {
            chunk: None,
            used: Vec::with_capacity(rows),
            tiles: Unwritten::new::<f32>(host, floats)?,
            parts: PhantomData,
        })
    }

    fn start(&self) -> *const f32 {
        self.tiles.as_mut_ptr::<f32>().cast_const()
    }
}

impl<I: Isa, T: Element> Call<'_, I, T> {
    fn share<P: Parts, O: HeadLinear>(&self, host: &dyn Host) -> Result<u64, Error> {
        let items = self.items(O::HEADS, host.parallelism());
        let with_lead = |item: &Item| self.weight.lead(&item.columns) + item.columns.len();
        let columns = items.iter().map(with_lead).max().unwrap_or(0);
        let splits_all = O::HEADS == Heads::Columns && self.splits_all(&items, host.parallelism());
        let make = || {
            let worker = Worker::<P>::new(self.unit, [self.chunk; 2], columns, host)?;
            let all = if splits_all { Some(All::<P>::new(self.chunk, self.problem.width, host)?) } else { None };
            Ok((worker, all, Vec::with_capacity(self.chunk)))
        };
        share(host, items.len(), make, |(worker, all, rows), item| match O::HEADS {
            Heads::Columns => self.project(&items[item], worker, all.as_mut(), rows),
            Heads::Inner => self.combine(&items[item], worker, rows),
        })
    }

    /// Whether workers split all rows that they need once, not those of each of their items.
    fn splits_all(&self, items: &[Item], workers: usize) -> bool {
        let used = items.iter().map(|item| self.selection.tokens(item.chunk, item.heads.start).len());
        used.sum::<usize>() as f32 > SPLIT_ALL * (workers.min(items.len()) * self.problem.tokens) as f32
    }

    /// The chunks' work items: together they have all columns.
    fn items(&self, heads: Heads, workers: usize) -> Vec<Item> {
        let p = self.problem;
        let chunks = p.tokens.div_ceil(self.chunk);
        let all = match heads {
            Heads::Columns => p.num_heads * p.block,
            Heads::Inner => p.width,
        };
        let span = matrix::span(all, self.chunk, chunks, workers, FIXED);
        let mut items = Vec::new();
        for chunk in 0..chunks {
            let mut cut = |heads: Range<usize>, columns: Range<usize>| {
                let spans = columns.len().div_ceil(span);
                let each = columns.len().div_ceil(spans).next_multiple_of(WIDTH);
                let first = columns.start - self.weight.lead(&columns);
                for start in (first..columns.end).step_by(each) {
                    let columns = start.max(columns.start)..(start + each).min(columns.end);
                    items.push(Item { chunk, heads: heads.clone(), columns });
                }
            };
            if heads == Heads::Inner {
                cut(0..0, 0..all);
                continue;
            }
            let is_apart = p.per_head() && matches!(self.weight, Right::Matrix(_));
            let mut first = 0;
            while first < p.num_heads {
                let (mut end, tokens) = (first + 1, self.selection.tokens(chunk, first));
                // Heads whose columns are apart are not joined.
                while !is_apart && end < p.num_heads && self.selection.tokens(chunk, end) == tokens {
                    end += 1;
                }
                cut(first..end, first * p.block..end * p.block);
                first = end;
            }
        }
        items
    }

    fn tokens(&self, item: &Item) -> Range<usize> {
        item.chunk * self.chunk..((item.chunk + 1) * self.chunk).min(self.problem.tokens)
    }

    /// The outputs of the item's columns from `token` on.
    fn place(&self, item: &Item, columns: usize, token: usize) -> *mut T {
        // SAFETY: the output has `columns` elements for every token.
        unsafe { { self.output }.0.add((self.tokens(item).start + token) * columns + item.columns.start) }
    }

    /// RoutedProjection: the heads' tokens are multiplied with their columns; those of other tokens are 0.
    fn project<P: Parts>(
        &self,
        item: &Item,
        worker: &Worker<'_, P>,
        all: Option<&mut All<'_, P>>,
        rows: &mut Vec<*const T>,
    ) -> u64 {
        let p = self.problem;
        let (columns, used) = (p.num_heads * p.block, self.selection.tokens(item.chunk, item.heads.start));
        let mut next = used.iter().copied().peekable();
        for token in 0..self.tokens(item).len() {
            if next.next_if_eq(&(token as u32)).is_none() {
                let place = self.place(item, columns, token);
                // SAFETY: these columns of this token belong to this item alone.
                unsafe { std::slice::from_raw_parts_mut(place, item.columns.len()) }.fill(T::from_f32(0.0));
            }
        }
        if used.is_empty() {
            return 0;
        }
        let left = match all {
            Some(all) => {
                let block = self.split_all(item, all);
                match used.len() == self.tokens(item).len() {
                    true => Left::Tiles { start: all.start(), block },
                    false => Left::Picked { start: all.start(), block, rows: used },
                }
            }
            None => {
                self.rows(item, p.width, used, rows);
                Left::Rows(rows)
            }
        };
        let product = Product {
            left,
            rows: used.len(),
            weight: self.weight,
            inner: 0..p.width,
            columns: item.columns.clone(),
            picked: None,
            add: false,
        };
        // SAFETY: x and the weight have `width` inner indices, the weight these columns; bf16 has one term.
        let macs = unsafe { worker.multiply(self.isa, &product) };
        let output = |row: usize| self.place(item, columns, used[row] as usize);
        // SAFETY: as said, and these columns of these tokens belong to this item alone.
        unsafe { self.store(worker, used.len(), item, output) };
        macs
    }

    /// Splits all rows of the item's chunk, unless they are. Returns the floats between blocks of inner indices.
    fn split_all<P: Parts>(&self, item: &Item, all: &mut All<'_, P>) -> usize {
        let (tokens, width) = (self.tokens(item), self.problem.width);
        let block = tokens.len().div_ceil(TILE) * P::ROWS;
        if all.chunk.replace(item.chunk) == Some(item.chunk) {
            return block;
        }
        // What no head reads may be anything.
        all.used.clear();
        all.used.resize(tokens.len(), false);
        let lists = (0..self.problem.num_heads).flat_map(|head| self.selection.tokens(item.chunk, head));
        lists.for_each(|&token| all.used[token as usize] = true);
        for (i, start) in tokens.clone().step_by(TILE).enumerate() {
            let is_finite = self.isa.vectorize(PackRows {
                rows: (tokens.end - start).min(TILE),
                input: |row: usize| match all.used[i * TILE + row] {
                    true => self.tensors.x[(start + row) * width..].as_ptr(),
                    false => std::ptr::null(),
                },
                width,
                lead: 0,
                block,
                // SAFETY: there is room for all tiles of a chunk.
                output: unsafe { all.tiles.as_mut_ptr::<f32>().add(i * P::ROWS) },
                parts: PhantomData::<P>,
            });
            self.finite.fetch_and(is_finite, Ordering::Relaxed);
        }
        block
    }

    /// RoutedCombine: sums over heads, each of which adds to its tokens.
    fn combine<P: Parts>(&self, item: &Item, worker: &Worker<'_, P>, rows: &mut Vec<*const T>) -> u64 {
        let p = self.problem;
        let tokens = self.tokens(item).len();
        let mut begun = false;
        let mut macs = 0;
        for Run { heads, tokens: used } in self.selection.runs(item.chunk, 0..p.num_heads) {
            let is_all = used.len() == tokens;
            if !begun && !is_all {
                worker.clear(tokens, self.weight.lead(&item.columns) + item.columns.len());
                begun = true;
            }
            self.rows(item, p.num_heads * p.block, used, rows);
            let product = Product {
                left: Left::Rows(rows),
                rows: used.len(),
                weight: self.weight,
                inner: heads.start * p.block..heads.end * p.block,
                columns: item.columns.clone(),
                picked: (!is_all).then_some(used),
                add: begun,
            };
            // SAFETY: x and the weight have all heads' inner indices, the weight these columns; bf16 has one term.
            macs += unsafe { worker.multiply(self.isa, &product) };
            begun = true;
        }
        if !begun {
            worker.clear(tokens, self.weight.lead(&item.columns) + item.columns.len());
        }
        let output = |row: usize| self.place(item, p.width, row);
        // SAFETY: these columns of these tokens belong to this item alone.
        unsafe { self.store(worker, tokens, item, output) };
        macs
    }

    /// Pointers to the rows of `used`, of `width` elements each.
    fn rows(&self, item: &Item, width: usize, used: &[u32], rows: &mut Vec<*const T>) {
        let start = self.tokens(item).start;
        rows.clear();
        rows.extend(used.iter().map(|&token| self.tensors.x[(start + token as usize) * width..].as_ptr()));
    }

    /// # Safety
    /// As [`Worker::store`], for the item's columns.
    unsafe fn store<P: Parts>(
        &self,
        worker: &Worker<'_, P>,
        rows: usize,
        item: &Item,
        output: impl Fn(usize) -> *mut T,
    ) {
        let bias = self.tensors.bias.map(|bias| bias[item.columns.clone()].as_ptr());
        // SAFETY: the caller's contract; the bias has these columns.
        unsafe {
            worker.store(
                self.isa,
                rows,
                (self.weight.lead(&item.columns), item.columns.len()),
                bias,
                |_| OfRow::Nothing,
                output,
            )
        };
        self.finite.fetch_and(worker.is_finite(), Ordering::Relaxed);
    }
}
