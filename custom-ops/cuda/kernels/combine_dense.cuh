// The dense kernel of a combination: multiplies consecutive tokens by all heads that any of them uses.
#pragma once

#include "combine.cuh"

namespace {

// The sum over a token's heads for one column, computed serially.
template <class T, int layout> __device__ __noinline__ float sum_alone(const LinearParams& p, int token, int column) {
    float sum = 0.0f;
    for (int head = 0; head < p.heads; head++) {
        if (p.gates[int64_t(token) * p.heads + head] == 0.0f) continue;
        const T* x = static_cast<const T*>(p.x) + token * p.x_row + head * p.x_head;
        const T* weight = static_cast<const T*>(p.weight) + head * p.weight_head;
        for (int k = 0; k < p.depth; k++)
            sum = fmaf(to_float(x[k]), to_float(weight[layout == 0 ? column * p.weight_row + k : k * p.weight_row + column]), sum);
    }
    return sum;
}

template <class Tile, bool aligned> struct Dense {
    using T = typename Tile::T;
    static constexpr int elements = chunk_elements<T>, words = Tile::rows / 32;
    // Inner elements that belong to one head, and their number per step.
    static constexpr int granule = aligned ? elements : 1, granules = Tile::depth / granule;

    static MOH_DEVICE void run(const LinearParams& p) {
        wait_for_previous_kernel();
        const int thread = int(threadIdx.x);
        const int column = column_block(p) * Tile::columns, first = row_block(p) * Tile::rows;
        const int rows = min(Tile::rows, p.tokens - first);
        const int depth = p.heads * p.depth, all_steps = (depth + Tile::depth - 1) / Tile::depth;
        unsigned char* memory = shared_memory();
        int* steps = reinterpret_cast<int*>(memory + Tile::stages * Tile::stage_bytes);  // the steps with a head in use
        int* scratch = steps + all_steps;                                                // 8 integers
        uint32_t* bits = reinterpret_cast<uint32_t*>(scratch + 8);
        int16_t* owner = reinterpret_cast<int16_t*>(bits + (p.heads + 31) / 32 * 32 * words);
        expect_shared_memory(size_t(reinterpret_cast<unsigned char*>(owner + all_steps * granules) - memory));
        if (is_routed(p, rows, count_on(p.gates + int64_t(first) * p.heads, rows * p.heads, scratch))) return;
        gather_bits(p, first, rows, 0, p.heads, bits, words, Tile::threads / 32);
        __syncthreads();
        for (int i = thread; i < all_steps * granules; i += Tile::threads) owner[i] = owner_of(p, bits, i * granule, depth);
        __syncthreads();
        if (thread < 32) list_steps(all_steps, owner, steps, scratch);
        __syncthreads();

        constexpr int a_rows = Tile::rows / Tile::a_chunks, b_step = Tile::threads / Tile::b_chunks;
        const int a_row = thread / Tile::a_chunks, a_chunk = thread % Tile::a_chunks;
        const int b_row = thread / Tile::b_chunks, b_chunk = thread % Tile::b_chunks;
        const T* x = static_cast<const T*>(p.x) + (first + a_row) * p.x_row + a_chunk * elements;
        const T* weight = static_cast<const T*>(p.weight);
        weight += Tile::layout == 0 ? (column + b_row) * p.weight_row + b_chunk * elements
                                    : b_row * p.weight_row + column + b_chunk * elements;
        typename Tile::Sums sums;
        Tile::accumulate(sums, memory, scratch[0], [&](int index, unsigned char* a, unsigned char* b) {
            const int step = steps[index] * Tile::depth;
            const int16_t* owners = owner + step / granule;
#pragma unroll
            for (int i = 0; i < Tile::a_chunks; i++) {
                const int row = a_row + i * a_rows;
                unsigned char* to = chunk_at<Tile::a_chunks>(a, row, a_chunk);
                const T* from = x + i * a_rows * p.x_row + step;
                auto is_on = [&](int head) { return head >= 0 && (bits[head * words + row / 32] >> (row % 32) & 1); };
                if (aligned)
                    copy_chunk<T, true>(to, from, is_on(owners[a_chunk]));
                else
                    for (int e = 0; e < elements; e++)
                        reinterpret_cast<T*>(to)[e] = is_on(owners[a_chunk * elements + e]) ? from[e] : from_float<T>(0.0f);
            }
            // Weights that no token of the tile uses may be NaN, and 0 * NaN is NaN: they are replaced by 0.
#pragma unroll
            for (int i = 0; i < Tile::b_rows; i += b_step) {
                const int row = b_row + i;
                unsigned char* to = chunk_at<Tile::b_chunks>(b, row, b_chunk);
                if (Tile::layout == 1) {
                    copy_chunk<T, aligned>(to, weight + int64_t(step + i) * p.weight_row,
                                           owners[row / granule] >= 0 ? p.columns - column - b_chunk * elements : 0);
                    continue;
                }
                const T* from = weight + int64_t(i) * p.weight_row + step;
                const bool inside = column + row < p.columns;
                if (aligned)
                    copy_chunk<T, true>(to, from, inside && owners[b_chunk] >= 0);
                else
                    for (int e = 0; e < elements; e++)
                        reinterpret_cast<T*>(to)[e] =
                            inside && owners[b_chunk * elements + e] >= 0 ? from[e] : from_float<T>(0.0f);
            }
        });

        constexpr int pitch = Tile::columns + 4;
        static_assert(Tile::rows * pitch * 4 <= Tile::stages * Tile::stage_bytes, "the sums reuse the stages' memory");
        const Lane lane;
        const int own = thread & ~31;
        float* staged = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int j = 0; j < Tile::fragments; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *reinterpret_cast<float2*>(staged + (own + 16 * i + 8 * half + lane.group) * pitch + 8 * j + 2 * lane.pair) =
                        make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        __syncwarp();
        constexpr int width = aligned ? elements : 1, chunks = Tile::columns / width;
        for (int i = lane.index; i < 32 * chunks; i += 32) {
            int row = own + i / chunks, n = i % chunks * width;
            if (row >= rows) continue;
            float* at = staged + row * pitch + n;
            // Not finite: possibly 0 * infinity or 0 * NaN from the weight of a head that this token does not use.
            // Recomputed without it.
#pragma unroll
            for (int e = 0; e < width; e++)
                if (!(fabsf(at[e]) <= 3.4028235e38f) && column + n + e < p.columns)
                    at[e] = sum_alone<T, Tile::layout>(p, first + row, column + n + e);
            store<T, aligned>(p, first + row, column + n, at);
        }
    }

    // The head of inner index k; -1 if no token of the tile uses it.
    static MOH_DEVICE int16_t owner_of(const LinearParams& p, const uint32_t* bits, int k, int depth) {
        if (k >= depth) return -1;
        const int head = k / p.depth;
        uint32_t any = 0;
#pragma unroll
        for (int word = 0; word < words; word++) any |= bits[head * words + word];
        return int16_t(any != 0 ? head : -1);
    }

    // Lists the steps of the inner dimension with a head in use; writes their number to count[0].
    static MOH_DEVICE void list_steps(int all_steps, const int16_t* owner, int* steps, int* count) {
        const int lane = int(threadIdx.x);
        int listed = 0;
        for (int base = 0; base < all_steps; base += 32) {
            bool used = false;
            if (base + lane < all_steps)
                for (int i = 0; i < granules; i++) used = used || owner[(base + lane) * granules + i] >= 0;
            uint32_t all = __ballot_sync(0xffffffffu, used);
            if (used) steps[listed + __popc(all & ((1u << lane) - 1))] = base + lane;
            listed += __popc(all);
        }
        if (lane == 0) count[0] = listed;
    }
};

} // namespace
