// LayerNorm: a warp normalises a row, which it reads once from global memory and keeps in registers; of a longer row, the end is read again.

#include "device.cuh"
#include "params.h"

namespace {

constexpr int threads = 128, lanes = 32;
constexpr int held = 5; // chunks of a row that a lane keeps: 1280 elements of 16 bits

MOH_DEVICE float sum(float x) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Chunks of `width` elements.
template <class T, int width> struct alignas(sizeof(T) * width) Chunk {
    T each[width];
};

template <class T, int width> struct Row {
    using Elements = Chunk<T, width>;
    const LayerNormParams& p;
    const int chunks, lane;
    const Elements* x;
    Elements kept[held];

    // Calls `use` with each of the lane's chunks and its number.
    template <class Use> MOH_DEVICE void each(Use use) {
#pragma unroll
        for (int i = 0; i < held; i++)
            if (lane + i * lanes < chunks) use(kept[i], lane + i * lanes);
        for (int chunk = lane + held * lanes; chunk < chunks; chunk += lanes) {
            const Elements read = x[chunk]; // a reference would be read element by element
            use(read, chunk);
        }
    }

    MOH_DEVICE void load() {
#pragma unroll
        for (int i = 0; i < held; i++)
            if (lane + i * lanes < chunks) kept[i] = x[lane + i * lanes];
    }

    MOH_DEVICE void normalise(int64_t row) {
        load();
        float total = 0.0f, squares = 0.0f;
        each([&](const Elements& of, int) {
#pragma unroll
            for (int e = 0; e < width; e++) total += to_float(of.each[e]);
        });
        const float mean = sum(total) / float(p.width);
        each([&](const Elements& of, int) {
#pragma unroll
            for (int e = 0; e < width; e++) {
                const float x = to_float(of.each[e]) - mean;
                squares = fmaf(x, x, squares);
            }
        });
        const float scale = 1.0f / sqrtf(sum(squares) / float(p.width) + p.epsilon);
        const Elements* weights = operand(p.weight, 0);
        const Elements* biases = operand(p.bias, 0);
        const Elements* scales = operand(p.scale, row / p.rows_per_scale);
        const Elements* shifts = operand(p.shift, row / p.rows_per_shift);
        Elements* output = reinterpret_cast<Elements*>(static_cast<T*>(p.output) + row * p.width);
        each([&](const Elements& of, int chunk) {
            const Elements weight = weights[chunk];
            Elements bias{}, factor{}, shift{}, result;
            if (p.bias) bias = biases[chunk];
            if (p.scale) factor = scales[chunk];
            if (p.shift) shift = shifts[chunk];
#pragma unroll
            for (int e = 0; e < width; e++) {
                float y = (to_float(of.each[e]) - mean) * scale * to_float(weight.each[e]);
                if (p.bias) y += to_float(bias.each[e]);
                if (p.scale) y = fmaf(y, to_float(factor.each[e]), y);
                if (p.shift) y += to_float(shift.each[e]);
                result.each[e] = from_float<T>(y);
            }
            output[chunk] = result;
        });
    }

    MOH_DEVICE const Elements* operand(const void* rows, int64_t row) const {
        return reinterpret_cast<const Elements*>(static_cast<const T*>(rows) + row * p.width);
    }
};

template <class T, int width> MOH_DEVICE void layer_norm(const LayerNormParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int64_t row = int64_t(blockIdx.x) * (threads / lanes) + threadIdx.x / lanes;
    // Warps stay whole: all lanes have the same row.
    if (row >= p.rows) return;
    const T* x = static_cast<const T*>(p.x) + row * p.width;
    Row<T, width>{p, p.width / width, int(threadIdx.x) % lanes, reinterpret_cast<const Chunk<T, width>*>(x), {}}.normalise(row);
}

} // namespace

// moh_layer_norm_<type>_<elements of a chunk>. Grid: rows / 4.
#define MOH_LAYER_NORM(type, width)                                                                                    \
    MOH_KERNEL(moh_layer_norm_##type##_##width, LayerNormParams, threads, 6) { layer_norm<type, width>(p); }
MOH_LAYER_NORM(float, 1)
MOH_LAYER_NORM(float, 4)
MOH_LAYER_NORM(f16, 1)
MOH_LAYER_NORM(f16, 8)
MOH_LAYER_NORM(bf16, 1)
MOH_LAYER_NORM(bf16, 8)
