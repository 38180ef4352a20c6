//! Products of rows with the matrices of their heads, used by RoutedProjection, RoutedCombine and RoutedMLP:
//! `kernels/linear*.cu`, `kernels/combine*.cu` and `kernels/expert_products_sm90.cu`.

mod hopper;

use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::LinearParams;
use crate::plan::{self, Lists, int};
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::routed_mlp::Activation;
use moh_operators::{DType, Error, routed_combine};
use std::ffi::CString;

/// The activation for which two columns of the weight make one output column.
const PAIRS: i32 = Activation::SwiGlu as i32;

/// A product of rows with the matrices of their heads.
pub(crate) struct Product {
    /// Parameters, except the plan and those that depend on the chosen kernel.
    pub(crate) params: LinearParams,
    /// The element type T.
    pub(crate) dtype: DType,
    /// Whether the weight has layout 1.
    pub(crate) per_head: bool,
}

impl Product {
    /// Whether all 16-byte chunks are aligned.
    fn is_aligned(&self) -> bool {
        let p = &self.params;
        let size = self.size() as i64;
        let (depth, columns) = (i64::from(p.depth), i64::from(p.columns));
        let strides = [p.x_row, p.x_head, p.weight_row, p.weight_head, p.output_row, p.output_head, depth, columns];
        [p.x, p.weight, p.output].iter().all(|ptr| ptr.is_multiple_of(16)) && strides.iter().all(|n| n * size % 16 == 0)
    }

    fn size(&self) -> usize {
        if self.dtype == DType::F32 { 4 } else { 2 }
    }

    /// A kernel's name: `moh_<operation>_<type>_<layout>_<variant>`.
    fn name(&self, operation: &str, variant: &str) -> CString {
        let (dtype, layout) = (self.type_name(), u8::from(self.per_head));
        CString::new(format!("moh_{operation}_{dtype}_{layout}_{variant}")).unwrap_or_default()
    }

    fn type_name(&self) -> &'static str {
        match self.dtype {
            DType::F32 => "float",
            DType::F16 => "f16",
            _ => "bf16",
        }
    }
}

/// A call of RoutedProjection or RoutedCombine, or of one whose weight has been dequantised.
pub(crate) struct Linear<'c> {
    pub(crate) problem: routed_combine::Problem,
    pub(crate) x: RawPtr,
    pub(crate) weight: RawPtr,
    pub(crate) gates: RawPtr,
    /// Null if there is none.
    pub(crate) bias: RawPtr,
    pub(crate) output: RawPtr,
    pub(crate) dtype: DType,
    pub(crate) stream: &'c Stream<'c>,
    pub(crate) workspace: &'c dyn Workspace,
}

/// Output rows and columns per thread block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    rows: usize,
    columns: usize,
}

/// Up to this many tokens, the time is dominated by reading the weights.
const FEW: usize = 32;

impl Tile {
    /// The tile for up to [`FEW`] tokens.
    const FEW: Tile = Tile { rows: FEW, columns: 32 };

    /// Bytes of shared memory for the copy stages of `kernels/tile.cuh`: 128 bytes per row of either operand.
    fn stage_bytes(self) -> usize {
        let stages = if self == Tile::FEW { 8 } else { 3 };
        stages * (self.rows + self.columns) * 128
    }
}

/// Launches a projection on the stream. Returns the lists of the heads' tokens, which stay valid for the call.
///
/// # Safety
/// The parameters describe device memory that stays valid and unchanged until the kernels have run.
pub(crate) unsafe fn projection(
    product: &Product,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<Lists, Error> {
    let p = &product.params;
    let (tokens, heads) = (p.tokens as usize, p.heads as usize);
    // SAFETY: (tokens, heads) gates, by the caller's contract.
    let lists = unsafe { plan::lists(p.gates, tokens, heads, stream, workspace)? };
    let params = LinearParams { counts: lists.counts, entries: lists.entries, dense_percent: NEVER, ..*p };
    // SAFETY: as above.
    unsafe { project(product, &params, stream)? };
    Ok(lists)
}

/// Launches a projection on the stream in which every token uses all heads: gates and lists are null.
///
/// # Safety
/// As [`projection`].
pub(crate) unsafe fn dense(product: &Product, stream: &Stream<'_>) -> Result<(), Error> {
    // SAFETY: the caller's contract.
    unsafe { project(product, &product.params, stream) }
}

/// Launches a projection on the stream; the lists of `params` have been made, if there are gates.
///
/// # Safety
/// As [`projection`].
unsafe fn project(product: &Product, params: &LinearParams, stream: &Stream<'_>) -> Result<(), Error> {
    let p = &product.params;
    let (tokens, heads, columns) = (p.tokens as usize, p.heads as usize, p.columns as usize);
    let shared = stream.properties().shared_bytes as usize;
    let aligned = product.is_aligned();
    if !aligned || product.dtype == DType::F32 || tokens <= FEW {
        let (tile, variant) = match tokens {
            _ if !aligned => (Tile { rows: 64, columns: 64 }, "any"),
            ..=FEW => (Tile::FEW, "32x32"),
            _ => (Tile { rows: 128, columns: 64 }, "128x64"),
        };
        // SAFETY: as above; dense tiles need aligned tensors.
        return unsafe { launch_projection(product, tile, variant, params, stream) };
    }

    if hopper::fits(product, stream) {
        // SAFETY: as above.
        return unsafe { hopper::project(product, params, stream) };
    }
    let pairs = if p.activation == PAIRS { 2 } else { 1 };
    // Percentage of a tile's columns that are used. Narrow tiles reread x more often and take a third more time, hence
    // the factor.
    let used = |width: usize, columns: usize| 100 * columns / (columns.div_ceil(width / pairs) * width / pairs);
    let (narrow, wide) = (used(64, columns) * 3 / 4, used(128, columns));
    let width = if wide >= narrow { 128 } else { 64 };
    let tall = |width: usize, tiles: usize| {
        width == 128 && shared >= 150 << 10 && tiles >= stream.properties().multiprocessors as usize
    };
    let gathered = Tile { rows: if tall(width, tokens / 2048 * heads) { 256 } else { 128 }, columns: width };
    let dense_tiles = tokens.div_ceil(256) * (heads * columns).div_ceil(128);
    let dense = Tile { rows: if tall(128, dense_tiles) { 256 } else { 128 }, columns: 128 };
    // Percentage of heads from which on computing all heads is faster.
    let dense_percent = if p.write_zeros != 0 { wide.max(narrow).min(95) as i32 } else { NEVER };
    let params = LinearParams { dense_percent, ..*params };
    let named = |tile: Tile| format!("{}x{}", tile.rows, tile.columns);
    // SAFETY: as above.
    unsafe {
        if params.gates == 0 {
            return launch_projection(product, dense, &named(dense), &params, stream);
        }
        if gathered == dense || dense_percent == NEVER {
            return launch_projection(product, gathered, &named(gathered), &params, stream);
        }
        launch_projection(product, gathered, &named(gathered), &LinearParams { only: 1, ..params }, stream)?;
        launch_projection(product, dense, &named(dense), &LinearParams { only: 2, ..params }, stream)
    }
}

/// Above 100 %: only the heads that are on are computed.
const NEVER: i32 = 101;

unsafe fn launch_projection(
    product: &Product,
    tile: Tile,
    variant: &str,
    params: &LinearParams,
    stream: &Stream<'_>,
) -> Result<(), Error> {
    let p = &product.params;
    let properties = stream.properties();
    let shared = tile.stage_bytes() + tile.rows * 4;
    let (tokens, heads, columns) = (p.tokens as usize, p.heads as usize, p.columns as usize);
    let width = if p.activation == PAIRS { tile.columns / 2 } else { tile.columns };
    let tiles = tokens.div_ceil(tile.rows) * (heads * columns.div_ceil(width) + 1);
    // Persistent blocks: as many as are resident, by shared memory and registers.
    let resident = (properties.shared_bytes as usize / shared).clamp(1, if tile.rows == 256 { 1 } else { 3 });
    let blocks = tiles.min(properties.multiprocessors as usize * resident);
    let name = product.name("projection", variant);
    let kernel = Kernel { module: modules::LINEAR, name: &name };
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, [blocks as u32, 1, 1], tile.rows as u32, shared as u32, params) }
}

/// Launches a combination on the stream.
///
/// # Safety
/// The parameters describe device memory that stays valid and unchanged until the kernels have run.
pub(crate) unsafe fn combination(
    product: &Product,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<(), Error> {
    let p = &product.params;
    let (tokens, columns) = (p.tokens as usize, p.columns as usize);
    let properties = stream.properties();
    let aligned = product.is_aligned();
    // Of a matrix of 16 bits in layout 0 there is no such kernel: `nbits.cu` takes it, or else those of more tokens do.
    let few_bytes = dense_bytes(product, Tile::FEW, true);
    let is_few = tokens <= FEW && few_bytes <= properties.shared_bytes as usize;
    if aligned && is_few && p.scale_by_gates == 0 && (product.per_head || product.dtype == DType::F32) {
        let name = product.name("combine_dense", "32");
        let kernel = Kernel { module: modules::COMBINE, name: &name };
        let column_blocks = columns.div_ceil(Tile::FEW.columns);
        let grid = combination_grid(column_blocks, 1, 1)?;
        let params = LinearParams { only: 2, column_blocks: column_blocks as i32, ..*p };
        // SAFETY: the caller's contract.
        return unsafe { stream.launch(kernel, grid, FEW as u32, few_bytes as u32, &params) };
    }
    let fits = |rows: usize| {
        let shared = routed_bytes(rows).max(dense_bytes(product, Tile { rows, columns: 128 }, aligned));
        shared <= properties.shared_bytes as usize
    };
    let column_tiles = columns.div_ceil(ROUTED_COLUMNS);
    let fills = |rows: usize| tokens.div_ceil(rows) * column_tiles >= properties.multiprocessors as usize;
    let half = product.dtype != DType::F32;
    let hopper = aligned && p.only != 1 && hopper::fits(product, stream);
    let params = LinearParams { routed_cost: if hopper { hopper::ROUTED_COST } else { ROUTED_COST }, ..*p };
    let params = match hopper && hopper::can_be_one_product(product, stream) {
        // SAFETY: the caller's contract.
        true => unsafe { hopper::one_product(product, &params, stream, workspace)? },
        false => params,
    };
    let rows = match () {
        () if !aligned || !half => 64,
        () if hopper => {
            let heights: Vec<usize> = [256, 128, 64].into_iter().filter(|&rows| fits(rows)).collect();
            hopper::height(&heights, tokens, column_tiles, hopper::WIDE, stream)
        }
        () if tokens > 128 && fits(256) && fills(256) => 256,
        () if tokens > 64 && fits(128) => 128,
        () => 64,
    };
    let dense = Tile { rows, columns: if rows == 64 { 64 } else { 128 } };
    // Of a long inner dimension, the dense kernel's lists exceed shared memory: the routed one then computes all tiles.
    let dense_fits = hopper || dense_bytes(product, dense, aligned) <= properties.shared_bytes as usize;
    let only = if p.only == 0 && !dense_fits { 1 } else { p.only };
    let variant = if aligned { rows.to_string() } else { "any".to_owned() };
    let tiles = column_tiles * tokens.div_ceil(rows);
    let multiprocessors = properties.multiprocessors as usize;
    let (mut part_depth, mut parts) = match p.only {
        1 => parts(p.depth as usize, tiles, multiprocessors),
        _ => (p.depth as usize, 1),
    };
    let mut capacity = 0;
    if aligned && hopper::fits(product, stream) && hopper::experts::fits(product, rows, parts, multiprocessors) {
        // SAFETY: the caller's contract.
        capacity = unsafe { hopper::experts::multiply(product, stream, workspace)? };
        if capacity == tokens * p.heads as usize {
            return Ok(());
        }
        // Computes the output if more pairs are on.
        (part_depth, parts) = (p.depth as usize, 1);
    }
    let partial = if parts > 1 { workspace.allocate(parts * tokens * columns * 4)? } else { 0 };
    let params = LinearParams {
        partial,
        part_depth: part_depth as i32,
        parts: parts as i32,
        capacity: int(capacity)?,
        only,
        ..params
    };
    let row_tiles = tokens.div_ceil(rows);
    let launch = |operation: &str, blocks: usize, threads: usize, shared: usize| {
        let name = product.name(operation, &variant);
        let kernel = Kernel { module: modules::COMBINE, name: &name };
        let grid = combination_grid(blocks, row_tiles, parts)?;
        let params = LinearParams { column_blocks: blocks as i32, ..params };
        // SAFETY: the caller's contract.
        unsafe { stream.launch(kernel, grid, threads as u32, shared as u32, &params) }
    };
    // Every block reads its tokens' gates before it knows whether this kernel is the chosen one, so two blocks per
    // multiprocessor suffice.
    let few = match (only != 1 || capacity > 0) && rows > 64 {
        true => (2 * multiprocessors).div_ceil(row_tiles),
        false => usize::MAX,
    };
    launch("combine_routed", column_tiles.min(few.max(1)), 256, routed_bytes(rows))?;
    if parts > 1 {
        let name = CString::new(format!("moh_combine_sum_{}", product.type_name())).unwrap_or_default();
        let kernel = Kernel { module: modules::COMBINE, name: &name };
        let blocks = int((tokens * columns).div_ceil(SUM_THREADS))? as u32;
        // SAFETY: the caller's contract; the partial sums are in the workspace.
        unsafe { stream.launch(kernel, [blocks, 1, 1], SUM_THREADS as u32, 0, &params)? };
    }
    if only == 1 {
        return Ok(());
    }
    if hopper {
        // SAFETY: the caller's contract.
        return unsafe { hopper::combine(product, &params, rows, stream) };
    }
    launch("combine_dense", columns.div_ceil(dense.columns), rows, dense_bytes(product, dense, aligned))
}

/// The grid of a combination: `column_blocks` blocks for each tile of rows. Rows are not along y, which has at most
/// 65,535 blocks.
fn combination_grid(column_blocks: usize, row_tiles: usize, parts: usize) -> Result<[u32; 3], Error> {
    Ok([int(column_blocks * row_tiles)?.unsigned_abs(), 1, int(parts)?.unsigned_abs()])
}

const ROUTED_COLUMNS: usize = 128;
const SUM_THREADS: usize = 256;
/// Minimum inner length of a partial sum: writing and reading it costs about as much as 64 inner elements.
const PART_DEPTH: usize = 256;
/// Cost of a product in the routed kernel, in percent of one in the dense kernel.
const ROUTED_COST: i32 = 125;

/// How to split the inner dimension if there are fewer tiles than multiprocessors: the length of a part (a multiple of
/// the kernels' steps) and the number of parts.
fn parts(depth: usize, tiles: usize, multiprocessors: usize) -> (usize, usize) {
    let parts = (multiprocessors / tiles.max(1)).min(depth / PART_DEPTH);
    if parts < 2 {
        return (depth, 1);
    }
    let part = depth.div_ceil(parts).next_multiple_of(64);
    (part, depth.div_ceil(part))
}

/// Shared memory of `combine_routed`: stages, sums, and the rows of 32 heads as bits, counts and lists.
fn routed_bytes(rows: usize) -> usize {
    let stages = if rows == 64 { 3 } else { 4 };
    stages * (16 << 10) + rows * (ROUTED_COLUMNS + 8) * 4 + 32 * (rows / 32 * 4 + 4 + rows)
}

/// Shared memory of `combine_dense`: stages, steps, 8 integers, the heads' rows as bits, and the head of each inner
/// element or chunk.
fn dense_bytes(product: &Product, tile: Tile, aligned: bool) -> usize {
    let p = &product.params;
    let depth = 128 / product.size();
    let steps = (p.heads as usize * p.depth as usize).div_ceil(depth);
    let granules = if aligned { 8 } else { depth };
    let bits = (p.heads as usize).next_multiple_of(32) * (tile.rows / 32) * 4;
    tile.stage_bytes() + steps * 4 + 32 + bits + steps * granules * 2
}

impl LinearParams {
    /// All fields 0 or null, to be filled in.
    pub(crate) const NONE: LinearParams = LinearParams {
        x: 0,
        weight: 0,
        bias: 0,
        gates: 0,
        output: 0,
        counts: 0,
        entries: 0,
        partial: 0,
        positions: 0,
        checked: 0,
        x_row: 0,
        weight_row: 0,
        output_row: 0,
        x_head: 0,
        weight_head: 0,
        output_head: 0,
        bias_head: 0,
        tokens: 0,
        heads: 0,
        depth: 0,
        columns: 0,
        activation: -1,
        dense_percent: NEVER,
        only: 0,
        write_zeros: 0,
        scale_by_gates: 0,
        routed_cost: ROUTED_COST,
        column_blocks: 1,
        part_depth: 0,
        parts: 1,
        capacity: 0,
        checks: 0,
        least_on: 0,
    };
}

#[cfg(test)]
mod tests {
    use super::{combination_grid, parts};

    /// With rows along y, 65,536 tiles of rows (4.2 million tokens) were too many.
    #[test]
    fn grids_of_many_tokens_are_within_the_limits() {
        let grid = |column_blocks, row_tiles| combination_grid(column_blocks, row_tiles, 3).ok();
        assert_eq!(grid(2, 100), Some([200, 1, 3]));
        assert_eq!(grid(9, 5_000_000), Some([45_000_000, 1, 3]));
        assert_eq!(grid(255, 1 << 23), Some([255 << 23, 1, 3]));
        assert_eq!(grid(256, 1 << 23), None);
    }

    #[test]
    fn inner_dimension_is_split_when_there_are_few_tiles() {
        assert_eq!(parts(2048, 8, 132), (256, 8));
        assert_eq!(parts(2048, 100, 132), (2048, 1));
        assert_eq!(parts(200, 1, 132), (200, 1));
        assert_eq!(parts(1000, 1, 4), (384, 3));
    }
}
