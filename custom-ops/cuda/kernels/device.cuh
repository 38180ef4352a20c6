// Wrappers of all PTX instructions and built-ins, which the emulator implements too.
//
// Rules for .cu files, so that one source compiles for the GPU and for the emulator (-DMOH_EMULATE, g++):
// - entry points are declared with MOH_KERNEL or MOH_CLUSTER_KERNEL; blocks are one-dimensional; warps are whole (no lane exits alone);
// - everything else is in an anonymous namespace (the emulator links all files into one library);
// - shared memory is dynamic: shared_memory() is its start, aligned to 1024 bytes; the launch defines its size, which
//   expect_shared_memory(bytes) checks;
// - may be used directly: threadIdx, blockIdx, blockDim, gridDim (.x/.y/.z), __syncthreads, __syncwarp, __shfl_sync,
//   __shfl_xor_sync, __shfl_up_sync, __shfl_down_sync, __ballot_sync, __any_sync, __all_sync (full masks only), __popc, __ffs,
//   __clz, atomicAdd, atomicMax, __ldg, __threadfence, fmaxf, fminf, fmaf, min, max, int2/4, uint2/4, float2/4 and make_*.
#pragma once

#include <stdint.h>

#ifdef MOH_EMULATE
#include "emulator/simt.h"
#else

#define MOH_DEVICE __device__ __forceinline__

// An entry point: MOH_KERNEL(name, Params, threads, min_blocks) { ... p ... }
#define MOH_KERNEL(name, Params, threads, min_blocks)                                                                 \
    extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ Params p)
// The same in clusters of `blocks` blocks, of which the grid is a multiple; one block per multiprocessor.
#define MOH_CLUSTER_KERNEL(name, Params, threads, blocks)                                                              \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(threads, 1)                            \
        name(const __grid_constant__ Params p)

MOH_DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char moh_shared[];
    return moh_shared;
}

// On the emulator, fails if the launch has not exactly this many bytes of shared memory: launchers repeat the sizes.
MOH_DEVICE void expect_shared_memory(size_t) {}
#endif

// 16-bit floats, as bits.
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

#ifdef MOH_EMULATE
#include "emulator/device.h"
#else

// ---------------------------------------------------------------------------------------------------- conversions

MOH_DEVICE float to_float(float x) { return x; }
MOH_DEVICE float to_float(f16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
    return r;
}
MOH_DEVICE float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// from_float<T>(x): x rounded to T.
template <class T> MOH_DEVICE T from_float(float x);
template <> MOH_DEVICE float from_float<float>(float x) { return x; }
template <> MOH_DEVICE f16 from_float<f16>(float x) {
    f16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}
template <> MOH_DEVICE bf16 from_float<bf16>(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
    return r;
}

// pack<T>(lo, hi): two 16-bit floats in a register, lo in the lower half (as in memory and in mma fragments).
template <class T> MOH_DEVICE uint32_t pack(float lo, float hi);
template <> MOH_DEVICE uint32_t pack<f16>(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
template <> MOH_DEVICE uint32_t pack<bf16>(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// a * b + c of both halves, each rounded to T once.
template <class T> MOH_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <> MOH_DEVICE uint32_t fma2<f16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
template <> MOH_DEVICE uint32_t fma2<bf16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// 2^x with relative error 2^-22; -inf yields 0.
MOH_DEVICE float exp2_approx(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Returns x opaquely, so that the compiler recomputes values derived from it instead of keeping them in registers.
MOH_DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ------------------------------------------------------------------------------------------------- memory movement

// The shared-memory address for PTX instructions.
MOH_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Asynchronous 16-byte copy from global to shared memory, both aligned to 16. If !valid, 16 zero bytes are written and
// nothing is read.
MOH_DEVICE void cp_async_16(void* shared, const void* global, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
// The same with 4 bytes.
MOH_DEVICE void cp_async_4(void* shared, const void* global, bool valid) {
    int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}
// Closes the group of this thread's copies since the last call.
MOH_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are outstanding. A barrier is needed before other threads read
// the data.
template <int pending> MOH_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// -------------------------------------------------------------------------------------------- matrices of fragments

// Four 8x8 matrices of 16-bit elements; lane i passes the address of row i % 8 of matrix i / 8 (16 bytes, aligned).
MOH_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
MOH_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// Two matrices; lanes 0 to 15 pass the addresses.
MOH_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
MOH_DEVICE void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// d (16x8, f32) += a (16x16, row-major) b (16x8, column-major), operands of type T = f16 or bf16.
template <class T> MOH_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> MOH_DEVICE void mma_m16n8k16<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> MOH_DEVICE void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ------------------------------------------------------------------------------------------- kernels of one node

// From compute capability 9.0 on, the second and later kernels of a node are launched so that they may start before the
// kernels before them have ended (`Stream::launch`). The rules, which the emulator checks:
// - no access to global memory before wait_for_previous_kernel(), neither reads nor writes; threads that do not call it
//   pass a barrier first, of threads of which one has called it;
// - every block calls it, on some thread, before it ends: the next kernel waits only for this one, and must find that
//   everything before has ended too;
// - what an earlier kernel of the node has written is read by plain loads, not __ldg, whose data must not change while a
//   kernel runs.
// So each kernel's accesses come after all accesses of the kernels before it, and memory of the workspace can be used
// again for other data by a later kernel of the node. The first kernel of a node is launched normally, after all
// earlier work on the stream: memory can be used again by other nodes, too.

// Allows the next kernel of the node to start, as soon as all blocks of this one have called this or ended.
MOH_DEVICE void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernels of the node have ended; this kernel then sees what they have written. Does nothing
// in a kernel that was launched normally.
MOH_DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// -------------------------------------------------------------------------------------------------------- barriers

// Named barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads, a multiple of 32.
MOH_DEVICE void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
MOH_DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif
