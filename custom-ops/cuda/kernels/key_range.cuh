// The keys that the tokens of a sequence see.
#pragma once

#include "device.cuh"
#include "params.h"

namespace {

// Keys are counted from key `first`, on which all those that a token sees begin.
struct KeyRange {
    int first, count;
    int before; // token t sees before + t + 1 keys, at least 0 and at most `count`

    // P: AttentionParams or AttentionSm90Params.
    template <class P> MOH_DEVICE KeyRange(const P& p, int batch) {
        if (p.first == nullptr) {
            first = 0, count = p.kv_len;
            before = p.is_causal ? p.kv_len - p.q_len : p.kv_len;
            return;
        }
        const int64_t capacity = p.kv_len;
        const int start = int(max(-int64_t(p.q_len), min(p.start[batch], capacity)));
        first = int(max(int64_t(0), min(p.first[batch], capacity)));
        count = max(0, min(p.kv_len, start + p.q_len) - first);
        before = start - first;
    }
    MOH_DEVICE int sees(int token) const { return max(0, min(count, before + token + 1)); }
};

} // namespace
