// Whether a combination is one product without gates: if the blocks of heads that are off are zeros, as routed attention leaves them,
// and so many heads are on that skipping the others saves less than gathering the rows costs. The GPU finds out, and the kernels of
// the ways that are not used return at once.
#pragma once

#include "device.cuh"
#include "params.h"

namespace {

// LinearParams::checked: whether the product failed, then two numbers of each block of the check.
struct Checked {
    int32_t failed; // a result is not finite: an infinite or NaN weight met a zero
    struct {
        int32_t dirty; // a block that is off is not 0
        int32_t on;    // (token, head) pairs that are on
    } found[1];
};

// The check. x is contiguous, a head's block a multiple of 16 bytes. Grid: p.checks blocks.
template <class T> MOH_DEVICE void check_blocks(const LinearParams& p) {
    constexpr unsigned full = 0xffffffffu;
    start_next_kernel();
    wait_for_previous_kernel();
    int* const scratch = reinterpret_cast<int*>(shared_memory()); // two numbers a warp
    expect_shared_memory(blockDim.x / 32 * 2 * sizeof(int));
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    const int64_t pairs = int64_t(p.tokens) * p.heads, stride = int64_t(gridDim.x) * warps * 32;
    const int units = p.depth * int(sizeof(T)) / 16;
    uint32_t bits = 0;
    int on = 0;
    for (int64_t first = (int64_t(blockIdx.x) * warps + warp) * 32; first < pairs; first += stride) {
        const bool exists = first + lane < pairs, is_on = exists && __ldg(p.gates + first + lane) != 0.0f;
        on += __popc(__ballot_sync(full, is_on));
        const unsigned off = __ballot_sync(full, exists && !is_on);
        // Unit i of the 32 contiguous blocks belongs to block i / units.
        const uint4* blocks = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + first * p.depth);
#pragma unroll 4
        for (int i = lane; i < 32 * units; i += 32) {
            if (!(off >> (i / units) & 1)) continue;
            const uint4 unit = __ldg(blocks + i);
            bits |= unit.x | unit.y | unit.z | unit.w;
        }
    }
    const bool dirty = __any_sync(full, (bits & 0x7fff7fffu) != 0); // -0 is a zero
    if (lane == 0) scratch[2 * warp] = dirty, scratch[2 * warp + 1] = on;
    __syncthreads();
    if (threadIdx.x != 0) return;
    Checked& checked = *reinterpret_cast<Checked*>(p.checked);
    if (blockIdx.x == 0) checked.failed = 0;
    int sum = 0, any = 0;
    for (int w = 0; w < warps; w++) any |= scratch[2 * w], sum += scratch[2 * w + 1];
    checked.found[blockIdx.x] = {any, sum};
}

// Whether the product is the way. Called by whole warps; the same in all of them.
MOH_DEVICE bool is_one_product(const LinearParams& p) {
    if (p.checked == nullptr) return false;
    const Checked& checked = *reinterpret_cast<const Checked*>(p.checked);
    int dirty = 0, on = 0;
    for (int i = int(threadIdx.x) % 32; i < p.checks; i += 32) dirty |= checked.found[i].dirty, on += checked.found[i].on;
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        dirty |= __shfl_xor_sync(0xffffffffu, dirty, lanes);
        on += __shfl_xor_sync(0xffffffffu, on, lanes);
    }
    return dirty == 0 && on >= p.least_on;
}
// Whether the product has computed the output.
MOH_DEVICE bool is_done(const LinearParams& p) { return is_one_product(p) && *p.checked == 0; }

} // namespace
