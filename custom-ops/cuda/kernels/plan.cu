// Makes the list of selected rows of every head from the gates; the host reads nothing back. Attention and linear
// kernels find their tiles in the lists. See PlanParams.

#include "device.cuh"
#include "params.h"

namespace {

constexpr int threads = 1024, warps = threads / 32;
constexpr unsigned full = 0xffffffffu;
// Entries that a warp scans between exchanges of counts with the other warps of its list: one ballot per lane.
constexpr int max_span = 32 * 32;
constexpr int loads = 8; // in flight

} // namespace

// Lists of selected entries. Grid: (batch, ceil(lists_per_batch / lists_per_block)); shared memory: 32 ints.
MOH_KERNEL(moh_plan_lists, PlanParams, 1024, 1) {
    start_next_kernel();
    wait_for_previous_kernel();
    if (p.next != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.next = 0;
    int* warp_counts = reinterpret_cast<int*>(shared_memory());
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warps_of_list = warps / p.lists_per_block, part = warp % warps_of_list;
    int n = blockIdx.y * p.lists_per_block + warp / warps_of_list;
    bool exists = n < p.lists_per_batch;
    int total = p.q_len * p.group, heads = p.lists_per_batch * p.group;
    int span = min(max_span, (total + 32 * warps_of_list - 1) / (32 * warps_of_list) * 32);

    int64_t list = int64_t(blockIdx.x) * p.lists_per_batch + n;
    const float* gates = p.gates + int64_t(blockIdx.x) * p.q_len * heads + n * p.group;
    int32_t* entries = p.entries + list * total;
    int count = 0;
    for (int start = 0; start < total; start += span * warps_of_list) {
        int first = start + part * span;
        unsigned ballots = 0; // lane s keeps the ballot of step s
        int selected = 0;
        for (int step = 0; step < span / 32; step += loads) {
            float gate[loads];
#pragma unroll
            for (int s = 0; s < loads; s++) {
                int i = first + (step + s) * 32 + lane;
                bool inside = exists && step + s < span / 32 && i < total;
                gate[s] = inside ? __ldg(gates + int64_t(i / p.group) * heads + i % p.group) : 0.0f;
            }
#pragma unroll
            for (int s = 0; s < loads; s++) {
                unsigned ballot = __ballot_sync(full, gate[s] != 0.0f);
                if (lane == step + s) ballots = ballot;
                selected += __popc(ballot);
            }
        }
        if (lane == 0) warp_counts[warp] = selected;
        __syncthreads();
        int position = count;
        for (int w = 0; w < warps_of_list; w++) {
            int there = warp_counts[warp - part + w];
            position += w < part ? there : 0;
            count += there;
        }
        __syncthreads();
        for (int step = 0; step < span / 32; step++) {
            unsigned ballot = __shfl_sync(full, ballots, step);
            if (ballot >> lane & 1) entries[position + __popc(ballot & ((1u << lane) - 1))] = first + step * 32 + lane;
            position += __popc(ballot);
        }
    }
    if (exists && part == 0 && lane == 0) p.counts[list] = count;
}
