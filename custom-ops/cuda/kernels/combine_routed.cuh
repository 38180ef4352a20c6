// The routed kernel of a combination: head by head, only the rows that are on.
//
// If there are few tiles, several blocks compute one, each a part of every head's inner dimension; another kernel adds
// the partial sums.
#pragma once

#include "combine.cuh"
#include "combine_check.cuh"
#include "linear.cuh"

namespace {

// A tile of `tokens` tokens and 128 columns, computed by 8 warps: 2 along a head's rows, in steps of 128 rows, and 4
// along the columns.
template <class T, int layout, int tokens, int stages, bool aligned> struct Routed {
    static constexpr int columns = 128, threads = 256, rows = 128, pitch = columns + 8, words = tokens / 32;
    static constexpr int elements = chunk_elements<T>, a_chunks = 4, depth = a_chunks * elements;
    static constexpr int b_rows = layout == 0 ? columns : depth, b_chunks = (layout == 0 ? depth : columns) / elements;
    static constexpr int a_bytes = rows * a_chunks * 16, stage_bytes = a_bytes + b_rows * b_chunks * 16;
    static constexpr int heads = 32;  // listed at a time
    static_assert(tokens <= 256, "a row's index is a byte");

    // Iterates over the products: for each head, 128 rows and a part of the inner dimension at a time.
    struct Step {
        const int begin, end; // part of the inner dimension
        int head, row, k;
        MOH_DEVICE explicit Step(const LinearParams& p)
            : begin(int(blockIdx.z) * p.part_depth), end(min(p.depth, begin + p.part_depth)) {}
        MOH_DEVICE void start(const int* counts, int listed) { head = -1, next_head(counts, listed); }
        MOH_DEVICE void next_head(const int* counts, int listed) {
            row = 0, k = begin;
            do head++;
            while (head < listed && counts[head] == 0);
        }
        MOH_DEVICE void advance(const int* counts, int listed) {
            k += depth;
            if (k < end) return;
            k = begin;
            row += rows;
            if (row >= counts[head]) next_head(counts, listed);
        }
    };

    static MOH_DEVICE void run(const LinearParams& p) {
        start_next_kernel();
        wait_for_previous_kernel();
        if (p.capacity > 0 && pairs_on(p) <= p.capacity) return; // expert_products_sm90.cu has computed them
        if (is_done(p)) return;
        const int first = row_block(p) * tokens, count = min(tokens, p.tokens - first);
        unsigned char* memory = shared_memory();
        float* sums = reinterpret_cast<float*>(memory + stages * stage_bytes);
        uint32_t* bits = reinterpret_cast<uint32_t*>(sums + tokens * pitch);
        int* counts = reinterpret_cast<int*>(bits + heads * words);
        uint8_t* lists = reinterpret_cast<uint8_t*>(counts + heads);
        expect_shared_memory(size_t(lists + heads * tokens - memory));
        if (!is_routed(p, count, count_on(p.gates + int64_t(first) * p.heads, count * p.heads, counts))) return;
        if (tokens == 64) {
            // No loop, so that registers suffice for two blocks per multiprocessor.
            tile(p, first, count, column_block(p) * columns, memory, sums, bits, counts, lists);
            return;
        }
        // Few blocks for all columns: if this kernel is not the chosen one, they only count gates.
        for (int column = column_block(p) * columns; column < p.columns; column += p.column_blocks * columns) {
            tile(p, first, count, column, memory, sums, bits, counts, lists);
            __syncthreads();
        }
    }

    static MOH_DEVICE void tile(const LinearParams& p, int first, int count, int column, unsigned char* memory, float* sums,
                                uint32_t* bits, int* counts, uint8_t* lists) {
        const int thread = int(threadIdx.x), warp = thread / 32;
        for (int i = thread; i < tokens * pitch; i += threads) sums[i] = 0.0f;
        for (int first_head = 0; first_head < p.heads; first_head += heads) {
            const int listed = min(heads, p.heads - first_head);
            __syncthreads();
            gather_bits(p, first, count, first_head, listed, bits, words, threads / 32);
            __syncthreads();
            for (int head = warp; head < heads; head += threads / 32) list(bits + head * words, counts + head, lists + head * tokens);
            __syncthreads();
            multiply(p, first, column, first_head, listed, memory, sums, counts, lists);
        }
        __syncthreads();
        constexpr int width = aligned ? elements : 1, chunks = columns / width;
        for (int i = thread; i < count * chunks; i += threads) {
            int row = i / chunks, n = i % chunks * width;
            if (p.partial)
                store_part<width>(p, first + row, column + n, sums + row * pitch + n);
            else
                store<T, aligned>(p, first + row, column + n, sums + row * pitch + n);
        }
    }

    template <int width> static MOH_DEVICE void store_part(const LinearParams& p, int token, int column, const float* sums) {
        if (column >= p.columns) return;
        float* at = p.partial + (int64_t(blockIdx.z) * p.tokens + token) * p.columns + column;
#pragma unroll
        for (int e = 0; e < width; e++) at[e] = sums[e];
    }

    // Lists a head's rows, ascending; runs on one warp.
    static MOH_DEVICE void list(const uint32_t* bits, int* count, uint8_t* rows) {
        const int lane = int(threadIdx.x & 31);
        int listed = 0;
        for (int word = 0; word < words; word++) {
            uint32_t on = bits[word];
            if (on >> lane & 1) rows[listed + __popc(on & ((1u << lane) - 1))] = uint8_t(word * 32 + lane);
            listed += __popc(on);
        }
        if (lane == 0) *count = listed;
    }

    static MOH_DEVICE void copy(const LinearParams& p, const Step& step, int first, int column, int first_head, unsigned char* a,
                                const int* counts, const uint8_t* lists) {
        const int thread = int(threadIdx.x), head = first_head + step.head;
        const int count = min(rows, counts[step.head] - step.row);
        unsigned char* b = a + a_bytes;
        const int chunk = thread % a_chunks, k = step.k + chunk * elements;
        const T* x = static_cast<const T*>(p.x) + head * p.x_head + k;
#pragma unroll
        for (int i = 0; i < rows; i += threads / a_chunks) {
            int row = thread / a_chunks + i;
            if (row >= count) continue;  // nothing reads the sums of these rows
            int token = first + lists[step.head * tokens + step.row + row];
            copy_chunk<T, aligned>(chunk_at<a_chunks>(a, row, chunk), x + token * p.x_row, p.depth - k);
        }
        const int b_row = thread / b_chunks, b_chunk = thread % b_chunks;
        const T* weight = static_cast<const T*>(p.weight) + head * p.weight_head;
#pragma unroll
        for (int i = 0; i < b_rows; i += threads / b_chunks) {
            int row = b_row + i;
            unsigned char* to = chunk_at<b_chunks>(b, row, b_chunk);
            if (layout == 0) {
                int inner = step.k + b_chunk * elements;
                copy_chunk<T, aligned>(to, weight + (column + row) * p.weight_row + inner,
                                       column + row < p.columns ? p.depth - inner : 0);
            } else {
                int n = column + b_chunk * elements;
                copy_chunk<T, aligned>(to, weight + (step.k + row) * p.weight_row + n, step.k + row < p.depth ? p.columns - n : 0);
            }
        }
    }

    static MOH_DEVICE void multiply(const LinearParams& p, int first, int column, int first_head, int listed, unsigned char* memory,
                                    float* sums, const int* counts, const uint8_t* lists) {
        const int warp = int(threadIdx.x / 32), warp_row = warp % 2, warp_column = warp / 2 * 32;
        const Lane lane;
        float products[4][4][4] = {};
        Step writing(p), reading(p);
        writing.start(counts, listed);
        reading.start(counts, listed);
        auto copy_next = [&](int stage) {
            if (writing.head < listed) {
                copy(p, writing, first, column, first_head, memory + stage * stage_bytes, counts, lists);
                writing.advance(counts, listed);
            }
            cp_async_commit();
        };
        for (int stage = 0; stage < stages - 1; stage++) copy_next(stage);
        for (int stage = 0; reading.head < listed; stage = stage + 1 == stages ? 0 : stage + 1) {
            cp_async_wait<stages - 2>();
            __syncthreads();
            copy_next(stage == 0 ? stages - 1 : stage - 1);
            // Blocks of 16 rows are assigned to the warps round-robin.
            const int count = min(rows, counts[reading.head] - reading.row);
            const int blocks = __shfl_sync(0xffffffffu, ((count + 15) / 16 + 1 - warp_row) / 2, 0);
            unsigned char* a = memory + stage * stage_bytes;
            Multiply<T, layout, a_chunks, b_chunks, 4, 4>::run(products, a, 16 * warp_row, 32, a + a_bytes, warp_column, blocks);
            if (reading.k + depth >= reading.end)
                add(p, first, column + warp_column, first_head + reading.head, lists + reading.head * tokens + reading.row, count,
                    16 * warp_row + lane.group, products, sums + warp_column + 2 * lane.pair, 2 * lane.pair);
            reading.advance(counts, listed);
        }
        cp_async_wait<0>();
    }

    // Adds a head's products to the sums, multiplied by the gates if scale_by_gates, and resets them. Barriers between
    // the steps fix the order of a token's sum.
    static MOH_DEVICE void add(const LinearParams& p, int first, int column, int head, const uint8_t* list, int count, int row,
                               float (&products)[4][4][4], float* sums, int pair) {
        const bool biased = p.scale_by_gates && p.bias && blockIdx.z == 0;
        const T* bias = static_cast<const T*>(p.bias) + (biased ? head * p.bias_head : 0);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int place = row + 32 * i + 8 * half;
                if (place >= count) continue;
                int token = list[place];
                float gate = p.scale_by_gates ? p.gates[int64_t(first + token) * p.heads + head] : 1.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float x = products[i][j][2 * half], y = products[i][j][2 * half + 1];
                    if (biased) {
                        int n = column + 8 * j + pair;
                        if (n < p.columns) x += to_float(bias[n]);
                        if (n + 1 < p.columns) y += to_float(bias[n + 1]);
                    }
                    float2* at = reinterpret_cast<float2*>(sums + token * pitch + 8 * j);
                    float2 old = *at;
                    *at = make_float2(fmaf(gate, x, old.x), fmaf(gate, y, old.y));
                }
            }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) products[i][j][e] = 0.0f;
    }
};

} // namespace
