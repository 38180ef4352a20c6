//! Makes lists of selected rows from head gates, on the device: see `kernels/params.h`.

use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::{PlanParams, TileParams};
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::Error;

/// The inputs of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// (batch, q_len, lists_per_batch * group) float32; 0 = off.
    pub gates: RawPtr,
    /// Batch size.
    pub batch: usize,
    /// Tokens per sequence.
    pub q_len: usize,
    /// Lists per sequence: one for every `group` heads.
    pub lists_per_batch: usize,
    /// Heads per list. Entries are `token * group + head`; with 1, entries are tokens.
    pub group: usize,
    /// Entries per tile.
    pub tile_rows: usize,
    /// Keys per sequence.
    pub kv_len: usize,
    /// Whether a tile has only the keys that are visible to its last entry.
    pub is_causal: bool,
    /// Bytes of keys and values per list. Lists whose keys fit the L2 cache together are processed together.
    pub list_bytes: usize,
}

/// A plan in device memory: lists, in which kernels find their tiles.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// The lists and the order of the tiles: `kernels/tiles.cuh`.
    pub tiles: TileParams,
    /// Upper bound of the number of tiles.
    pub max_tiles: usize,
}

const THREADS: u32 = 1024;
/// Lists per section at most: one per lane of a warp.
const MAX_SECTION: usize = 32;

/// Makes a plan on the stream, in one launch.
///
/// # Safety
/// The gates have the sizes of `request` until the launch has run.
///
/// # Errors
/// Out of workspace memory; an error of the driver; [`Error::OutOfMemory`] if numbers of entries do not fit 31 bits.
pub unsafe fn plan(request: &Request, stream: &Stream<'_>, workspace: &dyn Workspace) -> Result<Plan, Error> {
    let Request { gates, batch, q_len, lists_per_batch, group, tile_rows, kv_len, is_causal, list_bytes } = *request;
    let lists = batch * lists_per_batch;
    let entries = q_len * group;
    // Kernels use 32-bit indices of (token, head) blocks, which are as many as tiles or more.
    int(lists * entries)?;
    let counts = workspace.allocate((lists + 1) * 4)?;
    let tiles = TileParams {
        counts,
        entries: workspace.allocate((lists * entries).max(1) * 4)?,
        next: counts + 4 * lists as u64,
        lists: int(lists)?,
        lists_per_section: int(section(lists, list_bytes, stream.properties().l2_bytes as usize))?,
        tile_rows: int(tile_rows)?,
        q_len: int(q_len)?,
        kv_len: int(kv_len)?,
        group: int(group)?,
        is_causal: i32::from(is_causal),
    };
    let params = PlanParams {
        gates,
        counts,
        entries: tiles.entries,
        next: tiles.next,
        batch: int(batch)?,
        q_len: int(q_len)?,
        lists_per_batch: int(lists_per_batch)?,
        group: int(group)?,
        lists_per_block: lists_per_block(entries),
    };
    // SAFETY: the workspace blocks have the sizes of `params.h`; the gates are as in the caller's contract.
    unsafe { launch_lists(&params, stream)? };
    Ok(Plan { tiles, max_tiles: lists * entries.div_ceil(tile_rows) })
}

/// Lists per section: as many as half of the L2 cache has room for, at most [`MAX_SECTION`], about as many in every
/// section.
fn section(lists: usize, list_bytes: usize, l2_bytes: usize) -> usize {
    let most = (l2_bytes / 2 / list_bytes.max(1)).clamp(1, MAX_SECTION);
    lists.div_ceil(lists.div_ceil(most).max(1)).max(1)
}

/// Lists without tiles, in device memory: one per head.
#[derive(Debug, Clone, Copy)]
pub struct Lists {
    /// int32 \[heads\]: number of tokens per list.
    pub counts: RawPtr,
    /// int32 \[heads\]\[tokens\]: tokens, ascending.
    pub entries: RawPtr,
}

/// Makes the list of every head's tokens on the stream, in one launch.
///
/// # Safety
/// The gates are float32 (tokens, heads) until the launch has run.
///
/// # Errors
/// As [`plan`].
pub unsafe fn lists(
    gates: RawPtr,
    tokens: usize,
    heads: usize,
    stream: &Stream<'_>,
    workspace: &dyn Workspace,
) -> Result<Lists, Error> {
    int(heads * tokens)?;
    let lists = Lists {
        counts: workspace.allocate(heads.max(1) * 4)?,
        entries: workspace.allocate((heads * tokens).max(1) * 4)?,
    };
    let params = PlanParams {
        gates,
        counts: lists.counts,
        entries: lists.entries,
        next: 0,
        batch: 1,
        q_len: int(tokens)?,
        lists_per_batch: int(heads)?,
        group: 1,
        lists_per_block: lists_per_block(tokens),
    };
    // SAFETY: the workspace blocks have the sizes of `params.h`; the gates are as in the caller's contract.
    unsafe { launch_lists(&params, stream)? };
    Ok(lists)
}

/// A long list has its own block. Short lists share one, whose reads then share cache lines.
fn lists_per_block(entries: usize) -> i32 {
    [8, 4, 2, 1].into_iter().find(|n| entries <= 8192 / *n as usize).unwrap_or(1)
}

/// # Safety
/// As [`Stream::launch`].
unsafe fn launch_lists(params: &PlanParams, stream: &Stream<'_>) -> Result<(), Error> {
    let blocks = params.lists_per_batch.unsigned_abs().div_ceil(params.lists_per_block.unsigned_abs());
    let kernel = Kernel { module: modules::PLAN, name: c"moh_plan_lists" };
    // SAFETY: the caller's contract.
    unsafe { stream.launch(kernel, [params.batch.unsigned_abs(), blocks, 1], THREADS, 32 * 4, params) }
}

/// Converts a size for a kernel parameter.
///
/// # Errors
/// [`Error::OutOfMemory`] if it does not fit.
pub fn int(size: usize) -> Result<i32, Error> {
    i32::try_from(size).map_err(|_| Error::OutOfMemory { bytes: size })
}

#[cfg(test)]
mod tests {
    use super::section;

    #[test]
    fn sections_fit_the_cache_and_are_of_equal_size() {
        assert_eq!(section(64, 1 << 20, 50 << 20), 22);
        assert_eq!(section(33, 1, 50 << 20), 17);
        assert_eq!(section(5, 1 << 30, 50 << 20), 1);
        assert_eq!(section(0, 0, 0), 1);
    }
}
