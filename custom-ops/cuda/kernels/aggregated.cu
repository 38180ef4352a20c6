// RoutedAggregatedAttention: TransNeXt's attention to a window and to pooled tokens, computed for the heads that are
// on.
//
// A thread block processes queries of one head that are close to each other in the grid. A query has several lanes,
// each with some of its elements. Pooled keys (normalised) and values are staged in shared memory, a part at a time.
// The window's keys and values are read from global memory; neighbouring queries share them through the caches. The
// running softmax covers the window first, then the pooled tokens.
#include "params.h"
#include "device.cuh"
#include "zeros.cuh"

namespace {

constexpr int threads = 128;

// `lanes` lanes per query, with `own` elements each: element i of lane l is i * lanes + l.
template <class T, int lanes, int own> struct Aggregated {
    static constexpr int queries = threads / lanes, padded = lanes * own;
    static constexpr int keys = padded > 256 ? 16 : 32;  // pooled tokens in shared memory at a time

    static MOH_DEVICE float sum(float x) {
        for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
        return x;
    }

    const AggregatedParams& p;
    const int lane;   // index within the query's lanes
    const int batch, head;

    // This lane's elements of a row; 0 beyond its end, or if not `valid`.
    MOH_DEVICE void read(float (&to)[own], const void* rows, int64_t row, bool valid) const {
        const T* from = static_cast<const T*>(rows) + (row * p.heads + head) * p.dim;
#pragma unroll
        for (int i = 0; i < own; i++) {
            int d = i * lanes + lane;
            to[i] = valid && d < p.dim ? to_float(from[d]) : 0.0f;
        }
    }

    // 1 / max(length, 1e-12); NaN if the row contains NaN.
    static MOH_DEVICE float factor(const float (&row)[own]) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < own; i++) squares = fmaf(row[i], row[i], squares);
        float length = sqrtf(sum(squares));
        return length < 1e-12f ? 1e12f : 1.0f / length;
    }

    static MOH_DEVICE float dot(const float (&a)[own], const float (&b)[own]) {
        float products = 0.0f;
#pragma unroll
        for (int i = 0; i < own; i++) products = fmaf(a[i], b[i], products);
        return sum(products);
    }

    struct Softmax {
        float max, weight, values[own];
        // Adds a score to the running softmax and rescales the accumulators. Returns the weight of its value; -inf
        // adds nothing.
        MOH_DEVICE float next(float score) {
            float larger = fmaxf(max, score);
            if (larger == -INFINITY && score == score) return 0.0f;
            float scale = expf(max - larger), factor = expf(score - larger);
            if (max == -INFINITY) scale = 0.0f;
            max = larger;
            weight = weight * scale + factor;
#pragma unroll
            for (int i = 0; i < own; i++) values[i] *= scale;
            return factor;
        }
    };

    MOH_DEVICE void run(int first) const {
        // Queries are processed in squares of 4 by 4 grid cells, in row-major order, so that their windows overlap.
        const int tokens = p.height * p.width, cells = p.window * p.window, reach = p.window / 2;
        const int squares = (p.width + 3) / 4;
        const int place = first + int(threadIdx.x) / lanes;
        const int y = place / 16 / squares * 4 + place % 16 / 4, x = place / 16 % squares * 4 + place % 4;
        const int token = y * p.width + x;
        const int64_t row = int64_t(batch) * tokens + token;
        const bool inside = y < p.height && x < p.width;
        const float gate = inside ? p.gates[row * p.heads + head] : 0.0f;
        const bool on = gate != 0.0f;
        float* pooled_keys = reinterpret_cast<float*>(shared_memory());
        float* pooled_values = pooled_keys + keys * padded;
        int* any = reinterpret_cast<int*>(pooled_values + keys * padded);
        const bool warp_on = __any_sync(0xffffffffu, on);
        if ((threadIdx.x & 31) == 0) any[threadIdx.x / 32] = warp_on;
        __syncthreads();
        bool block_on = false;
        for (int warp = 0; warp < threads / 32; warp++) block_on = block_on || any[warp] != 0;
        if (!block_on) return;

        float unit[own], score_query[own], learnt[own] = {};
        read(unit, p.query, row, on);
        const float length = factor(unit);
        const float scale = on ? p.query_scale[int64_t(token) * p.heads + head] : 0.0f;
        const T* embedding = static_cast<const T*>(p.query_embedding) + head * p.dim;
        Softmax softmax;
        softmax.max = -INFINITY;
        softmax.weight = 0.0f;
#pragma unroll
        for (int i = 0; i < own; i++) {
            int d = i * lanes + lane;
            unit[i] *= length;
            score_query[i] = d < p.dim ? (unit[i] + to_float(embedding[d])) * scale : 0.0f;
            softmax.values[i] = 0.0f;
        }

        if (warp_on) {
            const T* local_bias = static_cast<const T*>(p.local_bias) + head * cells;
            const T* learnable_bias = static_cast<const T*>(p.learnable_bias) + head * cells;
            const T* learnable = static_cast<const T*>(p.learnable_tokens) + int64_t(head) * p.dim * cells;
            for (int cell = 0; cell < cells; cell++) {
                int near_y = y + cell / p.window - reach, near_x = x + cell % p.window - reach;
                bool there = on && near_y >= 0 && near_y < p.height && near_x >= 0 && near_x < p.width;
                int64_t near = int64_t(batch) * tokens + near_y * p.width + near_x;
                float key[own], value[own], added[own];
                read(key, p.key, near, there);
                read(value, p.value, near, there);
#pragma unroll
                for (int i = 0; i < own; i++) {
                    int d = i * lanes + lane;
                    added[i] = there && d < p.dim ? to_float(learnable[int64_t(d) * cells + cell]) : 0.0f;
                }
                const float norm = factor(key);
#pragma unroll
                for (int i = 0; i < own; i++) key[i] *= norm;
                float score = dot(score_query, key), fixed = dot(unit, added);
                if (!there) continue;
                const float weight = softmax.next(score + to_float(local_bias[cell]));
                fixed += to_float(learnable_bias[cell]);
#pragma unroll
                for (int i = 0; i < own; i++) {
                    softmax.values[i] = fmaf(weight, value[i], softmax.values[i]);
                    learnt[i] = fmaf(fixed, value[i], learnt[i]);
                }
            }
        }

        const T* pooled_bias = static_cast<const T*>(p.pooled_bias) + (int64_t(head) * tokens + (on ? token : 0)) * p.pooled;
        for (int start = 0; start < p.pooled; start += keys) {
            const int count = min(keys, p.pooled - start);
            __syncthreads();
            for (int base = 0; base < keys; base += queries) {
                int key = base + int(threadIdx.x) / lanes;
                float row[own], value[own];
                bool valid = key < count;
                read(row, p.pooled_key, int64_t(batch) * p.pooled + start + key, valid);
                read(value, p.pooled_value, int64_t(batch) * p.pooled + start + key, valid);
                const float norm = factor(row);
                if (key >= keys) continue;
#pragma unroll
                for (int i = 0; i < own; i++) {
                    pooled_keys[key * padded + i * lanes + lane] = row[i] * norm;
                    pooled_values[key * padded + i * lanes + lane] = value[i];
                }
            }
            __syncthreads();
            if (!warp_on) continue;
            for (int key = 0; key < count; key++) {
                float row[own];
#pragma unroll
                for (int i = 0; i < own; i++) row[i] = pooled_keys[key * padded + i * lanes + lane];
                float score = dot(score_query, row);
                if (!on) continue;
                const float weight = softmax.next(score + to_float(pooled_bias[start + key]));
#pragma unroll
                for (int i = 0; i < own; i++)
                    softmax.values[i] = fmaf(weight, pooled_values[key * padded + i * lanes + lane], softmax.values[i]);
            }
        }
        if (!on) return;
        T* output = static_cast<T*>(p.output) + (row * p.heads + head) * p.dim;
#pragma unroll
        for (int i = 0; i < own; i++) {
            int d = i * lanes + lane;
            if (d < p.dim) output[d] = from_float<T>(gate * (softmax.values[i] / softmax.weight + learnt[i]));
        }
    }
};

// Grid: (for each image, blocks of queries, followed by blocks that write zeros; heads): along z there could be too many images.
template <class T, int lanes, int own> MOH_DEVICE void aggregated(const AggregatedParams& p) {
    constexpr int queries = threads / lanes;
    const int squares = (p.height + 3) / 4 * ((p.width + 3) / 4), blocks = (squares * 16 + queries - 1) / queries;
    const int blocks_of_image = int(gridDim.x) / p.batch, image = int(blockIdx.x) / blocks_of_image;
    const int own_block = int(blockIdx.x) % blocks_of_image;
    if (own_block < blocks) {
        const Aggregated<T, lanes, own> call{p, int(threadIdx.x) % lanes, image, int(blockIdx.y)};
        call.run(own_block * queries);
        return;
    }
    const int64_t zeros = blocks_of_image - blocks, warps = zeros * p.batch * gridDim.y * (threads / 32);
    const int64_t block = (int64_t(image) * gridDim.y + blockIdx.y) * zeros + own_block - blocks;
    write_zeros(p.output, p.gates, int64_t(p.batch) * p.height * p.width * p.heads, p.dim * int(sizeof(T)),
                block * (threads / 32) + threadIdx.x / 32, warps);
}

} // namespace

// moh_aggregated_<type>_<maximum head width>
#define MOH_AGGREGATED(type, lanes, own, width)                                                                        \
    MOH_KERNEL(moh_aggregated_##type##_##width, AggregatedParams, 128, 1) { aggregated<type, lanes, own>(p); }
#define MOH_AGGREGATED_ALL(type)                                                                                       \
    MOH_AGGREGATED(type, 4, 8, 32)                                                                                     \
    MOH_AGGREGATED(type, 8, 8, 64)                                                                                     \
    MOH_AGGREGATED(type, 16, 8, 128)                                                                                   \
    MOH_AGGREGATED(type, 32, 8, 256)                                                                                   \
    MOH_AGGREGATED(type, 32, 16, 512)
MOH_AGGREGATED_ALL(f16)
MOH_AGGREGATED_ALL(bf16)
MOH_AGGREGATED_ALL(float)
