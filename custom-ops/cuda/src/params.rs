//! Kernel parameters; mirrors `kernels/params.h`.

use crate::driver::RawPtr;

/// A kernel's only parameter.
///
/// # Safety
/// The type is `#[repr(C)]`, and has the layout of the struct of the same name in `kernels/params.h`.
pub unsafe trait Params: Copy {}

/// A TMA descriptor (`CUtensorMap`), made by `cuTensorMapEncodeTiled`.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub [u64; 16]);

/// `PlanParams`, for `plan.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanParams {
    pub gates: RawPtr,
    pub counts: RawPtr,
    pub entries: RawPtr,
    pub next: RawPtr,
    pub batch: i32,
    pub q_len: i32,
    pub lists_per_batch: i32,
    pub group: i32,
    pub lists_per_block: i32,
}
// SAFETY: the fields of the C struct, in order; `tests/it/params.rs` compares the layouts.
unsafe impl Params for PlanParams {}

/// `TileParams`, a part of the parameters of attention kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct TileParams {
    pub counts: RawPtr,
    pub entries: RawPtr,
    pub next: RawPtr,
    pub lists: i32,
    pub lists_per_section: i32,
    pub tile_rows: i32,
    pub q_len: i32,
    pub kv_len: i32,
    pub group: i32,
    pub is_causal: i32,
}

impl TileParams {
    /// No tiles, for kernels without a plan.
    pub(crate) const NONE: TileParams = TileParams {
        counts: 0,
        entries: 0,
        next: 0,
        lists: 0,
        lists_per_section: 1,
        tile_rows: 1,
        q_len: 0,
        kv_len: 0,
        group: 1,
        is_causal: 0,
    };
}

/// `AttentionParams`, for `attention_sm80.cu`, `attention_simt.cu` and `decode.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AttentionParams {
    pub query: RawPtr,
    pub key: RawPtr,
    pub value: RawPtr,
    pub gates: RawPtr,
    pub bias: RawPtr,
    pub output: RawPtr,
    pub tiles: TileParams,
    pub partial: RawPtr,
    pub partial_weight: RawPtr,
    pub first: RawPtr,
    pub start: RawPtr,
    pub key_strides: [i64; 3],
    pub value_strides: [i64; 3],
    pub bias_strides: [i64; 4],
    pub batch: i32,
    pub q_len: i32,
    pub kv_len: i32,
    pub num_heads: i32,
    pub kv_num_heads: i32,
    pub head_dim: i32,
    pub value_dim: i32,
    pub is_causal: i32,
    pub splits: i32,
    pub keys_per_split: i32,
    pub stages: i32,
    pub scale: f32,
}
// SAFETY: as above.
unsafe impl Params for AttentionParams {}

/// `CacheUpdateParams`, for `cache_update.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CacheUpdateParams {
    pub past: RawPtr,
    pub update: RawPtr,
    pub start: RawPtr,
    pub present: RawPtr,
    pub kv_heads: i32,
    pub capacity: i32,
    pub positions: i32,
    pub q_len: i32,
    pub row_units: i32,
    pub in_place: i32,
    pub blocks: i32,
}
// SAFETY: as above.
unsafe impl Params for CacheUpdateParams {}

/// `QuantizedParams`, a part of the parameters of `dequantize.cu` and `nbits.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct QuantizedParams {
    pub weight: RawPtr,
    pub scales: RawPtr,
    pub zero_points: RawPtr,
    pub matrices: i32,
    pub rows: i32,
    pub depth: i32,
    pub block_log2: i32,
    pub bits: i32,
}

/// `DequantizeParams`, for `dequantize.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DequantizeParams {
    pub weight: QuantizedParams,
    pub output: RawPtr,
    pub gates: RawPtr,
    pub tokens: i32,
    pub heads: i32,
    pub head_rows: i32,
}
// SAFETY: as above.
unsafe impl Params for DequantizeParams {}

/// `NbitsParams`, for `nbits.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct NbitsParams {
    pub weight: QuantizedParams,
    pub x: RawPtr,
    pub bias: RawPtr,
    pub gates: RawPtr,
    pub output: RawPtr,
    pub tokens: i32,
    pub heads: i32,
    pub head_width: i32,
    pub activation: i32,
}
// SAFETY: as above.
unsafe impl Params for NbitsParams {}

/// `LinearParams`, for `linear.cu`, `combine.cu` and `expert_products_sm90.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct LinearParams {
    pub x: RawPtr,
    pub weight: RawPtr,
    pub bias: RawPtr,
    pub gates: RawPtr,
    pub output: RawPtr,
    pub counts: RawPtr,
    pub entries: RawPtr,
    pub partial: RawPtr,
    pub positions: RawPtr,
    pub checked: RawPtr,
    pub x_row: i64,
    pub weight_row: i64,
    pub output_row: i64,
    pub x_head: i64,
    pub weight_head: i64,
    pub output_head: i64,
    pub bias_head: i64,
    pub tokens: i32,
    pub heads: i32,
    pub depth: i32,
    pub columns: i32,
    pub activation: i32,
    pub dense_percent: i32,
    pub only: i32,
    pub write_zeros: i32,
    pub scale_by_gates: i32,
    pub routed_cost: i32,
    pub column_blocks: i32,
    pub part_depth: i32,
    pub parts: i32,
    pub capacity: i32,
    pub checks: i32,
    pub least_on: i32,
}
// SAFETY: as above.
unsafe impl Params for LinearParams {}

/// `LinearEpilogueParams`, for `linear_epilogue.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct LinearEpilogueParams {
    pub bias: RawPtr,
    pub gate: RawPtr,
    pub residual: RawPtr,
    pub output: RawPtr,
    pub rows: i32,
    pub columns: i32,
    pub rows_per_gate: i32,
    pub activation: i32,
    pub gate_is_number: i32,
    pub residual_is_number: i32,
}
// SAFETY: as above.
unsafe impl Params for LinearEpilogueParams {}

/// `LayerNormParams`, for `layer_norm.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct LayerNormParams {
    pub x: RawPtr,
    pub weight: RawPtr,
    pub bias: RawPtr,
    pub scale: RawPtr,
    pub shift: RawPtr,
    pub output: RawPtr,
    pub rows: i32,
    pub width: i32,
    pub rows_per_scale: i32,
    pub rows_per_shift: i32,
    pub epsilon: f32,
}
// SAFETY: as above.
unsafe impl Params for LayerNormParams {}

/// `DepthwiseConvParams`, for `depthwise_conv.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DepthwiseConvParams {
    pub x: RawPtr,
    pub weight: RawPtr,
    pub bias: RawPtr,
    pub output: RawPtr,
    pub images: i32,
    pub height: i32,
    pub width: i32,
    pub channels: i32,
    pub rows: i32,
    pub columns: i32,
    pub activation: i32,
}
// SAFETY: as above.
unsafe impl Params for DepthwiseConvParams {}

/// `LinearSm90Params`, for `linear_sm90.cu`, `combine_sm90.cu` and `expert_products_sm90.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct LinearSm90Params {
    pub x_map: TensorMap,
    pub weight_map: TensorMap,
    pub linear: LinearParams,
    pub tile_rows: i32,
    pub shares_x: i32,
}
// SAFETY: as above.
unsafe impl Params for LinearSm90Params {}

/// `AggregatedParams`, for `aggregated.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AggregatedParams {
    pub query: RawPtr,
    pub key: RawPtr,
    pub value: RawPtr,
    pub pooled_key: RawPtr,
    pub pooled_value: RawPtr,
    pub gates: RawPtr,
    pub query_embedding: RawPtr,
    pub query_scale: RawPtr,
    pub local_bias: RawPtr,
    pub pooled_bias: RawPtr,
    pub learnable_tokens: RawPtr,
    pub learnable_bias: RawPtr,
    pub output: RawPtr,
    pub batch: i32,
    pub height: i32,
    pub width: i32,
    pub window: i32,
    pub pooled: i32,
    pub heads: i32,
    pub dim: i32,
}
// SAFETY: as above.
unsafe impl Params for AggregatedParams {}

/// `AttentionSm90Params`, for `attention_sm90.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct AttentionSm90Params {
    pub key_map: TensorMap,
    pub value_map: TensorMap,
    pub key_tail_map: TensorMap,
    pub value_tail_map: TensorMap,
    pub query: RawPtr,
    pub gates: RawPtr,
    pub bias: RawPtr,
    pub output: RawPtr,
    pub value: RawPtr,
    pub first: RawPtr,
    pub start: RawPtr,
    pub tiles: TileParams,
    pub bias_strides: [i64; 4],
    pub batch: i32,
    pub q_len: i32,
    pub kv_len: i32,
    pub num_heads: i32,
    pub kv_num_heads: i32,
    pub head_dim: i32,
    pub value_dim: i32,
    pub is_causal: i32,
    pub cache_layout: i32,
    pub resident: i32,
    pub scale_log2: f32,
}
// SAFETY: as above.
unsafe impl Params for AttentionSm90Params {}

/// `RouterParams`, for `top_k_router.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct RouterParams {
    pub scores: RawPtr,
    pub gates: RawPtr,
    pub tokens: i32,
    pub width: i32,
    pub heads: i32,
    pub kind: i32,
    pub top_k: i32,
    pub num_shared: i32,
    pub routed: i32,
    pub balance: i32,
    pub columns: i32,
    pub shared: [u32; 32],
}
// SAFETY: as above.
unsafe impl Params for RouterParams {}
