// RoutedAttention in float32 arithmetic without tensor cores: for float32, and for 16-bit types whose widths or
// alignment tensor cores cannot take.
//
// A block of 256 threads processes tiles of the plan with ROWS rows each; 256 / ROWS threads share a row. Shared
// memory is float32. The row stride is an odd number of 16-byte units, so that eight consecutive rows are in different
// banks.

#include "base_two.cuh"
#include "device.cuh"
#include "key_range.cuh"
#include "params.h"
#include "tiles.cuh"
#include "zeros.cuh"

namespace {

constexpr int threads = 256, warps = threads / 32, keys_of_block = 32;
constexpr int width_of_block = 512; // elements of a key or value in shared memory at a time

// Row stride in units of 4 floats.
MOH_DEVICE int pitch_of(int width) { return (width + 3) / 4 | 1; }

// Converts rows of T to rows of floats. Elements beyond `width` and rows that are not `valid` become 0. row_of(i) is
// the address of row i, or null.
template <class T, class RowOf> MOH_DEVICE void load(float* shared, int pitch, int rows, int width, RowOf row_of) {
    for (int i = threadIdx.x; i < rows * pitch * 4; i += threads) {
        int row = i / (pitch * 4), d = i % (pitch * 4);
        const T* from = d < width ? row_of(row) : nullptr;
        shared[i] = from != nullptr ? to_float(from[d]) : 0.0f;
    }
}

template <class T, int ROWS> MOH_DEVICE void attention(const AttentionParams& p) {
    constexpr int per_row = threads / ROWS, per_thread = keys_of_block / per_row, chunks = 8;
    int query_pitch = pitch_of(p.head_dim);
    int key_pitch = pitch_of(min(p.head_dim, width_of_block)), value_pitch = pitch_of(min(p.value_dim, width_of_block));
    NextTile& next = *reinterpret_cast<NextTile*>(shared_memory());
    float4* query = reinterpret_cast<float4*>(shared_memory() + sizeof(NextTile));
    float4* block = query + ROWS * query_pitch; // a block of keys, later of values
    float* weights = reinterpret_cast<float*>(block + keys_of_block * max(key_pitch, value_pitch));
    expect_shared_memory(size_t(reinterpret_cast<unsigned char*>(weights + ROWS * (keys_of_block + 1)) - shared_memory()));
    int thread = threadIdx.x, row = thread / per_row, part = thread % per_row;
    int group = p.num_heads / p.kv_num_heads;
    float scale = p.scale * log2_e;

    wait_for_previous_kernel();
    if (thread < 32) next.start(p.tiles);
    for (;;) {
        __syncthreads();
        const int4 work = next.tile;
        if (work.z == 0) break;
        int batch = work.x / p.kv_num_heads, kv_head = work.x % p.kv_num_heads;
        const int32_t* entries = p.tiles.entries + int64_t(work.x) * p.q_len * group + work.y;
        auto block_of = [&](int entry) {
            return (int64_t(batch) * p.q_len + entry / group) * p.num_heads + kv_head * group + entry % group;
        };
        load<T>(reinterpret_cast<float*>(query), query_pitch, ROWS, p.head_dim, [&](int row) {
            return row < work.z ? static_cast<const T*>(p.query) + block_of(entries[row]) * p.head_dim : nullptr;
        });
        const KeyRange range(p, batch);
        // Of a cache, the plan does not know them.
        const int keys = p.first == nullptr ? work.w : range.sees(entries[work.z - 1] / group);
        const T* key = static_cast<const T*>(p.key) + batch * p.key_strides[0] + kv_head * p.key_strides[1] +
                       range.first * p.key_strides[2];
        const T* value = static_cast<const T*>(p.value) + batch * p.value_strides[0] + kv_head * p.value_strides[1] +
                         range.first * p.value_strides[2];

        int entry = row < work.z ? entries[row] : 0, token = entry / group;
        int limit = row >= work.z ? 0 : min(keys, range.sees(token));
        const T* bias = nullptr;
        if (p.bias != nullptr)
            bias = static_cast<const T*>(p.bias) + batch * p.bias_strides[0] +
                   (kv_head * group + entry % group) * p.bias_strides[1] + token * p.bias_strides[2];

        float4 out[chunks];
#pragma unroll
        for (int c = 0; c < chunks; c++) out[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float maximum = -INFINITY, sum = 0.0f;
        __syncthreads(); // all warps have read the tile
        if (thread < 32) next.find(p.tiles, take_number(p.tiles));
        for (int first = 0; first < keys; first += keys_of_block) {
            float score[per_thread] = {};
            for (int from = 0; from < p.head_dim; from += width_of_block) {
                int width = min(width_of_block, p.head_dim - from);
                __syncthreads();
                load<T>(reinterpret_cast<float*>(block), key_pitch, keys_of_block, width,
                        [&](int j) { return first + j < keys ? key + (first + j) * p.key_strides[2] + from : nullptr; });
                __syncthreads();
                const float4* own = query + row * query_pitch + from / 4;
                for (int d = 0; d < (width + 3) / 4; d++) {
                    float4 q = own[d];
#pragma unroll
                    for (int j = 0; j < per_thread; j++) {
                        float4 k = block[(part + j * per_row) * key_pitch + d];
                        score[j] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, score[j]))));
                    }
                }
            }
            float now = maximum;
#pragma unroll
            for (int j = 0; j < per_thread; j++) {
                int seen = first + part + j * per_row;
                if (seen < limit) {
                    score[j] *= scale;
                    if (bias != nullptr) score[j] += bias_in_base_two(bias[seen * p.bias_strides[3]]);
                } else {
                    score[j] = -INFINITY;
                }
                now = fmaxf(now, score[j]);
            }
#pragma unroll
            for (int step = 1; step < per_row; step *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, step));
            // If all keys so far are masked, any finite base will do: the weights are 2^-inf = 0.
            float base = now == -INFINITY ? 0.0f : now;
            float factor = exp2_approx(maximum - base);
            maximum = now;
            sum *= factor;
#pragma unroll
            for (int j = 0; j < per_thread; j++) {
                float weight = exp2_approx(score[j] - base);
                sum += weight;
                weights[row * (keys_of_block + 1) + part + j * per_row] = weight;
            }
#pragma unroll
            for (int c = 0; c < chunks; c++) {
                out[c].x *= factor, out[c].y *= factor, out[c].z *= factor, out[c].w *= factor;
            }
            for (int from = 0; from < p.value_dim; from += width_of_block) {
                int width = min(width_of_block, p.value_dim - from);
                __syncthreads();
                load<T>(reinterpret_cast<float*>(block), value_pitch, keys_of_block, width,
                        [&](int j) { return first + j < keys ? value + (first + j) * p.value_strides[2] + from : nullptr; });
                __syncthreads();
                for (int j = 0; j < keys_of_block; j++) {
                    float weight = weights[row * (keys_of_block + 1) + j];
#pragma unroll
                    for (int c = 0; c < chunks; c++) {
                        int column = part + c * per_row - from / 4;
                        if (column < 0 || column * 4 >= width) continue;
                        float4 v = block[j * value_pitch + column];
                        out[c].x = fmaf(weight, v.x, out[c].x);
                        out[c].y = fmaf(weight, v.y, out[c].y);
                        out[c].z = fmaf(weight, v.z, out[c].z);
                        out[c].w = fmaf(weight, v.w, out[c].w);
                    }
                }
            }
        }
#pragma unroll
        for (int step = 1; step < per_row; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (row >= work.z) continue;
        int64_t to = block_of(entry);
        // All keys are masked: the output is exactly 0, even if values are NaN.
        bool dead = sum == 0.0f;
        float factor = __ldg(p.gates + to) / sum;
        T* output = static_cast<T*>(p.output) + to * p.value_dim;
#pragma unroll
        for (int c = 0; c < chunks; c++) {
            float x[4] = {out[c].x, out[c].y, out[c].z, out[c].w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int d = (part + c * per_row) * 4 + e;
                if (d < p.value_dim) output[d] = from_float<T>(dead ? 0.0f : x[e] * factor);
            }
        }
    }
    write_zeros(p.output, p.gates, int64_t(p.batch) * p.q_len * p.num_heads, p.value_dim * int(sizeof(T)),
                blockIdx.x * warps + thread / 32, int64_t(gridDim.x) * warps);
}

} // namespace

// Grid: any number of blocks. Shared memory: 32 bytes, ROWS rows of queries, 32 of up to 512 elements of keys or values, ROWS *
// 33 floats of weights. Maximum head width: 256, or 1024 in the _wide instances.
#define INSTANCE(type, T)                                                                                              \
    MOH_KERNEL(moh_attention_simt_##type, AttentionParams, 256, 1) { attention<T, 32>(p); }                            \
    MOH_KERNEL(moh_attention_simt_##type##_wide, AttentionParams, 256, 1) { attention<T, 8>(p); }

INSTANCE(f32, float)
INSTANCE(f16, f16)
INSTANCE(bf16, bf16)
