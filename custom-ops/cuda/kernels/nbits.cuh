// Matrices of blocks of 4 or 8 bits, or of T: see QuantizedParams. A value is (q - zero point) * scale, rounded to T.
#pragma once

#include "device.cuh"
#include "params.h"

namespace {

MOH_DEVICE int64_t row_bytes(const QuantizedParams& p) { return int64_t(p.depth) * p.bits / 8; }
// Bytes of the zero points of a row.
MOH_DEVICE int zero_bytes(const QuantizedParams& p) { return ((p.depth >> p.block_log2) * p.bits + 7) / 8; }

// What a block's values have in common.
struct Factors {
    float zero, scale;
};

// Of the block with element k of a row.
template <class T> MOH_DEVICE Factors factors_at(const QuantizedParams& p, int64_t row, int k) {
    const int block = k >> p.block_log2;
    Factors f;
    f.scale = to_float(static_cast<const T*>(p.scales)[row * (p.depth >> p.block_log2) + block]);
    f.zero = float(1 << (p.bits - 1));
    if (p.zero_points != nullptr) {
        const int byte = p.zero_points[row * zero_bytes(p) + block * p.bits / 8];
        f.zero = float(p.bits == 8 ? byte : byte >> (block % 2 * 4) & 15);
    }
    return f;
}

// One value.
template <class T> MOH_DEVICE float value_at(const QuantizedParams& p, int64_t row, int k) {
    if (p.bits == 16) return to_float(reinterpret_cast<const T*>(p.weight)[row * p.depth + k]);
    const Factors f = factors_at<T>(p, row, k);
    const int byte = p.weight[row * row_bytes(p) + int64_t(k) * p.bits / 8];
    const int q = p.bits == 8 ? byte : byte >> (k % 2 * 4) & 15;
    return to_float(from_float<T>((float(q) - f.zero) * f.scale));
}

} // namespace
