// Shared by the dense and the routed kernel: which heads are on, which kernel computes a tile, and how a tile is
// stored.
#pragma once

#include "params.h"
#include "tile.cuh"

namespace {

// The grid is (column_blocks * tiles of rows, 1, parts): with rows along y there could be too many.
MOH_DEVICE int column_block(const LinearParams& p) { return int(blockIdx.x) % p.column_blocks; }
MOH_DEVICE int row_block(const LinearParams& p) { return int(blockIdx.x) / p.column_blocks; }

// The number of nonzero elements of `gates`, in all threads. `scratch` has one int per warp.
MOH_DEVICE int count_on(const float* gates, int elements, int* scratch) {
    int on = 0;
#pragma unroll 8
    for (int i = int(threadIdx.x); i < elements; i += int(blockDim.x)) on += gates[i] != 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) on += __shfl_xor_sync(0xffffffffu, on, lanes);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = on;
    __syncthreads();
    on = 0;
    for (int warp = 0; warp < int(blockDim.x / 32); warp++) on += scratch[warp];
    __syncthreads();
    return on;
}

// Which kernel computes a tile. In the routed one, a head's rows are padded to a multiple of 16, and adding the
// products to the sums in shared memory costs as much as 64 more inner elements.
MOH_DEVICE bool is_routed(const LinearParams& p, int rows, int on) {
    if (p.only != 0) return p.only == 1;
    int64_t routed = int64_t(on + 8 * min(p.heads, on)) * (p.depth + 64), dense = int64_t(rows) * p.heads * p.depth;
    return routed * p.routed_cost < 100 * dense;
}

// bits[head * words + i / 32], bit i % 32: whether head first_head + head is on for row i. Written for a multiple of
// 32 heads by the first `warps` warps.
MOH_DEVICE void gather_bits(const LinearParams& p, int first_row, int rows, int first_head, int heads, uint32_t* bits, int words, int warps) {
    const int lane = int(threadIdx.x & 31), groups = (heads + 31) / 32;
    for (int unit = int(threadIdx.x / 32); unit < words * groups; unit += warps) {
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

// Stores a row of sums, from column `column` on, with the bias.
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

} // namespace
