//! Makes lists of selected rows and tiles from head gates, on the device: see `kernels/params.h`.

use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::PlanParams;
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
    /// The keys, if attention is causal. Tiles then carry the number of keys visible to their last entry, and those
    /// with most keys come first.
    pub causal: Option<Keys>,
    /// Number of keys of every tile if attention is not causal, else 0.
    pub kv_len: usize,
}

/// The keys of causal attention.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Keys per sequence.
    pub kv_len: usize,
    /// Bytes of keys and values per list. Lists whose keys fit the L2 cache together are processed together.
    pub list_bytes: usize,
}

/// A plan in device memory.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// int32 \[lists\]: number of entries per list.
    pub counts: RawPtr,
    /// int32 \[lists\]\[q_len * group\]: entries, ascending.
    pub entries: RawPtr,
    /// int32 \[max_tiles\]\[4\]: list, first entry, number of entries, number of keys.
    pub tiles: RawPtr,
    /// int32: number of tiles.
    pub tile_count: RawPtr,
    /// int32, initially 0: counter from which blocks take tiles with atomicAdd.
    pub next: RawPtr,
    /// Number of lists: batch * lists_per_batch.
    pub lists: usize,
    /// Upper bound of the number of tiles.
    pub max_tiles: usize,
}

const THREADS: u32 = 1024;
/// Equals `MOH_PLAN_SECTIONS`, and `buckets` in plan.cu.
const SECTIONS: usize = 64;
const BUCKETS: usize = 64;

/// Makes a plan on the stream, in two launches.
///
/// # Safety
/// The gates have the sizes of `request` until the launches have run.
///
/// # Errors
/// Out of workspace memory; an error of the driver; [`Error::OutOfMemory`] if numbers of entries do not fit 31 bits.
pub unsafe fn plan(request: &Request, stream: &Stream<'_>, workspace: &dyn Workspace) -> Result<Plan, Error> {
    let Request { gates, batch, q_len, lists_per_batch, group, tile_rows, causal, kv_len } = *request;
    let lists = batch * lists_per_batch;
    let entries = q_len * group;
    let max_tiles = lists * entries.div_ceil(tile_rows);
    let ints = |n: usize| workspace.allocate(n.max(1) * 4);
    let tile_count = ints(2)?;
    let plan = Plan {
        counts: ints(lists)?,
        entries: ints(lists * entries)?,
        tiles: ints(max_tiles * 4)?,
        tile_count,
        next: tile_count + 4,
        lists,
        max_tiles,
    };
    let lists_per_section = match causal {
        Some(keys) => {
            let fit = (stream.properties().l2_bytes as usize / 2 / keys.list_bytes.max(1)).max(1);
            fit.max(lists.div_ceil(SECTIONS))
        }
        None => lists.max(1),
    };
    let params = PlanParams {
        gates,
        counts: plan.counts,
        entries: plan.entries,
        tiles: plan.tiles,
        tile_count: plan.tile_count,
        next: plan.next,
        offsets: ints(lists + 1)?,
        batch: int(batch)?,
        q_len: int(q_len)?,
        lists_per_batch: int(lists_per_batch)?,
        group: int(group)?,
        tile_rows: int(tile_rows)?,
        kv_len: int(causal.map_or(kv_len, |keys| keys.kv_len))?,
        is_causal: i32::from(causal.is_some()),
        lists_per_block: lists_per_block(entries),
        lists_per_section: int(lists_per_section)?,
    };
    // Kernels use 32-bit indices of (token, head) blocks and tiles.
    int((lists * entries).max(max_tiles))?;
    // SAFETY: the workspace blocks have the sizes of `params.h`; the gates are as in the caller's contract.
    unsafe {
        launch_lists(&params, stream)?;
        let shared = 32 * 4 + if causal.is_some() { SECTIONS * BUCKETS * 4 } else { 0 };
        let kernel = Kernel { module: modules::PLAN, name: c"moh_plan_tiles" };
        stream.launch(kernel, [1, 1, 1], THREADS, shared as u32, &params)?;
    }
    Ok(plan)
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
        tiles: 0,
        tile_count: 0,
        next: 0,
        offsets: 0,
        batch: 1,
        q_len: int(tokens)?,
        lists_per_batch: int(heads)?,
        group: 1,
        tile_rows: 1,
        kv_len: 0,
        is_causal: 0,
        lists_per_block: lists_per_block(tokens),
        lists_per_section: 1,
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
