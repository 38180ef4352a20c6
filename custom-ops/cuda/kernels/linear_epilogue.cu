// What becomes of a dense layer's output, in place: act(y + bias) * gate + residual. Of these operands, a number is the same for all
// elements, and rows are those of the output; rows of the gate are shared by several.
//
// The product has rounded y to T. Sums beyond float16's range are infinite then: where that would give NaN for a finite result, the
// largest finite number stands in.

#include "linear.cuh"
#include "params.h"

namespace {

constexpr int threads = 256;

template <class T> MOH_DEVICE float number_at(const void* operand) { return to_float(*static_cast<const T*>(operand)); }

// The sum y, where an infinity is not what follows may use: below 0, an activation's limit is 0, and -inf * 0 would be NaN; a gate and a
// residual may be 0, or of the other sign.
template <class T> MOH_DEVICE float sum_at(T y, bool, bool) { return to_float(y); }
template <> MOH_DEVICE float sum_at<f16>(f16 y, bool is_activated, bool is_combined) {
    constexpr float largest = 65504.0f;
    const float x = to_float(y);
    if (x == -INFINITY && (is_activated || is_combined)) return -largest;
    return x == INFINITY && is_combined ? largest : x;
}

// Each thread computes `width` neighbouring elements of a row.
template <class T, int width> MOH_DEVICE void replace_sums(const LinearEpilogueParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int64_t at = (int64_t(blockIdx.x) * threads + threadIdx.x) * width;
    if (at >= int64_t(p.rows) * p.columns) return;
    struct alignas(sizeof(T) * width) Chunk {
        T each[width];
    };
    const int row = int(at / p.columns), column = int(at % p.columns);
    const float bias = p.bias ? number_at<T>(p.bias) : 0.0f;
    const float gate = p.gate && p.gate_is_number ? number_at<T>(p.gate) : 1.0f;
    const float residual = p.residual && p.residual_is_number ? number_at<T>(p.residual) : 0.0f;
    const bool has_gates = p.gate && !p.gate_is_number, has_residuals = p.residual && !p.residual_is_number;
    Chunk& output = *reinterpret_cast<Chunk*>(static_cast<T*>(p.output) + at);
    Chunk sums = output, gates{}, residuals{};
    if (has_gates) {
        const T* first = static_cast<const T*>(p.gate) + int64_t(row / p.rows_per_gate) * p.columns + column;
        gates = *reinterpret_cast<const Chunk*>(first);
    }
    if (has_residuals) residuals = *reinterpret_cast<const Chunk*>(static_cast<const T*>(p.residual) + at);
#pragma unroll
    for (int e = 0; e < width; e++) {
        float x = activate(sum_at(sums.each[e], p.activation >= 0, p.gate || p.residual) + bias, p.activation);
        x = x * (has_gates ? to_float(gates.each[e]) : gate) + (has_residuals ? to_float(residuals.each[e]) : residual);
        sums.each[e] = from_float<T>(x);
    }
    output = sums;
}

} // namespace

// moh_linear_epilogue_<type>_<elements per thread>. Grid: elements of the output.
#define MOH_EPILOGUE(type, width)                                                                                      \
    MOH_KERNEL(moh_linear_epilogue_##type##_##width, LinearEpilogueParams, threads, 4) { replace_sums<type, width>(p); }
MOH_EPILOGUE(float, 1)
MOH_EPILOGUE(float, 4)
MOH_EPILOGUE(f16, 1)
MOH_EPILOGUE(f16, 8)
MOH_EPILOGUE(bf16, 1)
MOH_EPILOGUE(bf16, 8)
