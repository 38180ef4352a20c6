// RoutedCombine, and the second half of RoutedMLP: the sum of x_h W_h^T over the heads that are on.
//
// Both kernels are launched over the same output tiles. From the tile's gates each decides whether it is the faster
// one for the tile, and otherwise skips it; on Hopper both may find that one product has computed all (combine_check.cuh). Sums are computed in a fixed order, without atomics.
//
// moh_combine_dense multiplies consecutive tokens by all heads that any of them uses; it reads blocks that are off as
// zeros.
// moh_combine_routed gathers the rows that are on, head by head, and accumulates their products in shared memory.
#include "combine_dense.cuh"
#include "combine_routed.cuh"

namespace {

// Adds the partial sums of all parts; one thread per element.
template <class T> MOH_DEVICE void sum_parts(const LinearParams& p) {
    wait_for_previous_kernel();
    const int64_t elements = int64_t(p.tokens) * p.columns, i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= elements) return;
    float sum = 0.0f;
    for (int part = 0; part < p.parts; part++) sum += p.partial[part * elements + i];
    static_cast<T*>(p.output)[i / p.columns * p.output_row + i % p.columns] = from_float<T>(sum);
}

} // namespace

// moh_combine_{dense,routed}_<type>_<layout>_<tokens>; _any if addresses or widths are not multiples of 16 bytes. Up
// to 32 tokens are limited by reading the weights: the dense kernel reads those of the heads in use once, in narrow
// tiles with many copies in flight; of 16 bits and layout 0, nbits.cu does.
#define MOH_DENSE(variant, type, layout, rows, columns, stages, aligned)                                               \
    MOH_KERNEL(moh_combine_dense_##type##_##layout##_##variant, LinearParams, rows, 1) {                               \
        Dense<Tile<type, layout, rows, columns, stages>, aligned>::run(p);                                             \
    }
#define MOH_ROUTED(variant, type, layout, tokens, stages, aligned)                                                     \
    MOH_KERNEL(moh_combine_routed_##type##_##layout##_##variant, LinearParams, 256, 1) {                               \
        Routed<type, layout, tokens, stages, aligned>::run(p);                                                         \
    }
#define MOH_COMBINE(type, layout)                                                                                      \
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
MOH_DENSE(32, f16, 1, 32, 32, 8, true)
MOH_DENSE(32, bf16, 1, 32, 32, 8, true)
MOH_DENSE(32, float, 0, 32, 32, 8, true)
MOH_DENSE(32, float, 1, 32, 32, 8, true)
MOH_KERNEL(moh_combine_sum_f16, LinearParams, 256, 4) { sum_parts<f16>(p); }
MOH_KERNEL(moh_combine_sum_bf16, LinearParams, 256, 4) { sum_parts<bf16>(p); }
MOH_KERNEL(moh_combine_sum_float, LinearParams, 256, 4) { sum_parts<float>(p); }
