// The parameters of all kernels: one struct per kernel, passed by value; mirrored in src/params.rs.
//
// Plain C: pointers to device memory, int32_t sizes, int64_t strides in elements, float. Fields are ordered so that
// there is padding only at the end.
#pragma once

#include <stdint.h>

// plan.cu: makes lists of selected rows from gates.
//
// List l = b * lists_per_batch + n has the selected rows of the `group` heads n * group + g, as ascending entries t *
// group + g. With group = 1 an entry is a token, and lists_per_batch is the number of heads.
struct PlanParams {
    const float* gates;  // (batch, q_len, lists_per_batch * group); 0 = off
    int32_t* counts;     // [batch * lists_per_batch] number of entries per list
    int32_t* entries;    // [batch * lists_per_batch][q_len * group]
    int32_t* next;       // [1], set to 0: TileParams::next; or null
    int32_t batch;
    int32_t q_len;
    int32_t lists_per_batch;
    int32_t group;
    int32_t lists_per_block; // 1, 2, 4 or 8
};

// tiles.cuh: the tiles of attention, which its kernels find in the lists.
struct TileParams {
    const int32_t* counts;     // as in PlanParams
    const int32_t* entries;
    int32_t* next;             // persistent blocks take tiles with atomicAdd
    int32_t lists;
    int32_t lists_per_section; // 1 to 32
    int32_t tile_rows;         // entries per tile
    int32_t q_len, kv_len, group;
    int32_t is_causal;         // token t sees keys j <= t + kv_len - q_len
};

// attention_sm80.cu, attention_simt.cu and decode.cu. Strides are in elements of T.
struct AttentionParams {
    const void* query;        // (batch, q_len, num_heads * head_dim)
    const void* key;          // (batch, kv_len, kv_num_heads * head_dim) or (batch, kv_num_heads, kv_len, head_dim), as the strides say
    const void* value;
    const float* gates;       // (batch, q_len, num_heads)
    const void* bias;         // or null; element b * bias_strides[0] + h * [1] + i * [2] + j * [3]
    void* output;             // (batch, q_len, num_heads * value_dim)
    struct TileParams tiles;  // with group = num_heads / kv_num_heads; unused in decode.cu
    float* partial;           // decode.cu: [splits][batch * kv_num_heads][rows][value_dim] weighted means of values
    float* partial_weight;    // decode.cu: [splits][batch * kv_num_heads][rows] maximum (base 2) and sum of a split's weights
    const int64_t* first;     // (batch), or null: with start, token i of a row sees keys first <= j <= start + i: key_range.cuh
    const int64_t* start;
    int64_t key_strides[3];   // along batch, KV head, token
    int64_t value_strides[3];
    int64_t bias_strides[4];
    int32_t batch, q_len, kv_len;
    int32_t num_heads, kv_num_heads;
    int32_t head_dim, value_dim;
    int32_t is_causal;
    int32_t splits;           // decode.cu: number of parts of the keys
    int32_t keys_per_split;   // with `first`, whose numbers of keys only the GPU knows: a part has a multiple of it
    int32_t stages;           // decode.cu, on tensor cores: blocks of keys in shared memory, per warp
    float scale;
};

// cache_update.cu: a row is the elements of one position in one KV head.
struct CacheUpdateParams {
    const void* past;      // (batch, kv_heads, capacity, row), or the same memory as present
    const void* update;    // (batch, q_len, kv_heads, row)
    const int64_t* start;  // (batch)
    void* present;         // (batch, kv_heads, positions, row)
    int32_t kv_heads;
    int32_t capacity, positions, q_len;
    int32_t row_units;     // of the kernel's size
    int32_t in_place;      // only the update is written
    int32_t blocks;        // of a (batch, KV head), in the grid
};

// nbits.cu and dequantize.cu: a matrix of blocks of 4 or 8 bits with a scale each, as MatMulNBits has it; in nbits.cu also one of T.
struct QuantizedParams {
    const uint8_t* weight;      // (matrices * rows, depth / block, block * bits / 8)
    const void* scales;         // T (matrices * rows, depth / block)
    const uint8_t* zero_points; // (matrices * rows, ceil(depth / block * bits / 8)), or null: 8 or 128
    int32_t matrices, rows, depth;
    int32_t block_log2;         // block: 16 to 256
    int32_t bits;               // 16: T as it is, without scales
};

// dequantize.cu
struct DequantizeParams {
    struct QuantizedParams weight;
    void* output;          // T (matrices, rows, depth), transposed (matrices, depth, rows)
    const float* gates;    // (tokens, heads): rows of heads that no token uses are left out; or null
    int32_t tokens, heads;
    int32_t head_rows;     // consecutive rows of all matrices that belong to a head
};

// nbits.cu
struct NbitsParams {
    struct QuantizedParams weight; // one matrix, or one for each expert
    const void* x;                 // T (tokens, depth); of a combination of experts (tokens, matrices, depth)
    const void* bias;              // T (matrices, rows), or null
    const float* gates;            // (tokens, heads); experts are heads; null in a projection: all are on
    void* output;                  // T (tokens, rows); of a projection (tokens, matrices, rows), for pairs half the rows
    int32_t tokens, heads;
    int32_t head_width;            // rows of a head; of a combination: elements of x
    int32_t activation;            // of a projection: 0 to 4 as RoutedMLP's, 4 with pairs of rows; -1: none
};

// A CUtensorMap, made by cuTensorMapEncodeTiled; opaque here.
struct
#ifdef __cplusplus
alignas(64)
#endif
TensorMap {
    uint64_t opaque[16];
};

// attention_sm90.cu. Strides are in elements of T.
struct AttentionSm90Params {
    TensorMap key_map;        // (batch, kv_len, kv_num_heads, head_dim) or (batch, kv_num_heads, kv_len, head_dim), boxes of 64 elements
    TensorMap value_map;
    TensorMap key_tail_map;   // the same with boxes of the instance's tail, 16 or 32 elements; unused if it has none
    TensorMap value_tail_map;
    const void* query;        // (batch, q_len, num_heads * head_dim)
    const float* gates;       // (batch, q_len, num_heads)
    const void* bias;         // or null; element b * bias_strides[0] + h * [1] + i * [2] + j * [3]
    void* output;             // (batch, q_len, num_heads * value_dim)
    const void* value;        // as value_map
    const int64_t* first;     // as in AttentionParams; keys and values are then a cache of kv_len positions
    const int64_t* start;
    struct TileParams tiles;  // with group = num_heads / kv_num_heads
    int64_t bias_strides[4];
    int32_t batch, q_len, kv_len;
    int32_t num_heads, kv_num_heads;
    int32_t head_dim, value_dim;
    int32_t is_causal;        // also of a cache
    int32_t cache_layout;     // keys and values are (batch, kv_num_heads, kv_len, dim)
    int32_t resident;         // keys and values of a tile stay in the ring, for several units per warpgroup
    float scale_log2;         // scale * log2(e) > 0
};

// linear.cu and combine.cu. Strides are in elements of T; the innermost stride is 1.
struct LinearParams {
    const void* x;          // element k of the block of head h of token t: t * x_row + h * x_head + k
    const void* weight;     // output n, input k of head h: h * weight_head + n * weight_row + k, in layout 1 + k * weight_row + n
    const void* bias;       // or null; element n of head h: h * bias_head + n
    const float* gates;     // (tokens, heads); projection: null if all are on, then without lists
    void* output;           // element n of the block of head h of token t: t * output_row + h * output_head + n
    const int32_t* counts;  // projection, RoutedMLP: the lists of plan.cu, with all tokens as one batch entry
    const int32_t* entries;
    float* partial;         // combine, only = 1: [parts][tokens][columns] partial sums, or null; expert_products_sm90.cu: [capacity][columns]
    int32_t* positions;     // expert_products_sm90.cu: [tokens][heads] row of `partial`; set where a head is on
    int32_t* checked;       // combine on Hopper: what its check found, combine_check.cuh; or null
    int64_t x_row, weight_row, output_row;
    int64_t x_head, weight_head, output_head, bias_head;
    int32_t tokens, heads;
    int32_t depth;          // input elements of a head
    int32_t columns;        // output elements of a head
    int32_t activation;     // projection: 0 to 4 as RoutedMLP's, 4 with weights and biases of 2 * columns; -1: none
    int32_t dense_percent;  // projection: all heads are computed if at least this percentage is on; above 100: never
    int32_t only;           // 1: only gathered (routed) tiles; 2: only dense tiles; 0: chosen by the gates
    int32_t write_zeros;    // projection: whether to zero the blocks of heads that are off
    int32_t scale_by_gates; // combine, only = 1: heads are multiplied by their gates, and there is one bias per head
    int32_t routed_cost;    // combine: cost of a product in the routed kernel, in percent of one in the dense kernel
    int32_t column_blocks;  // combine, except combine_sm90.cu: blocks of the grid that share a tile of rows
    int32_t part_depth;     // combine, only = 1: input elements per part of a head; depth, or a multiple of 64
    int32_t parts;
    int32_t capacity;       // combine, only = 1: up to so many (token, head) pairs are computed by expert_products_sm90.cu; 0: never
    int32_t checks;         // blocks of the check
    int32_t least_on;       // so many (token, head) pairs are on at least where a product without gates is the fastest way
};

// linear_epilogue.cu: operands of T that are null change nothing.
struct LinearEpilogueParams {
    const void* bias;           // a number
    const void* gate;           // a number, or (rows / rows_per_gate, columns)
    const void* residual;       // a number, or (rows, columns)
    void* output;               // (rows, columns)
    int32_t rows, columns;
    int32_t rows_per_gate;
    int32_t activation;         // as RoutedMLP's, -1: none
    int32_t gate_is_number, residual_is_number;
};

// layer_norm.cu. T (rows, width) unless noted; bias, scale and shift may be absent.
struct LayerNormParams {
    const void* x;
    const void* weight;         // (width)
    const void* bias;           // (width)
    const void* scale;          // (rows / rows_per_scale, width)
    const void* shift;          // (rows / rows_per_shift, width)
    void* output;
    int32_t rows, width;
    int32_t rows_per_scale, rows_per_shift;
    float epsilon;
};

// depthwise_conv.cu. T (images, height, width, channels) unless noted; the bias may be absent.
struct DepthwiseConvParams {
    const void* x;
    const void* weight; // (channels, 1, rows, columns)
    const void* bias;   // (channels)
    void* output;
    int32_t images, height, width, channels;
    int32_t rows, columns;
    int32_t activation; // -1: none
};

// linear_sm90.cu, combine_sm90.cu and expert_products_sm90.cu.
struct LinearSm90Params {
    TensorMap x_map;      // (tokens, row of x), boxes of tile_rows x 64, with shares_x of half of the rows
    TensorMap weight_map; // layout 0: (all outputs, row), boxes of a tile's columns (of 128: 64) x 64; 1: (heads, inputs, outputs), boxes of 64 x 64
    struct LinearParams linear;
    int32_t tile_rows;    // 64, 128, 192 or 256
    int32_t shares_x;     // in clusters: dense tiles share the rows of x, otherwise the weight
};

// aggregated.cu. Unless noted: T (batch, tokens or pooled, heads * dim).
struct AggregatedParams {
    const void* query;
    const void* key;
    const void* value;
    const void* pooled_key;
    const void* pooled_value;
    const float* gates;           // (batch, tokens, heads)
    const void* query_embedding;  // (heads, dim)
    const float* query_scale;     // (tokens, heads)
    const void* local_bias;       // (heads, window^2)
    const void* pooled_bias;      // (heads, tokens, pooled)
    const void* learnable_tokens; // (heads, dim, window^2)
    const void* learnable_bias;   // (heads, window^2)
    void* output;
    int32_t batch, height, width, window, pooled, heads, dim;
};

#define MOH_ROUTER_SHARED 1024

// top_k_router.cu. Columns: routed heads, balance, shared heads, as in TopKRouter's scores; for query norms, one
// column per routed head.
struct RouterParams {
    const void* scores;  // T (tokens, width)
    float* gates;        // (tokens, heads)
    int32_t tokens, width, heads;
    int32_t kind;        // TopKRouter's attribute
    int32_t top_k;
    int32_t num_shared;
    int32_t routed;      // number of columns; 0 if top_k is 0
    int32_t balance;     // number of columns: 0 or 2
    int32_t columns;     // total number of columns
    uint32_t shared[MOH_ROUTER_SHARED / 32]; // bit h % 32 of word h / 32: head h is shared
};
