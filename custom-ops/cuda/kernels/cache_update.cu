// CacheUpdate: writes the keys or values of new tokens into a cache. Where past and present are the same memory, nothing
// else is written; otherwise the past is copied, and what neither has is zeroed.
//
// Each block copies a part of one KV head of one row of the batch. Where a row's update starts, only the GPU knows.

#include "device.cuh"
#include "params.h"

namespace {

constexpr int threads = 256, copies = 4; // copies in flight per thread

template <class Unit> MOH_DEVICE void update_cache(const CacheUpdateParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    const int list = int(blockIdx.x) / p.blocks, part = int(blockIdx.x) % p.blocks;
    const int batch = list / p.kv_heads, head = list % p.kv_heads;
    const int start = int(max(int64_t(0), min(p.start[batch], int64_t(p.positions - p.q_len))));
    const int first = p.in_place ? start : 0, count = p.in_place ? p.q_len : p.positions;
    const int units = count * p.row_units;
    const Unit* past = static_cast<const Unit*>(p.past) + int64_t(list) * p.capacity * p.row_units;
    const Unit* update = static_cast<const Unit*>(p.update) + (int64_t(batch) * p.q_len * p.kv_heads + head) * p.row_units;
    Unit* present = static_cast<Unit*>(p.present) + (int64_t(list) * p.positions + first) * p.row_units;
    const int begin = part * threads * copies + int(threadIdx.x);
    Unit copied[copies];
#pragma unroll
    for (int i = 0; i < copies; i++) {
        const int unit = begin + i * threads, position = first + unit / p.row_units, within = unit % p.row_units;
        copied[i] = Unit{};
        if (unit >= units) continue;
        if (position >= start && position < start + p.q_len)
            copied[i] = update[int64_t(position - start) * p.kv_heads * p.row_units + within];
        else if (position < p.capacity)
            copied[i] = past[int64_t(position) * p.row_units + within];
    }
#pragma unroll
    for (int i = 0; i < copies; i++)
        if (begin + i * threads < units) present[begin + i * threads] = copied[i];
}

} // namespace

// moh_cache_update_<bytes of a unit>. Grid: batch * kv_heads * blocks.
MOH_KERNEL(moh_cache_update_16, CacheUpdateParams, 256, 1) { update_cache<uint4>(p); }
MOH_KERNEL(moh_cache_update_8, CacheUpdateParams, 256, 1) { update_cache<uint2>(p); }
MOH_KERNEL(moh_cache_update_4, CacheUpdateParams, 256, 1) { update_cache<uint32_t>(p); }
MOH_KERNEL(moh_cache_update_2, CacheUpdateParams, 256, 1) { update_cache<uint16_t>(p); }
