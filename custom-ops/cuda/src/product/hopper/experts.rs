//! Launcher of `expert_products_sm90.cu`: the second half of RoutedMLP on Hopper, in f16 and bf16.

use super::{DEPTH, HEIGHTS, THREADS, WIDE, describe, shared_bytes};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::LinearParams;
use crate::plan::int;
use crate::product::{PART_DEPTH, Product};
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::Error;
use std::ffi::CString;

/// Fewer tokens are computed by `combine_routed`.
const FEWEST_TOKENS: usize = 64;
/// Columns that a warp of the sum kernel adds, and its threads per block.
const SUM_COLUMNS: usize = 512;
const SUM_THREADS: usize = 256;

/// Whether these kernels should compute the second half of RoutedMLP; assumes [`super::fits`] and 16-byte alignment.
/// Otherwise `combine_routed` does, in tiles of `tile_rows` tokens, whose inner length is divided into `parts`.
///
/// Every product is written and read once in f32, which pays off from the same inner length on as partial sums.
///
/// If few tiles share the multiprocessors, `combine_routed` divides the inner length; these kernels do not. Then the one
/// whose blocks copy fewer rows of inputs and weights is used. The gates are on the GPU: it is assumed that every token
/// uses one expert, and every expert as many tokens.
pub(in crate::product) fn fits(product: &Product, tile_rows: usize, parts: usize, multiprocessors: usize) -> bool {
    let p = &product.params;
    let (tokens, experts) = (p.tokens as usize, p.heads as usize);
    let list = tokens.div_ceil(experts.max(1));
    let tiles = experts * list.div_ceil(HEIGHTS[0]) * (p.columns as usize).div_ceil(WIDE);
    let copied = tiles.div_ceil(multiprocessors.max(1)) * (list.min(HEIGHTS[0]) + WIDE);
    p.counts != 0
        && product.per_head
        && p.bias.is_multiple_of(16)
        && tokens >= FEWEST_TOKENS
        && p.depth as usize >= PART_DEPTH
        && (parts == 1 || copied * parts < experts * WIDE + tile_rows)
}

/// Number of (token, expert) pairs for whose products there is room: for two experts a token, or for as many bytes as
/// the hidden activations have.
fn capacity(tokens: usize, experts: usize, hidden: usize, columns: usize) -> usize {
    let pairs = tokens * experts;
    (2 * tokens).max(pairs * hidden / (2 * columns)).min(pairs)
}

/// Launches both kernels on the stream. Returns the number of (token, expert) pairs up to which they compute the
/// output; if more are on, they do nothing.
///
/// # Safety
/// As [`crate::product::combination`] and [`fits`].
pub(in crate::product) unsafe fn multiply(
    product: &Product,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<usize, Error> {
    let p = &product.params;
    let (tokens, experts) = (p.tokens as usize, p.heads as usize);
    let (depth, columns) = (p.depth as usize, p.columns as usize);
    let capacity = capacity(tokens, experts, depth, columns);
    let params = LinearParams {
        partial: workspace.allocate(capacity * columns * 4)?,
        positions: workspace.allocate(tokens * experts * 4)?,
        capacity: int(capacity)?,
        ..*p
    };
    let (row, matrix) = (p.weight_row as usize, p.weight_head as usize);
    let weight = ([columns, depth, experts, 1], [row, matrix, experts * matrix], [DEPTH, DEPTH, 1, 1]);
    let described = describe(product, &params, experts * depth, weight, DEPTH, false, stream)?;
    let named = |operation: &str| CString::new(format!("moh_{operation}_{}", product.type_name())).unwrap_or_default();
    let (products, sum) = (named("expert_products_sm90"), named("expert_sum_sm90"));
    // A pair is at most a tile of 64 rows.
    let tiles = (capacity / DEPTH + experts) * columns.div_ceil(WIDE);
    let blocks = tiles.min(stream.properties().multiprocessors as usize);
    let sums = int((tokens * columns.div_ceil(SUM_COLUMNS)).div_ceil(SUM_THREADS / 32))?;
    // SAFETY: the caller's contract; the products and their positions are in the workspace.
    unsafe {
        let kernel = Kernel { module: modules::EXPERT_PRODUCTS_SM90, name: &products };
        stream.launch(kernel, [blocks as u32, 1, 1], THREADS, shared_bytes(product, WIDE) as u32, &described)?;
        let kernel = Kernel { module: modules::EXPERT_PRODUCTS_SM90, name: &sum };
        stream.launch(kernel, [sums as u32, 1, 1], SUM_THREADS as u32, 0, &params)?;
    }
    Ok(capacity)
}

#[cfg(test)]
mod tests {
    use super::{capacity, fits};
    use crate::params::LinearParams;
    use crate::product::Product;
    use moh_operators::DType;

    #[test]
    fn chosen_by_size() {
        let chosen = |[tokens, heads, depth, columns]: [i32; 4], tile_rows: usize, parts: usize| {
            let params = LinearParams { counts: 256, tokens, heads, depth, columns, ..LinearParams::NONE };
            fits(&Product { params, dtype: DType::F16, per_head: true }, tile_rows, parts, 132)
        };
        assert!(chosen([4096, 8, 4096, 1024], 256, 1));
        assert!(!chosen([63, 8, 4096, 1024], 64, 1), "few tokens");
        assert!(!chosen([4096, 8, 248, 1024], 256, 1), "a short inner length");
        assert!(!chosen([64, 8, 4096, 1024], 64, 16), "16 parts copy less than 64 tiles of whole inner lengths");
        assert!(!chosen([64, 64, 4096, 1024], 64, 16), "both copy as much");
        assert!(chosen([256, 64, 1408, 2048], 128, 4));
        assert!(chosen([512, 8, 4096, 1024], 128, 4));
        assert!(!chosen([512, 2, 4096, 512], 128, 8));
    }

    #[test]
    fn room_for_products_is_bounded_by_the_hidden_activations() {
        assert_eq!(capacity(1024, 8, 4096, 1024), 8 * 1024);
        assert_eq!(capacity(1024, 64, 1024, 2048), 16 * 1024);
        assert_eq!(capacity(1024, 8, 256, 1024), 2 * 1024);
        assert_eq!(capacity(1024, 1, 256, 1024), 1024);
    }
}
