// Scores of attention to the base 2.
#pragma once

#include "device.cuh"

constexpr float log2_e = 1.4426950408889634f;

// A bias times log2(e). Finite ones stay finite, since -inf masks a key.
template <class T> MOH_DEVICE float bias_in_base_two(T bias) {
    constexpr float largest = 3.4028235e38f;
    const float x = to_float(bias), product = log2_e * x;
    return fabsf(x) <= largest ? fminf(fmaxf(product, -largest), largest) : product;
}
template <> MOH_DEVICE float bias_in_base_two<f16>(f16 bias) { return log2_e * to_float(bias); }
