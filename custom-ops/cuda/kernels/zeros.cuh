// Zeros for blocks of heads that are off.
#pragma once

#include "device.cuh"

// Writes zeros to the `bytes` bytes (a multiple of 2) of every block whose gate is 0. Block i of `output` belongs to
// gates[i]; there are blocks = batch * tokens * heads of them. The calling warp has index `warp` among the `warps`
// that share the work; all 32 lanes call. Other blocks are not touched, so this may run concurrently with the kernel
// that writes them.
MOH_DEVICE void write_zeros(void* output, const float* gates, int64_t blocks, int bytes, int64_t warp, int64_t warps) {
    int lane = threadIdx.x % 32;
    bool wide = bytes % 16 == 0 && reinterpret_cast<uintptr_t>(output) % 16 == 0;
    int unit = wide ? 16 : 2, units = bytes / unit;
    auto is_off = [&](int64_t block) { return block < blocks && __ldg(gates + block) == 0.0f; };
    bool next_off = is_off(warp * 32 + lane);
    for (int64_t first = warp * 32; first < blocks; first += warps * 32) {
        bool off = next_off;
        next_off = is_off(first + warps * 32 + lane); // prefetched while this round writes
        unsigned mask = __ballot_sync(0xffffffffu, off);
        if (mask == 0) continue;
        unsigned char* start = static_cast<unsigned char*>(output) + first * bytes;
        // Unit i of the 32 contiguous blocks belongs to block i / units.
        for (int i = lane; i < 32 * units; i += 32) {
            if (!(mask >> (i / units) & 1)) continue;
            if (wide)
                reinterpret_cast<uint4*>(start)[i] = make_uint4(0, 0, 0, 0);
            else
                reinterpret_cast<uint16_t*>(start)[i] = 0;
        }
    }
}
