// DepthwiseConv: each thread computes a chunk of channels of neighbouring pixels of a row, which share the weights that it reads.

#include "linear.cuh"
#include "params.h"

namespace {

constexpr int threads = 256;
constexpr int pixels = 4; // of a thread

template <class T, int width> MOH_DEVICE void convolve(const DepthwiseConvParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    struct alignas(sizeof(T) * width) Chunk {
        T each[width];
    };
    const int chunks = p.channels / width, groups = (p.width + pixels - 1) / pixels;
    const int64_t item = int64_t(blockIdx.x) * threads + threadIdx.x;
    const int channel = int(item % chunks) * width, first = int(item / chunks % groups) * pixels;
    const int64_t line = item / chunks / groups;
    if (line >= int64_t(p.images) * p.height) return;
    const int y = int(line % p.height);
    const T* weight = static_cast<const T*>(p.weight) + int64_t(channel) * p.rows * p.columns;
    float sums[pixels][width];
#pragma unroll
    for (int e = 0; e < width; e++) {
        const float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[channel + e]) : 0.0f;
#pragma unroll
        for (int g = 0; g < pixels; g++) sums[g][e] = bias;
    }
    for (int row = 0; row < p.rows; row++) {
        const int up = row - p.rows / 2;
        if (y + up < 0 || y + up >= p.height) continue;
        const T* source = static_cast<const T*>(p.x) + (line + up) * p.width * p.channels + channel;
        for (int column = 0; column < p.columns; column++) {
            float weights[width];
#pragma unroll
            for (int e = 0; e < width; e++) weights[e] = to_float(weight[(e * p.rows + row) * p.columns + column]);
#pragma unroll
            for (int g = 0; g < pixels; g++) {
                const int x = first + g + column - p.columns / 2;
                if (x < 0 || x >= p.width) continue;
                const Chunk read = *reinterpret_cast<const Chunk*>(source + int64_t(x) * p.channels);
#pragma unroll
                for (int e = 0; e < width; e++) sums[g][e] = fmaf(to_float(read.each[e]), weights[e], sums[g][e]);
            }
        }
    }
    T* output = static_cast<T*>(p.output) + (line * p.width + first) * p.channels + channel;
#pragma unroll
    for (int g = 0; g < pixels; g++) {
        if (first + g >= p.width) break;
        Chunk result;
#pragma unroll
        for (int e = 0; e < width; e++) result.each[e] = from_float<T>(activate(sums[g][e], p.activation));
        *reinterpret_cast<Chunk*>(output + int64_t(g) * p.channels) = result;
    }
}

} // namespace

// moh_depthwise_conv_<type>_<channels of a thread>. Grid: rows of all images, times groups of pixels, times chunks of channels.
#define MOH_DEPTHWISE_CONV(type, width)                                                                                \
    MOH_KERNEL(moh_depthwise_conv_##type##_##width, DepthwiseConvParams, threads, 3) { convolve<type, width>(p); }
MOH_DEPTHWISE_CONV(float, 1)
MOH_DEPTHWISE_CONV(float, 4)
MOH_DEPTHWISE_CONV(f16, 1)
MOH_DEPTHWISE_CONV(f16, 8)
MOH_DEPTHWISE_CONV(bf16, 1)
MOH_DEPTHWISE_CONV(bf16, 8)
