// RoutedAttention in f16 and bf16 with mma.sync, for compute capability 8.0 and later: flash attention over gathered
// query rows.
//
// A block processes tiles of the plan: rows of the query heads of one KV head. Four warps with 16 or 32 rows each
// share key and value blocks, which are double-buffered by cp.async. Widths and strides must be multiples of 8
// elements and tensors aligned to 16 bytes; other calls use attention_simt.cu.

// moh: spill-limit 72

#include "device.cuh"
#include "key_range.cuh"
#include "mma_attention.cuh"
#include "params.h"
#include "tiles.cuh"
#include "zeros.cuh"

namespace {

constexpr int threads = 128, warps = 4;

// The instance for heads up to D wide. src/routed_attention/mma.rs repeats these numbers.
template <int D, bool BIAS> struct Instance {
    static constexpr int m_tiles = D <= 128 ? 2 : 1;
    static constexpr int rows = warps * m_tiles * 16;
    static constexpr int keys = D <= 80 && !BIAS ? 64 : D <= 96 || !BIAS ? 32 : 16; // per block
    static constexpr int row_bytes = HeadLayout<D>::row_bytes;
    static constexpr int stage_bytes = 2 * keys * row_bytes; // keys, then values
};

// Per-row data of a tile, at the start of shared memory: it would take scarce registers, and recomputing it slow
// divisions.
template <int ROWS> struct TileRows {
    NextTile next;
    int32_t block[ROWS]; // index of the row's (token, head) pair in the query, the gates and the output
    int32_t limit[ROWS]; // number of visible keys
    float gate[ROWS];
};

// Multiplies the warp's rows by their gates and stores them. They pass through the query's shared memory, so that
// whole rows are written at once.
template <class T, class I, int D, class Warp, class Table>
MOH_DEVICE void write(const AttentionParams& p, const Table& table, const Warp& state, unsigned char* staging, int first_row,
                      int rows) {
    constexpr int units = HeadLayout<D>::value_tiles;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < I::m_tiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = m * 16 + h * 8 + lane / 4;
            // All keys are masked: the output is exactly 0, even if values are NaN.
            bool dead = state.sum[m][h] == 0.0f;
            float factor = __fdividef(table.gate[first_row + row], state.sum[m][h]);
#pragma unroll
            for (int n = 0; n < units; n++) {
                float lo = dead ? 0.0f : state.out[m][n][2 * h] * factor;
                float hi = dead ? 0.0f : state.out[m][n][2 * h + 1] * factor;
                *reinterpret_cast<uint32_t*>(staging + row * I::row_bytes + n * 16 + lane % 4 * 4) = pack<T>(lo, hi);
            }
        }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < I::m_tiles * 16 * units; i += 32) {
        int row = i / units, unit = i % units;
        if (first_row + row >= rows || unit * 8 >= p.value_dim) continue;
        int64_t to = int64_t(table.block[first_row + row]) * p.value_dim + unit * 8;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + to) =
            *reinterpret_cast<const uint4*>(staging + row * I::row_bytes + unit * 16);
    }
}

template <class T, int D, bool BIAS> MOH_DEVICE void attention(const AttentionParams& p) {
    using I = Instance<D, BIAS>;
    using Table = TileRows<I::rows>;
    constexpr int warp_rows = 16 * I::m_tiles;
    Table& table = *reinterpret_cast<Table*>(shared_memory());
    unsigned char* shared_query = shared_memory() + sizeof(Table);
    unsigned char* stages = shared_query + I::rows * I::row_bytes;
    expect_shared_memory(sizeof(Table) + I::rows * I::row_bytes + 2 * I::stage_bytes);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_row = warp * warp_rows;
    unsigned char* warp_query = shared_query + first_row * I::row_bytes;

    wait_for_previous_kernel();
    if (warp == 0) table.next.start(p.tiles);
    for (;;) {
        // The tile has been found, and all warps have finished with the previous one's shared memory.
        __syncthreads();
        const int4 work = table.next.tile;
        if (work.z == 0) break;
        const int rows = work.z, group = p.num_heads / p.kv_num_heads;
        int batch = work.x / p.kv_num_heads, kv_head = work.x % p.kv_num_heads;
        const int32_t* entries = p.tiles.entries + int64_t(work.x) * p.q_len * group + work.y;
        const KeyRange range(p, batch);
        // Of a cache, the plan does not know them.
        const int keys = p.first == nullptr ? work.w : range.sees(entries[rows - 1] / group);

        const uint16_t* key = static_cast<const uint16_t*>(p.key) + batch * p.key_strides[0] + kv_head * p.key_strides[1] +
                              range.first * p.key_strides[2];
        const uint16_t* value = static_cast<const uint16_t*>(p.value) + batch * p.value_strides[0] + kv_head * p.value_strides[1] +
                                range.first * p.value_strides[2];
        auto load = [&](int block) {
            unsigned thread = opaque(threadIdx.x);
            unsigned char* stage = stages + block % 2 * I::stage_bytes;
            load_rows<D, I::keys, threads>(stage, key, int(p.key_strides[2]), block * I::keys, keys, p.head_dim, thread);
            load_rows<D, I::keys, threads>(stage + I::stage_bytes / 2, value, int(p.value_strides[2]), block * I::keys, keys,
                                           p.value_dim, thread);
            cp_async_commit();
        };
        load(0); // zeros if there are no keys

        if (threadIdx.x < I::rows) {
            int row = threadIdx.x, block = 0, limit = 0;
            if (row < rows) {
                int entry = entries[row], token = entry / group;
                block = (batch * p.q_len + token) * p.num_heads + kv_head * group + entry % group;
                limit = min(keys, range.sees(token));
            }
            table.block[row] = block;
            table.limit[row] = limit;
            cp_async_4(&table.gate[row], p.gates + block, row < rows);
        }
        __syncthreads();
        unsigned thread = opaque(threadIdx.x);
        constexpr unsigned units = HeadLayout<D>::units;
#pragma unroll
        for (unsigned i = 0; i < I::rows * units / threads; i++) {
            unsigned index = i * threads + thread, row = index / units, unit = index % units;
            const uint16_t* from = static_cast<const uint16_t*>(p.query) + int64_t(table.block[row]) * p.head_dim + unit * 8;
            cp_async_16(shared_query + row * I::row_bytes + unit * 16, from, int(row) < rows && int(unit * 8) < p.head_dim);
        }
        cp_async_commit();
        if (warp == 0) table.next.find(p.tiles, take_number(p.tiles));

        WarpAttention<T, D, I::m_tiles, I::keys> state;
        state.clear();
        BiasRows bias{};
        bias.stride = p.bias_strides[3];
#pragma unroll
        for (int m = 0; m < I::m_tiles; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = first_row + m * 16 + h * 8 + lane / 4;
                state.limit[m][h] = table.limit[row];
                if constexpr (BIAS) {
                    int head = table.block[row] % p.num_heads, token = table.block[row] / p.num_heads - batch * p.q_len;
                    int64_t offset = batch * p.bias_strides[0] + head * p.bias_strides[1] + token * p.bias_strides[2];
                    if (row < rows && p.bias != nullptr) bias.row[m][h] = static_cast<const uint16_t*>(p.bias) + offset;
                }
            }
        // Numbers of keys visible to the warp's first and last rows. A warp without rows only helps to load.
        int fewest = table.limit[first_row], most = first_row < rows ? table.limit[min(rows, first_row + warp_rows) - 1] : 0;
        float scale = p.scale * log2_e;
        int blocks = (keys + I::keys - 1) / I::keys;
#pragma unroll 1
        for (int block = 0; block < blocks; block++) {
            cp_async_wait<0>();
            __syncthreads();
            if (block + 1 < blocks) load(block + 1);
            if (block == 0) state.load_query(warp_query);
            int first = block * I::keys;
            if (first >= most) continue;
            const unsigned char* stage = stages + block % 2 * I::stage_bytes;
            state.template block<BIAS>(warp_query, stage, stage + I::stage_bytes / 2, first, first + I::keys > fewest, scale,
                                       bias);
        }
        cp_async_wait<0>();
        __syncthreads();
        state.finish();
        if (first_row < rows) write<T, I, D>(p, table, state, warp_query, first_row, rows);
    }
    int64_t all_blocks = int64_t(p.batch) * p.q_len * p.num_heads;
    write_zeros(p.output, p.gates, all_blocks, p.value_dim * 2, blockIdx.x * warps + warp, int64_t(gridDim.x) * warps);
}

} // namespace

// Grid: any number of blocks, ideally as many as are resident; shared memory: TileRows, rows * row_bytes, 2 *
// stage_bytes.
#define INSTANCE(type, width)                                                                                          \
    MOH_KERNEL(moh_attention_sm80_##type##_d##width, AttentionParams, 128, width <= 128 ? 2 : 1) {                     \
        attention<type, width, false>(p);                                                                              \
    }                                                                                                                  \
    MOH_KERNEL(moh_attention_sm80_##type##_d##width##_bias, AttentionParams, 128, 1) { attention<type, width, true>(p); }

#define INSTANCES(type)                                                                                                \
    INSTANCE(type, 32)                                                                                                 \
    INSTANCE(type, 64)                                                                                                 \
    INSTANCE(type, 72)                                                                                                 \
    INSTANCE(type, 96)                                                                                                 \
    INSTANCE(type, 128)                                                                                                \
    INSTANCE(type, 256)

INSTANCES(f16)
INSTANCES(bf16)
