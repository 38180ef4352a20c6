// RoutedCombine, and the second half of RoutedMLP: the sum of x_h W_h^T over the heads that are on.
//
// Both kernels are launched with the same tiles of the output, and each computes the tiles that it is faster for; the other
// sees that from the tile's gates and leaves at once. Sums are made in an order that is always the same, without atomics.
//
// moh_combine_dense multiplies consecutive tokens by all heads that any of them uses, blocks that are off being read as zeros.
// moh_combine_routed gathers, head by head, the rows that are on, and adds their products to sums in shared memory.
#include "params.h"
#include "tile.cuh"

namespace {

// Elements of `gates` that are not 0. `scratch` is an integer a warp; the result is the same in all threads.
MOH_DEVICE int count_on(const float* gates, int elements, int* scratch) {
    int on = 0;
    for (int i = int(threadIdx.x); i < elements; i += int(blockDim.x)) on += gates[i] != 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) on += __shfl_xor_sync(0xffffffffu, on, lanes);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = on;
    __syncthreads();
    on = 0;
    for (int warp = 0; warp < int(blockDim.x / 32); warp++) on += scratch[warp];
    __syncthreads();
    return on;
}

// Which kernel computes a tile. A head's products in the routed one cost a multiple of 16 rows, and once more as much as 64 of the
// inner length for adding them to the sums in shared memory.
MOH_DEVICE bool is_routed(const LinearParams& p, int rows, int on) {
    if (p.only != 0) return p.only == 1;
    int64_t routed = int64_t(on + 8 * min(p.heads, on)) * (p.depth + 64), dense = int64_t(rows) * p.heads * p.depth;
    return 5 * routed < 4 * dense;
}

// bits[head * words + i / 32], bit i % 32: whether head first_head + head of row i is on. A multiple of 32 heads is written.
MOH_DEVICE void gather_bits(const LinearParams& p, int first_row, int rows, int first_head, int heads, uint32_t* bits, int words) {
    const int lane = int(threadIdx.x & 31), groups = (heads + 31) / 32;
    for (int unit = int(threadIdx.x / 32); unit < words * groups; unit += int(blockDim.x / 32)) {
        int word = unit % words, head = unit / words * 32 + lane;
        uint32_t on = 0;
        for (int i = 0; i < 32; i++) {
            int row = word * 32 + i;
            if (row < rows && head < heads && p.gates[int64_t(first_row + row) * p.heads + first_head + head] != 0.0f)
                on |= 1u << i;
        }
        bits[head * words + word] = on;
    }
}

// Stores columns column ... of a row of sums, with the bias.
template <class T, bool aligned> MOH_DEVICE void store(const LinearParams& p, int token, int column, const float* sums) {
    constexpr int width = aligned ? chunk_elements<T> : 1;
    if (column >= p.columns) return;
    const T* bias = static_cast<const T*>(p.bias);
    union {
        uint4 whole;
        T each[width];
    } chunk;
#pragma unroll
    for (int e = 0; e < width; e++)
        chunk.each[e] = from_float<T>(p.bias && !p.scale_by_gates ? sums[e] + to_float(bias[column + e]) : sums[e]);
    T* at = static_cast<T*>(p.output) + token * p.output_row + column;
    if (aligned)
        *reinterpret_cast<uint4*>(at) = chunk.whole;
    else
        *at = chunk.each[0];
}

// Element `column` of the sum of a token's heads, one product after the other.
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
    // Inner elements that belong to one head, and their number in a step.
    static constexpr int granule = aligned ? elements : 1, granules = Tile::depth / granule;

    static MOH_DEVICE void run(const LinearParams& p) {
        const int thread = int(threadIdx.x);
        const int column = int(blockIdx.x) * Tile::columns, first = int(blockIdx.y) * Tile::rows;
        const int rows = min(Tile::rows, p.tokens - first);
        const int depth = p.heads * p.depth, all_steps = (depth + Tile::depth - 1) / Tile::depth;
        unsigned char* memory = shared_memory();
        int* steps = reinterpret_cast<int*>(memory + Tile::stages * Tile::stage_bytes);  // those with a head in use
        int* scratch = steps + all_steps;                                                // 8 integers
        uint32_t* bits = reinterpret_cast<uint32_t*>(scratch + 8);
        int16_t* owner = reinterpret_cast<int16_t*>(bits + (p.heads + 31) / 32 * 32 * words);
        if (is_routed(p, rows, count_on(p.gates + int64_t(first) * p.heads, rows * p.heads, scratch))) return;
        gather_bits(p, first, rows, 0, p.heads, bits, words);
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
            // A weight that no token of the tile uses may be NaN, and must not meet the zeros.
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
        static_assert(Tile::rows * pitch * 4 <= Tile::stages * Tile::stage_bytes, "the sums take the stages' place");
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
            // An infinite weight or a NaN of a head that this token does not use has met its zeros.
#pragma unroll
            for (int e = 0; e < width; e++)
                if (!(fabsf(at[e]) <= 3.4028235e38f) && column + n + e < p.columns)
                    at[e] = sum_alone<T, Tile::layout>(p, first + row, column + n + e);
            store<T, aligned>(p, first + row, column + n, at);
        }
    }

    // The head that inner index k belongs to, or -1 where no token of the tile uses it.
    static MOH_DEVICE int16_t owner_of(const LinearParams& p, const uint32_t* bits, int k, int depth) {
        if (k >= depth) return -1;
        const int head = k / p.depth;
        uint32_t any = 0;
#pragma unroll
        for (int word = 0; word < words; word++) any |= bits[head * words + word];
        return int16_t(any != 0 ? head : -1);
    }

    // The steps along the inner length that have a head in use; their number goes to count[0].
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

// A tile of `tokens` tokens and 128 columns, by 8 warps: 2 along the rows that a head is on for, in steps of 128, and 4 along the columns.
template <class T, int layout, int tokens, int stages, bool aligned> struct Routed {
    static constexpr int columns = 128, threads = 256, rows = 128, pitch = columns + 8, words = tokens / 32;
    static constexpr int elements = chunk_elements<T>, a_chunks = 4, depth = a_chunks * elements;
    static constexpr int b_rows = layout == 0 ? columns : depth, b_chunks = (layout == 0 ? depth : columns) / elements;
    static constexpr int a_bytes = rows * a_chunks * 16, stage_bytes = a_bytes + b_rows * b_chunks * 16;
    static constexpr int heads = 32;  // whose rows are listed at a time
    static_assert(tokens <= 256, "a row's number is a byte");

    // What the heads multiply, one after the other: 128 rows and a part of the inner length at a time.
    struct Step {
        int head, row, k;
        MOH_DEVICE void start(const int* counts, int listed) { head = -1, next_head(counts, listed); }
        MOH_DEVICE void next_head(const int* counts, int listed) {
            row = k = 0;
            do head++;
            while (head < listed && counts[head] == 0);
        }
        MOH_DEVICE void advance(const int* counts, int listed, int inner) {
            k += depth;
            if (k < inner) return;
            k = 0;
            row += rows;
            if (row >= counts[head]) next_head(counts, listed);
        }
    };

    static MOH_DEVICE void run(const LinearParams& p) {
        const int thread = int(threadIdx.x), warp = thread / 32;
        const int column = int(blockIdx.x) * columns, first = int(blockIdx.y) * tokens;
        const int count = min(tokens, p.tokens - first);
        unsigned char* memory = shared_memory();
        float* sums = reinterpret_cast<float*>(memory + stages * stage_bytes);
        uint32_t* bits = reinterpret_cast<uint32_t*>(sums + tokens * pitch);
        int* counts = reinterpret_cast<int*>(bits + heads * words);
        uint8_t* lists = reinterpret_cast<uint8_t*>(counts + heads);
        if (!is_routed(p, count, count_on(p.gates + int64_t(first) * p.heads, count * p.heads, counts))) return;
        for (int i = thread; i < tokens * pitch; i += threads) sums[i] = 0.0f;

        for (int first_head = 0; first_head < p.heads; first_head += heads) {
            const int listed = min(heads, p.heads - first_head);
            __syncthreads();
            gather_bits(p, first, count, first_head, listed, bits, words);
            __syncthreads();
            for (int head = warp; head < heads; head += threads / 32) list(bits + head * words, counts + head, lists + head * tokens);
            __syncthreads();
            multiply(p, first, column, first_head, listed, memory, sums, counts, lists);
        }
        __syncthreads();
        constexpr int width = aligned ? elements : 1, chunks = columns / width;
        for (int i = thread; i < count * chunks; i += threads) {
            int row = i / chunks, n = i % chunks * width;
            store<T, aligned>(p, first + row, column + n, sums + row * pitch + n);
        }
    }

    // A head's rows, ascending, by a warp.
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
        Step writing, reading;
        writing.start(counts, listed);
        reading.start(counts, listed);
        auto copy_next = [&](int stage) {
            if (writing.head < listed) {
                copy(p, writing, first, column, first_head, memory + stage * stage_bytes, counts, lists);
                writing.advance(counts, listed, p.depth);
            }
            cp_async_commit();
        };
        for (int stage = 0; stage < stages - 1; stage++) copy_next(stage);
        for (int stage = 0; reading.head < listed; stage = stage + 1 == stages ? 0 : stage + 1) {
            cp_async_wait<stages - 2>();
            __syncthreads();
            copy_next(stage == 0 ? stages - 1 : stage - 1);
            // Blocks of 16 rows go to the warps in turn.
            const int count = min(rows, counts[reading.head] - reading.row);
            const int blocks = __shfl_sync(0xffffffffu, ((count + 15) / 16 + 1 - warp_row) / 2, 0);
            unsigned char* a = memory + stage * stage_bytes;
            Multiply<T, layout, a_chunks, b_chunks, 4, 4>::run(products, a, 16 * warp_row, 32, a + a_bytes, warp_column, blocks);
            if (reading.k + depth >= p.depth)
                add(p, first, column + warp_column, first_head + reading.head, lists + reading.head * tokens + reading.row, count,
                    16 * warp_row + lane.group, products, sums + warp_column + 2 * lane.pair, 2 * lane.pair);
            reading.advance(counts, listed, p.depth);
        }
        cp_async_wait<0>();
    }

    // Adds a head's products to the sums, times the gates where these multiply, and starts over. Barriers between the steps order the
    // sums of a token.
    static MOH_DEVICE void add(const LinearParams& p, int first, int column, int head, const uint8_t* list, int count, int row,
                               float (&products)[4][4][4], float* sums, int pair) {
        const T* bias = static_cast<const T*>(p.bias) + (p.bias ? head * p.bias_head : 0);
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
                    if (p.scale_by_gates && p.bias) {
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

// moh_combine_{dense,routed}_<type>_<layout>_<tokens>, with _any where addresses or widths are not multiples of 16 bytes. Up to 32
// tokens wait for the weights alone: the dense kernel reads those of the heads in use once, in narrow tiles with many copies under way.
#define MOH_DENSE(variant, type, layout, rows, columns, stages, aligned)                                               \
    MOH_KERNEL(moh_combine_dense_##type##_##layout##_##variant, LinearParams, rows, 1) {                               \
        Dense<Tile<type, layout, rows, columns, stages>, aligned>::run(p);                                             \
    }
#define MOH_ROUTED(variant, type, layout, tokens, stages, aligned)                                                     \
    MOH_KERNEL(moh_combine_routed_##type##_##layout##_##variant, LinearParams, 256, 1) {                               \
        Routed<type, layout, tokens, stages, aligned>::run(p);                                                         \
    }
#define MOH_COMBINE(type, layout)                                                                                      \
    MOH_DENSE(32, type, layout, 32, 32, 8, true)                                                                       \
    MOH_DENSE(64, type, layout, 64, 64, 3, true)                                                                       \
    MOH_ROUTED(64, type, layout, 64, 3, true)                                                                          \
    MOH_DENSE(any, type, layout, 64, 64, 3, false)                                                                     \
    MOH_ROUTED(any, type, layout, 64, 3, false)
#define MOH_COMBINE_LARGE(type, layout)                                                                                \
    MOH_COMBINE(type, layout)                                                                                          \
    MOH_DENSE(128, type, layout, 128, 128, 3, true)                                                                    \
    MOH_ROUTED(128, type, layout, 128, 4, true)                                                                        \
    MOH_DENSE(256, type, layout, 256, 128, 3, true)                                                                    \
    MOH_ROUTED(256, type, layout, 256, 4, true)
MOH_COMBINE_LARGE(f16, 0)
MOH_COMBINE_LARGE(f16, 1)
MOH_COMBINE_LARGE(bf16, 0)
MOH_COMBINE_LARGE(bf16, 1)
MOH_COMBINE(float, 0)
MOH_COMBINE(float, 1)
