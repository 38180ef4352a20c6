// RoutedProjection, and the first half of RoutedMLP: x W^T + b in the blocks of the heads that are on.
//
// Persistent blocks process tiles of the output. If few heads are on (gathered), a tile has rows of one head's list of
// tokens, and the other output blocks are zeroed in tiles of their own. If most are on (dense), a tile has consecutive
// tokens and columns of any heads, and blocks that are off are stored as zeros. The device decides between the two
// from the plan's counts. If they need different tile sizes, both kernels are launched, and the one not chosen returns
// at once.
#include "linear.cuh"
#include "tile.cuh"
#include "zeros.cuh"

namespace {

template <class Tile, bool aligned> struct Projection {
    using T = typename Tile::T;
    static constexpr int elements = chunk_elements<T>;

    // A tile of the output. Dense tiles number the columns of all heads consecutively, as if they were head 0's.
    struct Place {
        int head, row, column, columns;
    };

    // This thread's first chunk of B, the distance in rows of B to its next one, and the number of valid elements per
    // chunk.
    struct Weight {
        const T* at;
        int row, chunk, valid;
    };

    static MOH_DEVICE Weight weight(const LinearParams& p, const Place& place, bool dense) {
        const bool pairs = p.activation == 4;
        Weight w;
        w.row = int(threadIdx.x) / Tile::b_chunks;
        w.chunk = int(threadIdx.x) % Tile::b_chunks;
        const T* head = static_cast<const T*>(p.weight) + place.head * p.weight_head;
        if (Tile::layout == 0) {
            w.at = head + (place.column + w.row) * p.weight_row + w.chunk * elements;
            w.valid = place.columns - place.column;
            return w;
        }
        // SwiGLU: the second half of the tile's columns multiplies the first.
        int half = pairs && w.chunk >= Tile::b_chunks / 2 ? 1 : 0;
        int column = place.column + (w.chunk - half * (Tile::b_chunks / 2)) * elements;
        bool beyond = pairs && w.chunk - half * (Tile::b_chunks / 2) >= Tile::b_chunks / 2;
        w.valid = beyond ? 0 : place.columns - column;
        if (dense && w.valid > 0) head += column / p.columns * p.weight_head - column / p.columns * p.columns;
        w.at = head + half * p.columns + column + w.row * p.weight_row;
        return w;
    }

    static MOH_DEVICE void compute(const LinearParams& p, const Place& place, bool dense, unsigned char* memory, int* tokens) {
        const Lane lane;
        const int thread = int(threadIdx.x);
        const int count = min(Tile::rows, (dense ? p.tokens : p.counts[place.head]) - place.row);
        for (int row = thread; row < count; row += Tile::threads)
            tokens[row] = dense ? place.row + row : p.entries[int64_t(place.head) * p.tokens + place.row + row];
        __syncthreads();

        // This thread's chunks of A: one in each eighth of the rows, at the same position.
        constexpr int a_rows = Tile::rows / Tile::a_chunks;
        const int a_row = thread / Tile::a_chunks, a_chunk = thread % Tile::a_chunks;
        int own[Tile::a_chunks];
#pragma unroll
        for (int i = 0; i < Tile::a_chunks; i++) {
            int row = a_row + i * a_rows;
            own[i] = row < count ? tokens[row] : -1;
        }
        const Weight w = weight(p, place, dense);
        typename Tile::Sums sums;
        auto load = [&](int step, unsigned char* a, unsigned char* b) {
            const int k = step * Tile::depth + a_chunk * elements;
            const T* x = static_cast<const T*>(p.x) + k;
#pragma unroll
            for (int i = 0; i < Tile::a_chunks; i++)
                copy_chunk<T, aligned>(chunk_at<Tile::a_chunks>(a, a_row + i * a_rows, a_chunk), x + max(own[i], 0) * p.x_row,
                                       own[i] < 0 ? 0 : p.depth - k);
            constexpr int b_step = Tile::threads / Tile::b_chunks;
            if (Tile::layout == 0) {
                const int left = p.depth - step * Tile::depth - w.chunk * elements;
#pragma unroll
                for (int row = 0; row < Tile::b_rows; row += b_step)
                    copy_chunk<T, aligned>(chunk_at<Tile::b_chunks>(b, w.row + row, w.chunk),
                                           w.at + int64_t(row) * p.weight_row + step * Tile::depth,
                                           w.row + row < w.valid ? left : 0);
            } else {
#pragma unroll
                for (int row = 0; row < Tile::b_rows; row += b_step)
                    copy_chunk<T, aligned>(chunk_at<Tile::b_chunks>(b, w.row + row, w.chunk),
                                           w.at + int64_t(step * Tile::depth + row) * p.weight_row,
                                           step * Tile::depth + w.row + row < p.depth ? w.valid : 0);
            }
        };
        Tile::accumulate(sums, memory, (p.depth + Tile::depth - 1) / Tile::depth, load);
        store(p, place, dense, count, sums, memory, tokens, lane);
    }

    // Stores the sums with bias and activation, passing them through shared memory to form whole chunks. Each warp
    // stores its own rows.
    static MOH_DEVICE void store(const LinearParams& p, const Place& place, bool dense, int count, typename Tile::Sums& sums,
                                 unsigned char* memory, const int* tokens, const Lane& lane) {
        constexpr int pitch = Tile::columns + 4;
        static_assert(Tile::rows * pitch * 4 <= Tile::stages * Tile::stage_bytes, "the sums reuse the stages' memory");
        const bool pairs = p.activation == 4;
        const int first = int(threadIdx.x & ~31u);
        float* staged = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int j = 0; j < Tile::fragments; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *reinterpret_cast<float2*>(staged + (first + 16 * i + 8 * half + lane.group) * pitch + 8 * j + 2 * lane.pair) =
                        make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
        __syncwarp();
        constexpr int width = aligned ? elements : 1;
        const int chunks = (pairs ? Tile::columns / 2 : Tile::columns) / width;
        const T* bias = static_cast<const T*>(p.bias) + (p.bias ? place.head * p.bias_head : 0);
        for (int i = lane.index; i < 32 * chunks; i += 32) {
            int row = first + i / chunks, n = i % chunks * width, column = place.column + n;
            if (row >= count || column >= place.columns) continue;
            int64_t token = tokens[row];
            bool off = dense && p.gates != nullptr && p.gates[token * p.heads + column / p.columns] == 0.0f;
            union {
                uint4 whole;
                T each[width];
            } chunk;
#pragma unroll
            for (int e = 0; e < width; e++) {
                float x = staged[row * pitch + n + e];
                if (p.bias) x += to_float(bias[column + e]);
                x = activate(x, p.activation);
                if (pairs) {
                    float factor = staged[row * pitch + Tile::columns / 2 + n + e];
                    x *= p.bias ? factor + to_float(bias[p.columns + column + e]) : factor;
                }
                chunk.each[e] = from_float<T>(off ? 0.0f : x);
            }
            T* at = static_cast<T*>(p.output) + token * p.output_row + place.head * p.output_head + column;
            if (aligned)
                *reinterpret_cast<uint4*>(at) = chunk.whole;
            else
                *at = chunk.each[0];
        }
        __syncthreads();
    }

    static MOH_DEVICE void run(const LinearParams& p) {
        unsigned char* memory = shared_memory();
        int* tokens = reinterpret_cast<int*>(memory + Tile::stages * Tile::stage_bytes);
        start_next_kernel();
        wait_for_previous_kernel();
        const bool dense = is_dense(p);
        if (p.only == (dense ? 1 : 2)) return;
        const int tile_columns = p.activation == 4 ? Tile::columns / 2 : Tile::columns;
        const int columns = dense ? p.heads * p.columns : p.columns;
        const int heads = dense ? 1 : p.heads;
        const int spans = (columns + tile_columns - 1) / tile_columns;
        const int64_t row_tiles = (p.tokens + Tile::rows - 1) / Tile::rows;
        const int64_t tiles = row_tiles * heads * spans;
        const int64_t all = tiles + (p.write_zeros && !dense ? row_tiles : 0);
        for (int64_t tile = blockIdx.x; tile < all; tile += gridDim.x) {
            if (tile >= tiles) {
                const int64_t row = (tile - tiles) * Tile::rows, block = row * p.heads;
                const int64_t blocks = min(Tile::rows, int(p.tokens - row)) * int64_t(p.heads);
                write_zeros(static_cast<T*>(p.output) + row * p.output_row, p.gates + block, blocks, p.columns * int(sizeof(T)),
                            threadIdx.x / 32, Tile::threads / 32);
                continue;
            }
            // Concurrent tiles have nearby tokens, so that x and the weights are read from the L2 cache.
            Place place;
            place.column = int(tile % spans) * tile_columns;
            place.head = int(tile / spans % heads);
            place.row = int(tile / spans / heads) * Tile::rows;
            place.columns = columns;
            if (!dense && place.row >= p.counts[place.head]) continue;
            compute(p, place, dense, memory, tokens);
        }
    }
};

} // namespace

// moh_projection_<type>_<layout>_<rows>x<columns>; _any if addresses or widths are not multiples of 16 bytes. The
// kernel of 32 rows is limited by reading the weights: narrow tiles and many copies in flight use the full memory
// bandwidth.
#define MOH_PROJECTION(variant, type, layout, rows, columns, stages, blocks, aligned)                                  \
    MOH_KERNEL(moh_projection_##type##_##layout##_##variant, LinearParams, rows, blocks) {                             \
        Projection<Tile<type, layout, rows, columns, stages>, aligned>::run(p);                                        \
    }
#define MOH_PROJECTIONS(type, layout)                                                                                  \
    MOH_PROJECTION(128x64, type, layout, 128, 64, 3, 2, true)                                                          \
    MOH_PROJECTION(32x32, type, layout, 32, 32, 8, 2, true)                                                            \
    MOH_PROJECTION(any, type, layout, 64, 64, 3, 2, false)
#define MOH_PROJECTIONS_LARGE(type, layout)                                                                            \
    MOH_PROJECTIONS(type, layout)                                                                                      \
    MOH_PROJECTION(256x128, type, layout, 256, 128, 3, 1, true)                                                        \
    MOH_PROJECTION(128x128, type, layout, 128, 128, 3, 2, true)
MOH_PROJECTIONS_LARGE(f16, 0)
MOH_PROJECTIONS_LARGE(f16, 1)
MOH_PROJECTIONS_LARGE(bf16, 0)
MOH_PROJECTIONS_LARGE(bf16, 1)
MOH_PROJECTIONS(float, 0)
MOH_PROJECTIONS(float, 1)
