// RoutedAttention in f16 and bf16 with mma.sync, for compute capability 8.0 and later: flash attention over gathered query rows.
//
// A block takes tiles of the plan: rows of the query heads of one KV head. Four warps share the key and value blocks, which
// arrive two deep by cp.async, and own 16 or 32 rows each. Widths and strides are multiples of 8 elements, and tensors are
// aligned to 16 bytes; attention_simt.cu takes the rest.

// moh: spill-limit 64

#include "device.cuh"
#include "mma_attention.cuh"
#include "params.h"
#include "zeros.cuh"

namespace {

constexpr int threads = 128, warps = 4;

// The instance for heads up to D wide; the same figures as in src/cuda/routed_attention.rs.
template <int D, bool BIAS> struct Instance {
    static constexpr int m_tiles = D <= 128 ? 2 : 1;
    static constexpr int rows = warps * m_tiles * 16;
    static constexpr int keys = D <= 80 && !BIAS ? 64 : D <= 96 || !BIAS ? 32 : 16; // of a block
    static constexpr int row_bytes = HeadLayout<D>::row_bytes;
    static constexpr int stage_bytes = 2 * keys * row_bytes; // keys, then values
};

MOH_DEVICE const int32_t* entries_of(const AttentionParams& p, const int4& work) {
    return p.entries + int64_t(work.x) * p.q_len * (p.num_heads / p.kv_num_heads) + work.y;
}

// The number of an entry's (token, head) in the query, the gates and the output.
MOH_DEVICE int64_t block_of(const AttentionParams& p, int list, int entry) {
    int group = p.num_heads / p.kv_num_heads;
    int64_t token = int64_t(list / p.kv_num_heads) * p.q_len + entry / group;
    return token * p.num_heads + list % p.kv_num_heads * group + entry % group;
}

// Gates and writes the warp's rows, through its query's place in shared memory, so that whole rows are written at once.
template <class T, class I, int D, class Warp>
MOH_DEVICE void write(const AttentionParams& p, int4 work, const Warp& state, unsigned char* staging, int first_row) {
    constexpr int units = HeadLayout<D>::value_tiles;
    const int32_t* entries = entries_of(p, work) + first_row;
    int lane = threadIdx.x % 32, rows = work.z - first_row;
    if (rows <= 0) return;
#pragma unroll
    for (int m = 0; m < I::m_tiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = m * 16 + h * 8 + lane / 4;
            float gate = row < rows ? __ldg(p.gates + block_of(p, work.x, __ldg(entries + row))) : 0.0f;
            // No key was seen: exactly 0, whatever the values hold.
            bool dead = state.sum[m][h] == 0.0f;
            float factor = gate / state.sum[m][h];
#pragma unroll
            for (int n = 0; n < units; n++) {
                float lo = dead ? 0.0f : state.out[m][n][2 * h] * factor;
                float hi = dead ? 0.0f : state.out[m][n][2 * h + 1] * factor;
                *reinterpret_cast<uint32_t*>(staging + row * I::row_bytes + n * 16 + lane % 4 * 4) = pack<T>(lo, hi);
            }
        }
    __syncwarp();
    for (int i = lane; i < I::m_tiles * 16 * units; i += 32) {
        int row = i / units, unit = i % units;
        if (row >= rows || unit * 8 >= p.value_dim) continue;
        int64_t to = block_of(p, work.x, __ldg(entries + row)) * p.value_dim + unit * 8;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.output) + to) =
            *reinterpret_cast<const uint4*>(staging + row * I::row_bytes + unit * 16);
    }
}

template <class T, int D, bool BIAS> MOH_DEVICE void attention(const AttentionParams& p) {
    using I = Instance<D, BIAS>;
    using Warp = WarpAttention<T, D, I::m_tiles, I::keys>;
    constexpr int warp_rows = 16 * I::m_tiles;
    // What is needed again after the main loop waits in shared memory: registers are scarce.
    int4* shared_work = reinterpret_cast<int4*>(shared_memory());
    int* next_tile = reinterpret_cast<int*>(shared_memory() + 16);
    unsigned char* shared_query = shared_memory() + 32;
    unsigned char* stages = shared_query + I::rows * I::row_bytes;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint16_t* query = static_cast<const uint16_t*>(p.query);
    unsigned char* warp_query = shared_query + warp * warp_rows * I::row_bytes;

    int tiles = p.tile_count[0];
    for (int tile = blockIdx.x; tile < tiles;) {
        // Everybody has read the last tile's number and is done with its shared memory.
        __syncthreads();
        int4 work = __ldg(reinterpret_cast<const int4*>(p.tiles) + tile);
        if (thread == 0) {
            *shared_work = work;
            *next_tile = gridDim.x + atomicAdd(p.next, 1);
        }
        int rows = work.z, keys = work.w;
        int group = p.num_heads / p.kv_num_heads, batch = work.x / p.kv_num_heads, kv_head = work.x % p.kv_num_heads;
        const int32_t* entries = entries_of(p, work);

        const uint16_t* key = static_cast<const uint16_t*>(p.key) + batch * p.key_batch + kv_head * p.key_head;
        const uint16_t* value = static_cast<const uint16_t*>(p.value) + batch * p.value_batch + kv_head * p.value_head;
        auto load = [&](int block) {
            int thread = opaque(threadIdx.x);
            unsigned char* stage = stages + block % 2 * I::stage_bytes;
            load_rows<D, I::keys, threads>(stage, key, p.key_token, block * I::keys, keys, p.head_dim, thread);
            load_rows<D, I::keys, threads>(stage + I::stage_bytes / 2, value, p.value_token, block * I::keys, keys,
                                           p.value_dim, thread);
            cp_async_commit();
        };

        constexpr int units = HeadLayout<D>::units;
#pragma unroll
        for (int i = 0; i < I::rows * units / threads; i++) {
            int index = i * threads + thread, row = index / units, unit = index % units;
            bool valid = row < rows && unit * 8 < p.head_dim;
            const uint16_t* from = valid ? query + block_of(p, work.x, __ldg(entries + row)) * p.head_dim + unit * 8 : query;
            cp_async_16(shared_query + row * I::row_bytes + unit * 16, from, valid);
        }
        int blocks = (keys + I::keys - 1) / I::keys;
        load(0); // without keys these are zeros, and the group that carries the query

        Warp state;
        state.clear();
        BiasRows bias{};
        bias.stride = p.bias_strides[3];
        int first_row = warp * warp_rows;
        bool busy = first_row < rows; // the warp has rows at all
        int fewest = keys, most = 0;  // keys that the warp's first and last rows see
#pragma unroll
        for (int m = 0; m < I::m_tiles; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = first_row + m * 16 + h * 8 + lane / 4;
                int entry = row < rows ? __ldg(entries + row) : 0, token = entry / group;
                int sees = p.is_causal ? max(0, min(keys, token + 1 + p.kv_len - p.q_len)) : keys;
                state.limit[m][h] = row < rows ? sees : 0;
                if constexpr (BIAS) {
                    bool reads = row < rows && p.bias != nullptr;
                    int head = kv_head * group + entry % group;
                    int64_t offset = batch * p.bias_strides[0] + head * p.bias_strides[1] + token * p.bias_strides[2];
                    bias.row[m][h] = reads ? static_cast<const uint16_t*>(p.bias) + offset : nullptr;
                }
            }
        if (p.is_causal && busy) {
            auto sees = [&](int row) {
                int token = __ldg(entries + row) / group;
                return max(0, min(keys, token + 1 + p.kv_len - p.q_len));
            };
            fewest = sees(first_row);
            most = sees(min(rows, first_row + warp_rows) - 1);
        } else if (busy) {
            most = keys;
        }

        float scale = p.scale * log2_e;
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
        tile = *next_tile;
        write<T, I, D>(p, *shared_work, state, warp_query, first_row);
    }
    int64_t all_blocks = int64_t(p.batch) * p.q_len * p.num_heads;
    write_zeros(p.output, p.gates, all_blocks, p.value_dim * 2, blockIdx.x * warps + warp, int64_t(gridDim.x) * warps);
}

} // namespace

// Grid: any number of blocks, best as many as run at once; shared memory: 32 + rows * row_bytes + 2 * stage_bytes of the instance.
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
