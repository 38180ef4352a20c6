//! Kernel parameters have the same layout in `kernels/params.h`, according to a C++ compiler, and in Rust.

use moh_cuda::params::{
    AggregatedParams, AttentionParams, AttentionSm90Params, CacheUpdateParams, DepthwiseConvParams, DequantizeParams,
    LayerNormParams, LinearEpilogueParams, LinearParams, LinearSm90Params, NbitsParams, PlanParams, QuantizedParams,
    RouterParams, TileParams,
};
use std::mem::offset_of;
use std::process::Command;

/// Name and size of a struct, and names and offsets of its fields.
type Layout = (&'static str, usize, Vec<(&'static str, usize)>);

macro_rules! layouts {
    ($($name:ident { $($field:ident),* $(,)? })*) => {
        vec![$((stringify!($name), size_of::<$name>(), vec![$((stringify!($field), offset_of!($name, $field))),*])),*]
    };
}

fn layouts() -> Vec<Layout> {
    layouts! {
        PlanParams {
            gates, counts, entries, next, batch, q_len, lists_per_batch, group, lists_per_block,
        }
        TileParams {
            counts, entries, next, lists, lists_per_section, tile_rows, q_len, kv_len, group, is_causal,
        }
        AttentionParams {
            query, key, value, gates, bias, output, tiles, partial, partial_weight, first, start,
            key_strides, value_strides, bias_strides, batch, q_len, kv_len, num_heads, kv_num_heads, head_dim, value_dim,
            is_causal, splits, keys_per_split, stages, scale,
        }
        AttentionSm90Params {
            key_map, value_map, key_tail_map, value_tail_map, query, gates, bias, output, value, first, start, tiles, bias_strides, batch, q_len, kv_len,
            num_heads, kv_num_heads, head_dim, value_dim, is_causal, cache_layout, resident, scale_log2,
        }
        CacheUpdateParams {
            past, update, start, present, kv_heads, capacity, positions, q_len, row_units, in_place, blocks,
        }
        QuantizedParams { weight, scales, zero_points, matrices, rows, depth, block_log2, bits }
        DequantizeParams { weight, output, gates, tokens, heads, head_rows }
        NbitsParams { weight, x, bias, gates, output, tokens, heads, head_width, activation }
        LinearParams {
            x, weight, bias, gates, output, counts, entries, partial, positions, checked, x_row, weight_row, output_row, x_head, weight_head,
            output_head, bias_head, tokens, heads, depth, columns, activation, dense_percent, only, write_zeros, scale_by_gates,
            routed_cost, column_blocks, part_depth, parts, capacity, checks, least_on,
        }
        LinearEpilogueParams {
            bias, gate, residual, output, rows, columns, rows_per_gate, activation, gate_is_number, residual_is_number,
        }
        LayerNormParams {
            x, weight, bias, scale, shift, output, rows, width, rows_per_scale, rows_per_shift, epsilon,
        }
        DepthwiseConvParams {
            x, weight, bias, output, images, height, width, channels, rows, columns, activation,
        }
        LinearSm90Params { x_map, weight_map, linear, tile_rows, shares_x }
        AggregatedParams {
            query, key, value, pooled_key, pooled_value, gates, query_embedding, query_scale, local_bias, pooled_bias,
            learnable_tokens, learnable_bias, output, batch, height, width, window, pooled, heads, dim,
        }
        RouterParams {
            scores, gates, tokens, width, heads, kind, top_k, num_shared, routed, balance, columns, shared,
        }
    }
}

#[test]
fn parameter_structs_have_equal_layouts_in_rust_and_c() {
    let mut source = String::from("#include \"params.h\"\n#include <stddef.h>\n");
    for (name, size, fields) in layouts() {
        source += &format!("static_assert(sizeof({name}) == {size}, \"size of {name}\");\n");
        for (field, offset) in fields {
            source +=
                &format!("static_assert(offsetof({name}, {field}) == {offset}, \"{name}::{field} at {offset}\");\n");
        }
    }
    let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
    if !std::path::Path::new(kernels).is_dir() {
        println!("SKIPPED: the program was built elsewhere");
        return;
    }
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("layout.cpp");
    std::fs::write(&file, source).unwrap();
    let output = Command::new("g++").args(["-std=c++17", "-fsyntax-only", "-I", kernels]).arg(&file).output();
    let Ok(output) = output else {
        println!("SKIPPED: no g++");
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
