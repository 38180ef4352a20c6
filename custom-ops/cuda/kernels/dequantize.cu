// Quantised weights as T, for the kernels of the operators without quantisation.

#include "nbits.cuh"

namespace {

constexpr int threads = 256, warps = threads / 32;
constexpr int unit = 8; // values that a thread converts at a time; all belong to one block
constexpr int tile = 64;

// Whether a token uses the row's head. All lanes of a warp call.
MOH_DEVICE bool is_used(const DequantizeParams& p, int64_t row) {
    if (p.gates == nullptr) return true;
    const float* gates = p.gates + row / p.head_rows;
    bool used = false;
    for (int token = int(threadIdx.x) % 32; token < p.tokens; token += 32) used = used || gates[int64_t(token) * p.heads] != 0.0f;
    return __any_sync(0xffffffffu, used);
}

// Values k .. k + 7 of a row.
template <class T> MOH_DEVICE void values_at(const QuantizedParams& p, int64_t row, int k, T (&values)[unit]) {
    const Factors f = factors_at<T>(p, row, k);
    const unsigned char* from = p.weight + row * row_bytes(p) + int64_t(k) * p.bits / 8;
    uint2 bits;
    if (p.bits == 4) {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
        // A byte has two values: the even nibbles and the odd ones, as bytes.
        const uint32_t even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
        bits = make_uint2((even & 0xff) | (odd & 0xff) << 8 | (even & 0xff00) << 8 | (odd & 0xff00) << 16,
                          (even >> 16 & 0xff) | (odd >> 16 & 0xff) << 8 | (even >> 24) << 16 | (odd >> 24) << 24);
    } else {
        bits = *reinterpret_cast<const uint2*>(from);
    }
#pragma unroll
    for (int i = 0; i < unit; i++) {
        const uint32_t q = (i < 4 ? bits.x : bits.y) >> (i % 4 * 8) & 0xff;
        values[i] = from_float<T>((float(q) - f.zero) * f.scale);
    }
}

// A warp converts one row.
template <class T> MOH_DEVICE void rows(const DequantizeParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int64_t row = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
    if (row >= int64_t(p.weight.matrices) * p.weight.rows || !is_used(p, row)) return;
    T* to = static_cast<T*>(p.output) + row * p.weight.depth;
#pragma unroll 4
    for (int k = int(threadIdx.x) % 32 * unit; k < p.weight.depth; k += 32 * unit) {
        union {
            T values[unit];
            uint4 chunks[unit * sizeof(T) / 16];
        } own;
        values_at(p.weight, row, k, own.values);
#pragma unroll
        for (int i = 0; i < int(unit * sizeof(T) / 16); i++) reinterpret_cast<uint4*>(to + k)[i] = own.chunks[i];
    }
}

// A block converts and transposes a tile, through shared memory. All its rows belong to one matrix, which is one head.
template <class T> MOH_DEVICE void transposed(const DequantizeParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int first_row = int(blockIdx.x) * tile, first_k = int(blockIdx.y) * tile, matrix = int(blockIdx.z);
    const int64_t before = int64_t(matrix) * p.weight.rows;
    if (!is_used(p, before)) return;
    constexpr int pitch = tile + 1;
    T* shared = reinterpret_cast<T*>(shared_memory()); // [k][row]
    expect_shared_memory(tile * pitch * sizeof(T));
    for (int i = int(threadIdx.x); i < tile * tile / unit; i += threads) {
        const int row = i / (tile / unit), k = i % (tile / unit) * unit;
        if (first_row + row >= p.weight.rows || first_k + k >= p.weight.depth) continue;
        T values[unit];
        values_at(p.weight, before + first_row + row, first_k + k, values);
#pragma unroll
        for (int e = 0; e < unit; e++) shared[(k + e) * pitch + row] = values[e];
    }
    __syncthreads();
    T* to = static_cast<T*>(p.output) + before * p.weight.depth;
    for (int i = int(threadIdx.x); i < tile * tile; i += threads) {
        const int k = first_k + i / tile, row = first_row + i % tile;
        if (k < p.weight.depth && row < p.weight.rows) to[int64_t(k) * p.weight.rows + row] = shared[i / tile * pitch + i % tile];
    }
}

} // namespace

// Grid: ceil(matrices * rows / 8); transposed (ceil(rows / 64), ceil(depth / 64), matrices), with 64 * 65 elements of
// shared memory, where a head is a matrix.
#define MOH_DEQUANTIZE(type, T)                                                                                        \
    MOH_KERNEL(moh_dequantize_##type, DequantizeParams, 256, 1) { rows<T>(p); }                                        \
    MOH_KERNEL(moh_dequantize_transposed_##type, DequantizeParams, 256, 1) { transposed<T>(p); }
MOH_DEQUANTIZE(f32, float)
MOH_DEQUANTIZE(f16, f16)
MOH_DEQUANTIZE(bf16, bf16)
