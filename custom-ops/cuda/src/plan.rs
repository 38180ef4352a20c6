//! Head gates to lists of selected rows and tiles of them, on the device: see `kernels/params.h`.

use crate::driver::RawPtr;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::PlanParams;
use crate::stream::Stream;
use crate::workspace::Workspace;
use moh_operators::Error;

/// What is to be planned.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// (batch, q_len, lists_per_batch * group) float32; 0 = off.
    pub gates: RawPtr,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub q_len: usize,
    /// Lists of a sequence: one for every `group` heads.
    pub lists_per_batch: usize,
    /// Heads whose rows share a list; their entries are `token * group + head`. With 1, entries are tokens.
    pub group: usize,
    /// Entries of a tile.
    pub tile_rows: usize,
    /// Of causal attention, the keys: a tile then says how many its last entry sees, and tiles that see most come first.
    pub causal: Option<Keys>,
    /// Keys of attention that is not causal, else 0; every tile has that number.
    pub kv_len: usize,
}

/// The keys of causal attention.
#[derive(Debug, Clone, Copy)]
pub struct Keys {
    /// Keys of a sequence.
    pub kv_len: usize,
    /// Bytes of a list's keys and values: lists whose keys fit into the level 2 cache together are worked on together.
    pub list_bytes: usize,
}

/// A plan in device memory.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// int32 \[lists\]: entries of a list.
    pub counts: RawPtr,
    /// int32 \[lists\]\[q_len * group\]: ascending.
    pub entries: RawPtr,
    /// int32 \[max_tiles\]\[4\]: list, first entry, number of entries, number of keys.
    pub tiles: RawPtr,
    /// int32: number of tiles.
    pub tile_count: RawPtr,
    /// int32, 0: for blocks that take tiles with atomicAdd.
    pub next: RawPtr,
    /// Lists: batch * lists_per_batch.
    pub lists: usize,
    /// An upper bound of the number of tiles.
    pub max_tiles: usize,
}

const THREADS: u32 = 1024;
/// As `MOH_PLAN_SECTIONS`, and `buckets` in plan.cu.
const SECTIONS: usize = 64;
const BUCKETS: usize = 64;

/// Puts the planning on the stream: two launches.
///
/// # Safety
/// The gates are as `request` says until the launches have run.
///
/// # Errors
/// No workspace, or what the driver refuses; [`Error::OutOfMemory`] where numbers of entries do not fit 31 bits.
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
    // Kernels number (token, head) blocks and tiles in 32 bits.
    int((lists * entries).max(max_tiles))?;
    // SAFETY: the workspace blocks are of the sizes that `params.h` states; the gates are as promised.
    unsafe {
        launch_lists(&params, stream)?;
        let shared = 32 * 4 + if causal.is_some() { SECTIONS * BUCKETS * 4 } else { 0 };
        let kernel = Kernel { module: modules::PLAN, name: c"moh_plan_tiles" };
        stream.launch(kernel, [1, 1, 1], THREADS, shared as u32, &params)?;
    }
    Ok(plan)
}

/// The lists alone, in device memory: one a head.
#[derive(Debug, Clone, Copy)]
pub struct Lists {
    /// int32 \[heads\]: tokens of a list.
    pub counts: RawPtr,
    /// int32 \[heads\]\[tokens\]: ascending.
    pub entries: RawPtr,
}

/// Puts the making of lists on the stream, one of every head's tokens: one launch.
///
/// # Safety
/// The gates are (tokens, heads) float32 until the launch has run.
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
    // SAFETY: the workspace blocks are of the sizes that `params.h` states; the gates are as promised.
    unsafe { launch_lists(&params, stream)? };
    Ok(lists)
}

/// Long lists have a block each; short ones share one, whose reads then share cache lines.
fn lists_per_block(entries: usize) -> i32 {
    [8, 4, 2, 1].into_iter().find(|n| entries <= 8192 / *n as usize).unwrap_or(1)
}

/// # Safety
/// As [`Stream::launch`].
unsafe fn launch_lists(params: &PlanParams, stream: &Stream<'_>) -> Result<(), Error> {
    let blocks = params.lists_per_batch.unsigned_abs().div_ceil(params.lists_per_block.unsigned_abs());
    let kernel = Kernel { module: modules::PLAN, name: c"moh_plan_lists" };
    // SAFETY: as the caller promises.
    unsafe { stream.launch(kernel, [params.batch.unsigned_abs(), blocks, 1], THREADS, 32 * 4, params) }
}

/// A size as kernels take it.
///
/// # Errors
/// [`Error::OutOfMemory`] where it does not fit.
pub fn int(size: usize) -> Result<i32, Error> {
    i32::try_from(size).map_err(|_| Error::OutOfMemory { bytes: size })
}
