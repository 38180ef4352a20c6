//! Launcher of `attention_simt.cu`: any type, width and alignment, without tensor cores.

use super::Attention;
use crate::kernel::Kernel;
use crate::modules;
use crate::params::AttentionParams;
use moh_operators::Error;
use std::ffi::CString;

const THREADS: u32 = 256;
/// Size of the header before the queries in shared memory.
const HEADER_BYTES: usize = 32;
/// Keys per block, and elements of each that are in shared memory at a time.
const KEYS: usize = 32;
const BLOCK_WIDTH: usize = 512;
/// (maximum head width, rows per tile, name suffix) of the two instances.
const WIDTHS: [(usize, usize, &str); 2] = [(256, 32, ""), (1024, 8, "_wide")];

/// # Safety
/// As [`CudaOperator::launch`](crate::CudaOperator::launch).
pub(super) unsafe fn launch(attention: &Attention<'_>) -> Result<(), Error> {
    let p = &attention.problem;
    let width = p.head_dim.max(p.value_dim);
    let &(_, rows, suffix) = WIDTHS.iter().find(|(widest, ..)| width <= *widest).ok_or_else(|| Error::Kernel {
        operator: attention.operator,
        expected: vec!["heads up to 1024 wide"],
        found: format!("a head of width {width}"),
    })?;
    // SAFETY: the caller's contract.
    let plan = unsafe { attention.plan(rows) }?;
    let params = AttentionParams { tiles: plan.tiles, ..attention.params };
    let name = CString::new(format!("moh_attention_simt_{}{suffix}", attention.type_name())).unwrap_or_default();
    let kernel = Kernel { module: modules::ATTENTION_SIMT, name: &name };
    let stream = attention.stream;
    let blocks = plan.max_tiles.min(4 * stream.properties().multiprocessors.max(1) as usize);
    let row_bytes = |width: usize| (width.div_ceil(4) | 1) * 16;
    let shared =
        HEADER_BYTES + rows * row_bytes(p.head_dim) + KEYS * row_bytes(width.min(BLOCK_WIDTH)) + rows * (KEYS + 1) * 4;
    // SAFETY: tensors and plan have the sizes that the kernel expects.
    unsafe { stream.launch(kernel, [blocks as u32, 1, 1], THREADS, shared as u32, &params) }
}
