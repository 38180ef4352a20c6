//! TopKRouter on CUDA: `kernels/top_k_router.cu`.

use crate::call::{Call, CudaOperator};
use crate::kernel::Kernel;
use crate::modules;
use crate::params::RouterParams;
use crate::plan::int;
use moh_operators::top_k_router::Kind;
use moh_operators::{DType, Definition, Error, TopKRouter};

/// Threads per block, if shared memory allows; at least one warp.
const THREADS: usize = 128;
const WARP: usize = 32;
/// Bytes of shared memory per block on every GPU.
const SHARED: usize = 48 << 10;
/// Equals `MOH_ROUTER_SHARED`: shared heads must be below.
const SHARED_HEADS: usize = 1024;

impl CudaOperator for TopKRouter {
    unsafe fn launch(call: &Call<'_, Self>) -> Result<(), Error> {
        let p = &call.problem;
        let heads = &p.heads;
        let norms = heads.kind == Kind::QueryNorms;
        let routed = if heads.top_k == 0 { 0 } else { heads.routed.len() };
        let columns = if norms { routed } else { heads.columns() };
        let bytes = 2 * size_of::<f32>() * columns.max(1);
        let fits = |expected: String, found: usize| Error::Attribute {
            operator: Self::NAME,
            attribute: "num_heads",
            expected,
            found: found.to_string(),
        };
        if bytes > SHARED {
            return Err(fits(format!("at most {} scores a token on CUDA", SHARED / 8), columns));
        }
        let mut shared = [0u32; SHARED_HEADS / 32];
        for &head in &heads.shared {
            let word = shared.get_mut(head / 32);
            let word = word.ok_or_else(|| fits(format!("shared heads below {SHARED_HEADS} on CUDA"), heads.count()))?;
            *word |= 1 << (head % 32);
        }
        let (name, lanes) = match call.dtype {
            DType::F32 if !norms && columns <= 8 => (c"moh_router_float_8", 8),
            DType::F32 if !norms && columns <= 16 => (c"moh_router_float_16", 16),
            DType::F32 => (c"moh_router_float_32", 32),
            DType::F16 => (c"moh_router_f16_32", 32),
            _ => (c"moh_router_bf16_32", 32),
        };
        let most = (SHARED / bytes * lanes) / WARP * WARP;
        let threads = most.clamp(WARP, THREADS);
        let params = RouterParams {
            scores: call.inputs.scores,
            gates: call.output,
            tokens: int(p.tokens)?,
            width: int(p.width)?,
            heads: int(heads.count())?,
            kind: heads.kind as i32,
            top_k: int(heads.top_k)?,
            num_shared: int(heads.shared.len())?,
            routed: int(routed)?,
            balance: int(heads.balance_columns().len())?,
            columns: int(columns)?,
            shared,
        };
        let kernel = Kernel { module: modules::TOP_K_ROUTER, name };
        let blocks = int(p.tokens.div_ceil(threads / lanes))? as u32;
        let shared_bytes = threads / lanes * bytes;
        // SAFETY: the validated tensors of the call.
        unsafe { call.stream.launch(kernel, [blocks, 1, 1], threads as u32, shared_bytes as u32, &params) }
    }
}
