// Runs a thread block on a CPU: every thread is a fiber, all on one OS thread; blocks run one after the other. The blocks
// of a cluster run together.
//
// Collective operations (barriers, shuffles, matrix instructions) are executed by the last thread that arrives.
// Undefined behaviour is exposed: shared memory starts as NaN, memory outside of allocations is inaccessible, and a
// deadlock ends the process with a message. Normally threads run in order, blocks in a random one, and asynchronous
// copies complete when they are waited for (the latest moment). In every second launch of a kernel on a stream, the
// order is reversed and copies complete at once (the earliest moment). Tests run every call twice, so a missing barrier
// yields two different results.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace simt {

struct Index {
    unsigned x, y, z;
};

// ------------------------------------------------------------------------------------------------- for device.cuh

// Suspends this thread while *word == old. `what` is printed in case of a deadlock.
void wait(const char* what, const volatile uint32_t* word, uint32_t old);

// Collects the `width` threads (a multiple of 32) of this thread's group. The last one to arrive calls work(arguments)
// with every thread's argument, in order; then all continue. `what` must be the same for all.
void collective(const char* what, unsigned width, void* argument, void (*work)(void** arguments));

// Barrier `id` for `threads` threads. If not `sync`, arrives without waiting.
void barrier(const char* what, unsigned id, unsigned threads, bool sync);

// Start and size of the block's dynamic shared memory, and its addresses as device code sees them: offset + 1024.
unsigned char* shared_memory();
size_t shared_size();
uint32_t shared_address(const void* p);
// Host pointer to `bytes` bytes at a shared-memory address; ends the process if they are out of bounds.
void* shared_pointer(uint32_t address, size_t bytes);

// This block's rank in its cluster, and this warp's index among all warps of the cluster.
unsigned cluster_rank();
unsigned warp_of_cluster();
// As shared_pointer(), in the shared memory of the cluster's block `rank`, which must not have returned. It must not
// return either before a barrier of the cluster that follows.
void* cluster_pointer(uint32_t address, size_t bytes, unsigned rank);
// Barrier of all threads of the cluster.
void cluster_sync();

// Records an asynchronous copy of this thread; if !valid, zeros are written.
void copy_async(void* shared, const void* global, unsigned bytes, bool valid);
void copy_commit();
void copy_wait(unsigned pending);

// In a launch that may start before the previous kernel has ended: waits until global memory is accessible.
void wait_for_previous_kernel();

// Ends the process with the message, kernel, block and thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---------------------------------------------------------------------------------------------------- for driver.cpp

struct Kernel {
    const char* name;
    size_t params_size;
    unsigned max_threads, cluster;
    void (*body)(const void* params);
    Kernel* next;
    Kernel(const char* name, size_t params_size, unsigned max_threads, unsigned cluster, void (*body)(const void*));
};
const Kernel* find(const char* name);
// The order in which a launch's threads and blocks run.
struct Order {
    bool reversed;
    uint64_t seed; // of the blocks' order, if not reversed
};
// `hide(true)` makes global memory inaccessible, `hide(false)` accessible again. If given, each cluster of blocks runs as
// far as it can with global memory hidden, as if the previous kernel were still running; it is an error if it accesses
// global memory, or ends, without having called wait_for_previous_kernel().
void launch(const Kernel& kernel, Index grid, unsigned threads, size_t shared_bytes, const void* params, Order order,
            void (*hide)(bool hidden) = nullptr);

} // namespace simt

extern simt::Index threadIdx, blockIdx, blockDim, gridDim;

// ------------------------------------------------------------------------------------------------- CUDA's own names

#define MOH_DEVICE inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __align__(n) alignas(n)

#define MOH_KERNEL(name, Params, threads, min_blocks) MOH_CLUSTER_KERNEL(name, Params, threads, 1)
#define MOH_CLUSTER_KERNEL(name, Params, threads, cluster)                                                             \
    static void name(const Params& p);                                                                                 \
    static simt::Kernel register_##name(#name, sizeof(Params), threads, cluster,                                       \
                                        [](const void* p) { name(*static_cast<const Params*>(p)); });                  \
    static void name(const Params& p)

inline unsigned char* shared_memory() { return simt::shared_memory(); }
inline void expect_shared_memory(size_t bytes) {
    if (bytes != simt::shared_size()) simt::fail("shared memory: the kernel uses %zu bytes, the launch has %zu", bytes, simt::shared_size());
}

#define MOH_VECTOR(type, name)                                                                                         \
    struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                           \
    struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };                                                     \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                   \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
MOH_VECTOR(int, int)
MOH_VECTOR(unsigned, uint)
MOH_VECTOR(float, float)
#undef MOH_VECTOR

using std::max;
using std::min;

inline void __syncthreads() { simt::barrier("__syncthreads", 0, blockDim.x, true); }
inline void __syncwarp(unsigned = 0xffffffffu) {
    simt::collective("__syncwarp", 32, nullptr, [](void**) {});
}

namespace simt {
template <class T> struct Shuffle {
    T value, result;
    unsigned source; // lane
};
template <class T> T shuffle(const char* what, T value, unsigned source) {
    Shuffle<T> s{value, value, source};
    collective(what, 32, &s, [](void** lanes) {
        for (int i = 0; i < 32; i++) {
            auto* lane = static_cast<Shuffle<T>*>(lanes[i]);
            lane->result = static_cast<Shuffle<T>*>(lanes[lane->source & 31])->value;
        }
    });
    return s.result;
}
inline unsigned lane() { return threadIdx.x & 31; }
} // namespace simt

// Sub-warps of `width` lanes (a power of two), as in CUDA.
template <class T> T __shfl_sync(unsigned, T v, int source, int width = 32) {
    return simt::shuffle("__shfl_sync", v, (simt::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
    return simt::shuffle("__shfl_xor_sync", v, simt::lane() ^ mask);
}
template <class T> T __shfl_up_sync(unsigned, T v, unsigned delta, int width = 32) {
    unsigned inside = simt::lane() & (width - 1);
    return simt::shuffle("__shfl_up_sync", v, inside < delta ? simt::lane() : simt::lane() - delta);
}
template <class T> T __shfl_down_sync(unsigned, T v, unsigned delta, int width = 32) {
    unsigned inside = simt::lane() & (width - 1);
    return simt::shuffle("__shfl_down_sync", v, inside + delta >= unsigned(width) ? simt::lane() : simt::lane() + delta);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    simt::Shuffle<unsigned> s{predicate != 0, 0, 0};
    simt::collective("__ballot_sync", 32, &s, [](void** lanes) {
        unsigned mask = 0;
        for (int i = 0; i < 32; i++) mask |= static_cast<simt::Shuffle<unsigned>*>(lanes[i])->value << i;
        for (int i = 0; i < 32; i++) static_cast<simt::Shuffle<unsigned>*>(lanes[i])->result = mask;
    });
    return s.result;
}
inline int __any_sync(unsigned m, int predicate) { return __ballot_sync(m, predicate) != 0; }
inline int __all_sync(unsigned m, int predicate) { return __ballot_sync(m, predicate) == 0xffffffffu; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
template <class T> T __ldg(const T* p) { return *p; }
inline void __threadfence() {}
template <class T> T atomicAdd(T* p, T x) {
    T old = *p;
    *p = old + x;
    return old;
}
template <class T> T atomicMax(T* p, T x) {
    T old = *p;
    *p = old > x ? old : x;
    return old;
}
template <class T> T atomicExch(T* p, T x) {
    T old = *p;
    *p = x;
    return old;
}
inline unsigned __float_as_uint(float x) {
    unsigned r;
    memcpy(&r, &x, 4);
    return r;
}
inline float __uint_as_float(unsigned x) {
    float r;
    memcpy(&r, &x, 4);
    return r;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
