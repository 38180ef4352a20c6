//! CacheUpdate on CUDA: `kernels/cache_update.cu`.

use crate::call::{Call, CudaOperator};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::CacheUpdateParams;
use crate::plan::int;
use moh_operators::{CacheUpdate, DType, Definition, Error};
use std::ffi::CString;

const THREADS: usize = 256;
/// Units that a thread copies.
const COPIES: usize = 4;
/// Bytes of the largest unit.
const UNIT: usize = 16;

impl CudaOperator for CacheUpdate {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let (p, inputs) = (&call.problem, &call.inputs);
        let in_place = call.output == inputs.past;
        if in_place && p.length != p.capacity {
            return Err(Error::Shape {
                operator: Self::NAME,
                input: "past",
                expected: format!("room for {} tokens, as it is the memory of the output", p.length),
                found: format!("room for {}", p.capacity),
            });
        }
        let row = p.dim * if call.dtype == DType::F32 { 4 } else { 2 };
        let unit_log2 = row.trailing_zeros().min(UNIT.ilog2());
        let row_units = row >> unit_log2;
        let units = if in_place { p.q_len } else { p.length } * row_units;
        let blocks = units.div_ceil(THREADS * COPIES);
        int(units + THREADS * COPIES)?;
        let params = CacheUpdateParams {
            past: inputs.past,
            update: inputs.update,
            start: inputs.start,
            present: call.output,
            kv_heads: int(p.kv_num_heads)?,
            capacity: int(p.capacity)?,
            positions: int(p.length)?,
            q_len: int(p.q_len)?,
            row_units: int(row_units)?,
            in_place: in_place.into(),
            blocks: int(blocks)?,
        };
        let name = CString::new(format!("moh_cache_update_{}", 1 << unit_log2)).unwrap_or_default();
        let kernel = Kernel { module: modules::CACHE_UPDATE, name: &name };
        let grid = [int(p.batch * p.kv_num_heads * blocks)?.unsigned_abs(), 1, 1];
        // SAFETY: the validated tensors of the call. If past is not the output, they do not overlap.
        unsafe { call.stream.launch(kernel, grid, THREADS as u32, 0, &params) }
    }
}
