//! Launchers of `linear_sm90.cu` and `combine_sm90.cu`: f16 and bf16 on Hopper's tensor cores.

pub(super) mod experts;

use super::{NEVER, PAIRS, Product};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{LinearParams, LinearSm90Params};
use crate::plan::int;
use crate::stream::Stream;
use crate::tensor_map::Boxed;
use crate::workspace::Workspace;
use moh_operators::{DType, Error};
use std::ffi::CString;

const THREADS: u32 = 384;
/// Inner elements per step; also the columns of a panel of a layout-1 weight.
const DEPTH: usize = 64;
/// Tile heights. Units of 64 rows are assigned to two warpgroups round-robin.
const HEIGHTS: [usize; 4] = [256, 192, 128, 64];
/// Tile columns of dense projections, of combinations and of RoutedMLP. Projections with them run in clusters of
/// [`CLUSTER`] blocks.
pub(super) const WIDE: usize = 128;
/// Blocks that multiply a pair of tiles, and load once what both need.
const CLUSTER: usize = 2;
/// Tile columns of gathered projections.
const WIDTHS: [usize; 3] = [WIDE, 72, 64];
/// Speed of gathered tiles in percent of dense ones of the same width: `docs/cuda-linear.md`, Measured.
const GATHERED: usize = 55;
/// Percentage of the heads from which on a combination is one product without gates, where that is possible. See `docs/cuda-linear.md`,
/// Measured: with 8 of 64 heads on, the routed kernel takes twice the time that the product should.
const LEAST_ON: usize = 8;
const CHECK_THREADS: u32 = 256;
/// Cost of a product in the routed combination kernel (`mma.sync`), in percent of one here.
pub(super) const ROUTED_COST: i32 = 200;

/// Whether these kernels support the product; assumes 16-byte alignment.
pub(super) fn fits(product: &Product, stream: &Stream<'_>) -> bool {
    let properties = stream.properties();
    let p = &product.params;
    // The kernels use 32-bit byte strides; TMA descriptors 40-bit ones.
    properties.capability.0 == 9
        && product.dtype != DType::F32
        && i32::try_from(2 * p.x_row).is_ok()
        && (2 * p.weight_head.max(p.weight_row)) >> 40 == 0
        && shared_bytes(product, WIDE) + heads_bytes(p) <= properties.shared_bytes as usize
}

/// `sizeof(Shared)` for tiles of this many columns: stages, messages, barriers.
fn shared_bytes(product: &Product, columns: usize) -> usize {
    let stages = if columns == 64 { 5 } else { 4 };
    let weight_rows = if product.per_head { columns.next_multiple_of(DEPTH) } else { columns };
    stages * ((HEIGHTS[0] + weight_rows) * 2 * DEPTH + 32)
}

/// Additional shared memory of a combination: the heads' rows as bits, and their states.
fn heads_bytes(p: &LinearParams) -> usize {
    (p.heads as usize).next_multiple_of(32) * HEIGHTS[0] / 8 + p.heads as usize * 4
}

/// Speed of gathered tiles with `width` columns in percent of dense ones of [`WIDE`]: [`GATHERED`], times the share of columns that are
/// used, times the ratio of operations per copied byte.
fn gathered_rate(width: usize, columns: usize) -> usize {
    let reuse = |width: usize| HEIGHTS[0] * width * 1000 / (HEIGHTS[0] + width);
    GATHERED * columns / columns.next_multiple_of(width) * reuse(width) / reuse(WIDE)
}

/// The fastest of these tile heights (highest first): minimises the number of rounds of tiles over all
/// multiprocessors, times the copies per tile (its rows, plus a quarter for its weights).
pub(super) fn height(heights: &[usize], rows: usize, tiles_a_row: usize, width: usize, stream: &Stream<'_>) -> usize {
    let multiprocessors = stream.properties().multiprocessors.max(1) as usize;
    fastest(heights, |height| (rows.div_ceil(height) * tiles_a_row).div_ceil(multiprocessors), width)
}

/// The same for [`WIDE`] tiles in clusters, whose number is `pairs(height)`.
fn height_in_clusters(pairs: impl Fn(usize) -> usize, stream: &Stream<'_>) -> usize {
    fastest(&HEIGHTS, |height| pairs(height).div_ceil(clusters(stream)), WIDE)
}

fn fastest(heights: &[usize], rounds: impl Fn(usize) -> usize, width: usize) -> usize {
    heights.iter().copied().min_by_key(|&height| rounds(height) * (height + width / 4)).unwrap_or(DEPTH)
}

/// The number of clusters that run at a time.
fn clusters(stream: &Stream<'_>) -> usize {
    (stream.properties().multiprocessors as usize / CLUSTER).max(1)
}

/// The number of pairs of [`WIDE`] tiles with rows of one head's list, one below the other.
fn gathered_pairs(rows: usize, tile_rows: usize, params: &LinearParams) -> usize {
    rows.div_ceil(CLUSTER * tile_rows) * params.heads as usize * (params.columns as usize).div_ceil(WIDE)
}

/// The number of pairs of dense tiles: side by side, or one below the other.
fn dense_pairs(tile_rows: usize, params: &LinearParams) -> usize {
    let (tokens, columns) = (params.tokens as usize, params.heads as usize * params.columns as usize);
    match shares_x(params) {
        true => tokens.div_ceil(tile_rows) * columns.div_ceil(CLUSTER * WIDE),
        false => tokens.div_ceil(CLUSTER * tile_rows) * columns.div_ceil(WIDE),
    }
}

/// Whether pairs of dense tiles are side by side and share the rows of x, of which a step copies twice the bytes of
/// its weight. An odd number of tiles would leave one without a neighbour.
fn shares_x(params: &LinearParams) -> bool {
    (params.heads as usize * params.columns as usize).div_ceil(WIDE).is_multiple_of(CLUSTER)
}

/// Launches a projection on the stream; the lists of `params` have been made, if there are gates.
///
/// # Safety
/// As [`super::projection`] and [`fits`].
pub(super) unsafe fn project(product: &Product, params: &LinearParams, stream: &Stream<'_>) -> Result<(), Error> {
    let (tokens, heads, columns) = (params.tokens as usize, params.heads as usize, params.columns as usize);
    // The gates are on the GPU; assume that a head is on for half of the tokens.
    let gathered_rows = tokens.div_ceil(2);
    // SAFETY: the caller's contract.
    unsafe {
        if params.activation >= 0 {
            let (variant, width) = if params.activation == PAIRS { ("pairs", WIDE / 2) } else { ("mlp", WIDE) };
            let rows = height(&HEIGHTS, gathered_rows, heads * columns.div_ceil(width), WIDE, stream);
            return launch_projection(product, variant, WIDE, width, rows, params, stream);
        }
        if params.gates == 0 {
            let rows = height_in_clusters(|height| dense_pairs(height, params), stream);
            return launch_projection(product, &WIDE.to_string(), WIDE, WIDE, rows, params, stream);
        }
        let width = WIDTHS.into_iter().max_by_key(|&width| gathered_rate(width, columns)).unwrap_or(WIDE);
        // A panel of a dense tile must not cross heads.
        let can_be_dense = params.write_zeros != 0 && (!product.per_head || columns.is_multiple_of(DEPTH));
        let dense_percent = if can_be_dense { gathered_rate(width, columns) as i32 } else { NEVER };
        let params = LinearParams { dense_percent, ..*params };
        let rows = match width {
            WIDE => height_in_clusters(|height| gathered_pairs(gathered_rows, height, &params), stream),
            _ => height(&HEIGHTS, gathered_rows, heads * columns.div_ceil(width), width, stream),
        };
        let launch = |width: usize, rows: usize, only: i32| {
            let params = LinearParams { only, ..params };
            launch_projection(product, &width.to_string(), width, width, rows, &params, stream)
        };
        if width == WIDE || !can_be_dense {
            return launch(width, rows, 0);
        }
        launch(width, rows, 1)?;
        launch(WIDE, height_in_clusters(|height| dense_pairs(height, &params), stream), 2)
    }
}

/// Whether a combination may be one product without gates; assumes [`fits`] and 16-byte alignment.
pub(super) fn can_be_one_product(product: &Product, stream: &Stream<'_>) -> bool {
    let p = &product.params;
    let is_contiguous = p.x_head == i64::from(p.depth) && p.x_row == i64::from(p.heads) * p.x_head;
    p.only == 0 && p.scale_by_gates == 0 && is_contiguous && fits(&whole(product), stream)
}

/// The combination as a projection with one head, which every token uses.
fn whole(product: &Product) -> Product {
    let p = &product.params;
    let inner = p.heads * p.depth;
    let weight_head = i64::from(inner) * i64::from(p.columns);
    let params = LinearParams { gates: 0, heads: 1, depth: inner, x_head: 0, weight_head, ..*p };
    Product { params, dtype: product.dtype, per_head: product.per_head }
}

/// Launches the check of `combine_check.cuh`, and the product. Returns the parameters for the kernels that compute the output where
/// the product has not.
///
/// # Safety
/// As [`super::combination`] and [`can_be_one_product`].
pub(super) unsafe fn one_product(
    product: &Product,
    params: &LinearParams,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<LinearParams, Error> {
    let pairs = params.tokens as usize * params.heads as usize;
    let blocks = stream.properties().multiprocessors.max(1);
    let params = LinearParams {
        checked: workspace.allocate(4 + 8 * blocks as usize)?,
        checks: int(blocks as usize)?,
        least_on: int(pairs * LEAST_ON / 100).unwrap_or(i32::MAX),
        ..*params
    };
    let name = CString::new(format!("moh_combine_sm90_{}_check", product.type_name())).unwrap_or_default();
    let kernel = Kernel { module: modules::COMBINE_SM90, name: &name };
    let whole = whole(&Product { params, dtype: product.dtype, per_head: product.per_head });
    // SAFETY: the caller's contract; the numbers of the check are in the workspace.
    unsafe {
        stream.launch(kernel, [blocks, 1, 1], CHECK_THREADS, CHECK_THREADS / 32 * 8, &params)?;
        project(&whole, &whole.params, stream)?;
    }
    Ok(params)
}

/// `width` is a tile's columns of the weight, `used` its columns of the output. Only projections without an activation
/// run in clusters.
unsafe fn launch_projection(
    product: &Product,
    variant: &str,
    width: usize,
    used: usize,
    tile_rows: usize,
    params: &LinearParams,
    stream: &Stream<'_>,
) -> Result<(), Error> {
    let (tokens, heads) = (params.tokens as usize, params.heads as usize);
    let (depth, columns) = (params.depth as usize, params.columns as usize);
    let pairs = if params.activation == PAIRS { 2 } else { 1 };
    let (row, head) = (params.weight_row as usize, params.weight_head as usize);
    let in_clusters = params.activation < 0 && width == WIDE;
    let box_columns = if in_clusters { width / CLUSTER } else { width };
    let weight = match product.per_head {
        true => ([pairs * columns, depth, heads, 1], [row, head, heads * head], [DEPTH, DEPTH, 1, 1]),
        false => ([depth, heads * columns, 1, 1], [row, heads * head, heads * head], [DEPTH, box_columns, 1, 1]),
    };
    let described = describe(product, params, depth, weight, tile_rows, in_clusters && shares_x(params), stream)?;
    let name = product.name("projection_sm90", variant);
    let kernel = Kernel { module: modules::LINEAR_SM90, name: &name };
    let blocks = if in_clusters {
        let pairs = gathered_pairs(tokens, tile_rows, params).max(dense_pairs(tile_rows, params));
        CLUSTER * pairs.clamp(1, clusters(stream))
    } else {
        let tiles = tokens.div_ceil(tile_rows) * heads * columns.div_ceil(used);
        tiles.clamp(1, stream.properties().multiprocessors as usize)
    };
    let shared = shared_bytes(product, width);
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, [blocks as u32, 1, 1], THREADS, shared as u32, &described) }
}

/// Launches the dense kernel of a combination on the stream, with tiles as high as the routed kernel's.
///
/// # Safety
/// As [`super::combination`] and [`fits`].
pub(super) unsafe fn combine(
    product: &Product,
    params: &LinearParams,
    tile_rows: usize,
    stream: &Stream<'_>,
) -> Result<(), Error> {
    let (columns, inner) = (params.columns as usize, params.heads as usize * params.depth as usize);
    let row = params.weight_row as usize;
    let weight = match product.per_head {
        true => ([columns, inner, 1, 1], [row, row * inner, row * inner], [DEPTH, DEPTH, 1, 1]),
        false => ([inner, columns, 1, 1], [row, row * columns, row * columns], [DEPTH, WIDE, 1, 1]),
    };
    let described = describe(product, params, inner, weight, tile_rows, false, stream)?;
    let name = product.name("combine_sm90", "dense");
    let kernel = Kernel { module: modules::COMBINE_SM90, name: &name };
    let tiles = (params.tokens as usize).div_ceil(tile_rows) * columns.div_ceil(WIDE);
    let blocks = tiles.clamp(1, stream.properties().multiprocessors as usize);
    let shared = shared_bytes(product, WIDE) + heads_bytes(params);
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, [blocks as u32, 1, 1], THREADS, shared as u32, &described) }
}

/// Adds the TMA descriptors of x, whose rows have `inner` elements, and of the weight. If blocks share x, a box has each
/// one's part of a tile's rows.
fn describe(
    product: &Product,
    params: &LinearParams,
    inner: usize,
    weight: ([usize; 4], [usize; 3], [usize; 4]),
    tile_rows: usize,
    shares_x: bool,
    stream: &Stream<'_>,
) -> Result<LinearSm90Params, Error> {
    let (tokens, row) = (params.tokens as usize, params.x_row as usize);
    let dtype = product.dtype;
    let (sizes, strides, boxes) = weight;
    let weight = Boxed { ptr: params.weight, dtype, sizes, strides, boxes };
    let x = Boxed {
        ptr: params.x,
        dtype,
        sizes: [inner, tokens, 1, 1],
        strides: [row, row * tokens, row * tokens],
        boxes: [DEPTH, if shares_x { tile_rows / CLUSTER } else { tile_rows }, 1, 1],
    };
    Ok(LinearSm90Params {
        x_map: x.encode("the input of a routed product", stream)?,
        weight_map: weight.encode("the weight of a routed product", stream)?,
        linear: *params,
        tile_rows: tile_rows as i32,
        shares_x: shares_x.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::{dense_pairs, gathered_pairs, gathered_rate, shares_x};
    use crate::params::LinearParams;

    #[test]
    fn narrow_gathered_tiles_have_a_lower_rate() {
        assert_eq!(gathered_rate(128, 128), 55);
        assert_eq!(gathered_rate(64, 64), 33);
        assert_eq!(gathered_rate(72, 72), 36);
        assert_eq!(gathered_rate(128, 64), 27);
    }

    #[test]
    fn dense_tiles_share_x_if_each_has_a_neighbour() {
        let params = |heads, columns| LinearParams { tokens: 600, heads, columns, ..LinearParams::NONE };
        for (heads, columns, shares, pairs) in [(16, 64, true, 3 * 4), (16, 72, false, 2 * 9), (1, 128, false, 2)] {
            let params = params(heads, columns);
            assert_eq!((shares_x(&params), dense_pairs(256, &params)), (shares, pairs), "{heads} heads of {columns}");
        }
        assert_eq!(gathered_pairs(513, 256, &params(3, 200)), 2 * 3 * 2);
    }
}
