// Products of tiles in shared memory, for the linear operators: f16 and bf16 on tensor cores, f32 by FMA. All
// accumulate in f32, in the layout of mma.m16n8k16's accumulators.
//
// Tiles have rows of 16-byte chunks, permuted within each row so that the 8 rows of an ldmatrix are in different
// banks. A is [row][k]. B is [column][k] in layout 0 and [k][column] in layout 1, like the weights in memory.
#pragma once

#include "device.cuh"

namespace {

// Elements per chunk.
template <class T> constexpr int chunk_elements = 16 / int(sizeof(T));

// Address of chunk `chunk` of row `row`, in a tile with `chunks` chunks per row.
template <int chunks> MOH_DEVICE unsigned char* chunk_at(unsigned char* tile, int row, int chunk) {
    static_assert(chunks == 4 || chunks % 8 == 0, "a row covers half of the banks, or a multiple of all");
    int place = chunks == 4 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
    return tile + (row * chunks + place) * 16;
}

// Copies the first `valid` elements of a chunk and zeros the rest; asynchronously if all addresses are aligned to 16.
// In aligned tensors a chunk is either entirely valid or not at all.
template <class T, bool aligned> MOH_DEVICE void copy_chunk(unsigned char* shared, const T* global, int valid) {
    if (aligned) {
        cp_async_16(shared, global, valid > 0);
    } else {
        T* to = reinterpret_cast<T*>(shared);
#pragma unroll
        for (int i = 0; i < chunk_elements<T>; i++) to[i] = i < valid ? global[i] : from_float<T>(0.0f);
    }
}

// Position of this lane in a fragment of A or of the sums: rows group and group + 8, columns 2 pair and 2 pair + 1.
struct Lane {
    int index, group, pair;
    MOH_DEVICE Lane() : index(int(threadIdx.x & 31)), group(index >> 2), pair(index & 3) {}
};

// sums[i][j] += A's rows row + i * row_step ... + 15, times B's columns column + 8 j ... + 7, for i < blocks.
template <class T, int layout, int a_chunks, int b_chunks, int M, int N> struct Multiply {
    static MOH_DEVICE void run(float (&sums)[M][N][4], unsigned char* a, int row, int row_step, unsigned char* b, int column,
                               int blocks) {
        static_assert(N % 2 == 0, "ldmatrix reads the columns of two fragments");
        const Lane lane;
#pragma unroll
        for (int k = 0; k < a_chunks / 2; k++) {
            uint32_t rows[M][4];
#pragma unroll
            for (int i = 0; i < M; i++)
                if (i < blocks)
                    ldmatrix_x4(rows[i], chunk_at<a_chunks>(a, row + i * row_step + (lane.index & 15), 2 * k + (lane.index >> 4)));
#pragma unroll
            for (int j = 0; j < N; j += 2) {
                uint32_t columns[4];
                int second = lane.index >> 4, upper = (lane.index >> 3) & 1, within = lane.index & 7;
                if (layout == 0)
                    ldmatrix_x4(columns, chunk_at<b_chunks>(b, column + 8 * (j + second) + within, 2 * k + upper));
                else
                    ldmatrix_x4_trans(columns, chunk_at<b_chunks>(b, 16 * k + 8 * upper + within, column / 8 + j + second));
#pragma unroll
                for (int i = 0; i < M; i++) {
                    if (i >= blocks) continue;
                    mma_m16n8k16<T>(sums[i][j], rows[i], columns[0], columns[1]);
                    mma_m16n8k16<T>(sums[i][j + 1], rows[i], columns[2], columns[3]);
                }
            }
        }
    }
};

template <int layout, int a_chunks, int b_chunks, int M, int N> struct Multiply<float, layout, a_chunks, b_chunks, M, N> {
    static MOH_DEVICE void run(float (&sums)[M][N][4], unsigned char* a, int row, int row_step, unsigned char* b, int column,
                               int blocks) {
        const Lane lane;
        for (int k = 0; k < a_chunks; k++) {
            float rows[M][2][4];
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (i < blocks) load(rows[i][half], chunk_at<a_chunks>(a, row + i * row_step + lane.group + 8 * half, k));
#pragma unroll
            for (int j = 0; j < N; j++) {
                int first = column + 8 * j + 2 * lane.pair;
                float columns[2][4];
                if (layout == 0) {
                    load(columns[0], chunk_at<b_chunks>(b, first, k));
                    load(columns[1], chunk_at<b_chunks>(b, first + 1, k));
                } else {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const unsigned char* at = chunk_at<b_chunks>(b, 4 * k + e, first / 4) + first % 4 * 4;
                        float2 two = *reinterpret_cast<const float2*>(at);
                        columns[0][e] = two.x;
                        columns[1][e] = two.y;
                    }
                }
#pragma unroll
                for (int i = 0; i < M; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (i >= blocks) continue;
                        sums[i][j][0] = fmaf(rows[i][0][e], columns[0][e], sums[i][j][0]);
                        sums[i][j][1] = fmaf(rows[i][0][e], columns[1][e], sums[i][j][1]);
                        sums[i][j][2] = fmaf(rows[i][1][e], columns[0][e], sums[i][j][2]);
                        sums[i][j][3] = fmaf(rows[i][1][e], columns[1][e], sums[i][j][3]);
                    }
            }
        }
    }
    static MOH_DEVICE void load(float (&to)[4], const unsigned char* chunk) {
        float4 four = *reinterpret_cast<const float4*>(chunk);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    }
};

// An output tile of `rows` by `columns`, computed by a block of `rows` threads: each warp has 32 rows and all columns.
template <class T_, int layout_, int rows_, int columns_, int stages_ = 3> struct Tile {
    using T = T_;
    static constexpr int layout = layout_, rows = rows_, columns = columns_, threads = rows_, stages = stages_;
    static constexpr int a_chunks = 8, depth = a_chunks * chunk_elements<T>;
    static constexpr int b_rows = layout == 0 ? columns : depth;
    static constexpr int b_chunks = (layout == 0 ? depth : columns) / chunk_elements<T>;
    static constexpr int a_bytes = rows * a_chunks * 16, b_bytes = b_rows * b_chunks * 16;
    static constexpr int stage_bytes = a_bytes + b_bytes;
    static constexpr int fragments = columns / 8;
    using Sums = float[2][fragments][4];

    // Computes sums = the products of `steps` steps of `depth`. load(step, a, b) starts the copies of a step.
    template <class Load> static MOH_DEVICE void accumulate(Sums& sums, unsigned char* memory, int steps, Load load) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < fragments; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][j][e] = 0.0f;
        for (int step = 0; step < stages - 1; step++) {
            if (step < steps) load(step, memory + step * stage_bytes, memory + step * stage_bytes + a_bytes);
            cp_async_commit();
        }
        int reading = 0, writing = stages - 1;
        for (int step = 0; step < steps; step++) {
            cp_async_wait<stages - 2>();
            __syncthreads();
            unsigned char* next = memory + writing * stage_bytes;
            if (step + stages - 1 < steps) load(step + stages - 1, next, next + a_bytes);
            cp_async_commit();
            unsigned char* a = memory + reading * stage_bytes;
            Multiply<T, layout, a_chunks, b_chunks, 2, fragments>::run(sums, a, int(threadIdx.x & ~31u), 16, a + a_bytes, 0, 2);
            reading = reading + 1 == stages ? 0 : reading + 1;
            writing = writing + 1 == stages ? 0 : writing + 1;
        }
        cp_async_wait<0>();
        __syncthreads();
    }
};

} // namespace
