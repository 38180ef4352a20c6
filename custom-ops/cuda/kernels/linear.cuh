// Shared by projections and RoutedMLP: activations, and choices that depend on the number of heads that are on.
#pragma once

#include "device.cuh"
#include "params.h"

namespace {

MOH_DEVICE float activate(float x, int activation) {
    switch (activation) {
        case 0: return fmaxf(x, 0.0f);
        case 1: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
        case 2: return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
        case 3:
        case 4: return x / (1.0f + expf(-x));
        default: return x;
    }
}

// Faster, with an error of about 1e-6 of x: for 16-bit results. GELU's error function is Abramowitz and Stegun 7.1.26;
// its tanh form is x times the logistic function of twice the argument.
MOH_DEVICE float activate_fast(float x, int activation) {
    if (activation == 0) return fmaxf(x, 0.0f);
    if (activation == 1) {
        float z = fabsf(x) * 0.70710678f, t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
        float tail = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
        tail *= 0.5f * t * __expf(-z * z);
        return x * (x < 0.0f ? tail : 1.0f - tail);
    }
    float slope = activation == 2 ? 1.59576912f * fmaf(0.044715f * x, x, 1.0f) : 1.0f;
    return __fdividef(x, 1.0f + __expf(-slope * x));
}

// The number of (token, head) pairs that are on, from the plan. Called by whole warps.
MOH_DEVICE int64_t pairs_on(const LinearParams& p) {
    int64_t on = 0;
    for (int head = int(threadIdx.x & 31); head < p.heads; head += 32) on += p.counts[head];
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        uint32_t low = __shfl_xor_sync(0xffffffffu, uint32_t(on), lanes);
        uint32_t high = __shfl_xor_sync(0xffffffffu, uint32_t(on >> 32), lanes);
        on += int64_t(uint64_t(high) << 32 | low);
    }
    return on;
}

// Whether so many heads are on that all are computed. The result is the same in every thread block.
MOH_DEVICE bool is_dense(const LinearParams& p) {
    if (p.gates == nullptr) return true;
    return p.dense_percent <= 100 && pairs_on(p) * 100 >= int64_t(p.tokens) * p.heads * p.dense_percent;
}

} // namespace
