// Instructions that only sm_90a has: mbarriers, tensor memory access (TMA), warpgroup matrix products (wgmma),
// setmaxnreg.
//
// Sources of every layout: two for each, because neither the compiler nor the emulator, which is written from this
// file, would detect a misreading. ISA is the PTX ISA, chapter wgmma, "Register fragments and shared memory matrix
// layouts":
// - swizzles: a 16-byte chunk at address a lies at a ^ (((a >> 7) & m) << 4), m = 7, 3, 1 for the 128-, 64- and 32-byte mode (ISA,
//   canonical layouts: Swizzle<3,4,3>, <2,4,3>, <1,4,3>; CuTe uses these for TMA and wgmma alike);
// - descriptors: bits 0-13 start, 16-29 leading offset, 32-45 stride offset, all >> 4, 49-51 base offset (0: patterns start at
//   multiples of 1024, 512, 256 here), 62-63 mode: 1 = 128, 2 = 64, 3 = 32 bytes (ISA, "Matrix descriptor format"; CuTe,
//   mma_sm90_desc.hpp);
// - the offsets' meaning: K-major, swizzled: stride = from 8 rows to the next 8, leading unused. MN-major, swizzled: leading = from
//   one swizzle width of MN to the next, stride = from 8 k to the next 8 (ISA, "Strides", and its examples for 32 and 64 bytes with
//   bf16; CuTe, mma_traits_sm90_gmma.hpp: ((T,2^b,m),(8,k)):((1,T,LBO),(2^b T,SBO)));
// - MN-major with n = 72 and 128-byte rows, one whole swizzle width and 8 columns of the next: "Leading Dimension Byte Offset"
//   (ISA 9.7.15.5.1.2.1.1 or 9.7.16.5.1.2.1.1, by version) defines the offset of swizzled layouts as that "from the first
//   (swizzle-byte-size/16) rows to the next", in units of 8 elements, whether or not all of the next exist, and no 8 x 8 core matrix
//   of n = 72 has a column that is not used. CuTe never does this: it takes the widest swizzle that divides n. Nothing confirms it but
//   the text; widths_of_tiles in tests/it/head_linear.rs tries it first;
// - a step of 16 k inside a K-major swizzled row is 32 bytes more on the start address: the swizzle acts on the sum (ISA, canonical
//   layouts with 2k columns of T; CuTe's DescriptorIterator adds just so, and FlashAttention-3 rests on it);
// - fragments: warp w holds rows 16 w to 16 w + 15. Accumulator d[i]: row lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4)
//   + i % 2; A: as mma.m16n8k16 (ISA, figures of wgmma.m64nNk16; CuTe's CLayout_64xN, ALayout_64x16).
#pragma once

#include "device.cuh"
#include "params.h"

// Row size of a panel in bytes. A matrix of 16-bit elements is stored in shared memory as panels of `rows` x (bytes /
// 2) elements.
enum class Swizzle : uint32_t { B128 = 1, B64 = 2, B32 = 3 };

// The swizzled address of the 16-byte chunk at `offset` from a multiple of 1024.
MOH_DEVICE uint32_t swizzle(uint32_t offset, Swizzle mode) {
    uint32_t mask = mode == Swizzle::B128 ? 7 : mode == Swizzle::B64 ? 3 : 1;
    return offset ^ (((offset >> 7) & mask) << 4);
}

// A matrix operand in shared memory; leading, stride and offset in bytes. Offsets in shared memory have fewer than 18 bits, so
// they can be added to the descriptor's lower half. The address has the block's rank in its cluster above them (bit 24 and up):
// in the descriptor it would be a part of the leading offset.
template <Swizzle mode, uint32_t leading, uint32_t stride> struct Operand {
    uint32_t low;
    MOH_DEVICE explicit Operand(uint32_t address) : low((address & 0x3ffff) >> 4 | leading >> 4 << 16) {}
    MOH_DEVICE uint64_t at(uint32_t offset) const {
        return uint64_t(stride >> 4 | uint32_t(mode) << 30) << 32 | (low + (offset >> 4));
    }
};

// A position in a ring of barriers. Consumers wait for `parity`, the producer for the opposite.
template <int slots> struct Position {
    int slot = 0;
    uint32_t parity = 0;
    MOH_DEVICE void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

#ifdef MOH_EMULATE
#include "emulator/hopper.h"
#else

// --------------------------------------------------------------------------------------------------------- mbarrier

MOH_DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the asynchronous proxy; __syncthreads must follow to make them visible to the
// block, or cluster_sync to make them visible to the cluster.
MOH_DEVICE void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
MOH_DEVICE void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and makes the phase also wait for `bytes` bytes of TMA.
MOH_DEVICE void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Arrives once all earlier cp_async copies of this thread are complete.
MOH_DEVICE void mbarrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase with this parity is complete. A new barrier counts as having completed parity 1.
MOH_DEVICE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile("{\n\t"
                 ".reg .pred done;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}
// Arrives at the same barrier of the cluster's block `rank`, which may be this one. Only says that this thread's waits are
// over, such as that wgmma has read an operand: normal reads and writes are not ordered between blocks, which would take
// a fence of the whole GPU.
MOH_DEVICE void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile("{\n\t"
                 ".reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

// --------------------------------------------------------------------------------------------------------- clusters

// This block's rank in its cluster.
MOH_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Barrier of all threads of the cluster. A block must not return before its neighbours' last access to its shared
// memory, so such a barrier ends every kernel with clusters. Does not order normal reads and writes.
MOH_DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}

// As cp_async_16, but reads only the first `bytes` bytes (0 to 16); the others are zeros.
MOH_DEVICE void cp_async_first(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

// -------------------------------------------------------------------------------------------------------------- TMA

MOH_DEVICE void tma_prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies a box of a rank-4 tensor to shared memory (aligned to 1024). `barrier` counts its bytes, including zeros for
// out-of-bounds elements.
MOH_DEVICE void tma_load(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier))
                 : "memory");
}
// The same to the same addresses in each block of the cluster whose bit in `mask` is set; each block's own barrier counts
// the bytes. A barrier may count bytes before this block's mbarrier_arrive_expect announces them, but not before its
// phase has begun.
MOH_DEVICE void tma_load_multicast(void* shared, const TensorMap* map, uint64_t* barrier, uint16_t mask, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(shared_address(barrier)), "h"(mask)
                 : "memory");
}
// Makes this thread's normal writes to shared memory visible to wgmma and TMA; a barrier must follow.
MOH_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -------------------------------------------------------------------------------------------------------- registers

// Sets the number of registers per thread of this warpgroup, a multiple of 8. All of its warps must call it.
template <int count> MOH_DEVICE void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> MOH_DEVICE void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ------------------------------------------------------------------------------------------------------------ wgmma

// Required before the first wgmma, and after other writes to its registers.
MOH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOH_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending> MOH_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving accesses to these registers across the call: wgmma changes them asynchronously, up to
// the wait.
template <int n> MOH_DEVICE void keep(float (&r)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int n> MOH_DEVICE void keep(uint32_t (&r)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+r"(r[i])::"memory");
}

// Keeps later waits after the computation of x (never -inf), by a store that is never executed. Otherwise ptxas moves
// a wait before arithmetic that does not depend on it but is meant to overlap with the product; it does not move waits
// across a store.
MOH_DEVICE void order_after(float x) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.f32 p, %0, 0fFF800000;\n\t@p st.shared.f32 [%1], %0;\n\t}" ::"f"(x),
                 "r"(shared_address(shared_memory()))
                 : "memory");
}

// d (64 x n, f32) = a b, or d + a b if accumulate != 0; T = f16 or bf16, 16 k.
//   wgmma_ss: a and b from shared memory, both K-major (b as n rows of k);
//   wgmma_ss_mn: the same with b MN-major (b as k rows of n);
//   wgmma_rs: a from registers, b MN-major.
template <class T, int n> MOH_DEVICE void wgmma_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate);
template <class T, int n> MOH_DEVICE void wgmma_ss_mn(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate);
template <class T, int n> MOH_DEVICE void wgmma_rs(float (&d)[n / 2], const uint32_t* a, uint64_t b, int accumulate);

#define MOH_DIGITS(i) "%" #i "0, %" #i "1, %" #i "2, %" #i "3, %" #i "4, %" #i "5, %" #i "6, %" #i "7, %" #i "8, %" #i "9"
#define MOH_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MOH_TEN_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"
#define MOH_TEN(i) ", " MOH_DIGITS(i)
#define MOH_D(i) "+f"(d[i])
#define MOH_D8(i) MOH_D(i), MOH_D(i + 1), MOH_D(i + 2), MOH_D(i + 3), MOH_D(i + 4), MOH_D(i + 5), MOH_D(i + 6), MOH_D(i + 7)
#define MOH_D32(i) MOH_D8(i), MOH_D8(i + 8), MOH_D8(i + 16), MOH_D8(i + 24)
#define MOH_NAMES_16 MOH_TEN_0 ", %10, %11, %12, %13, %14, %15"
#define MOH_NAMES_32 MOH_TEN_0 MOH_TEN(1) MOH_TEN(2) ", %30, %31"
#define MOH_NAMES_36 MOH_TEN_0 MOH_TEN(1) MOH_TEN(2) ", %30, %31, %32, %33, %34, %35"
#define MOH_NAMES_40 MOH_TEN_0 MOH_TEN(1) MOH_TEN(2) MOH_TEN(3)
#define MOH_NAMES_48 MOH_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MOH_NAMES_64 MOH_NAMES_40 MOH_TEN(4) MOH_TEN(5) ", %60, %61, %62, %63"
#define MOH_NAMES_80 MOH_NAMES_40 MOH_TEN(4) MOH_TEN(5) MOH_TEN(6) MOH_TEN(7)
#define MOH_NAMES_128                                                                                                  \
    MOH_NAMES_40 MOH_TEN(4) MOH_TEN(5) MOH_TEN(6) MOH_TEN(7) MOH_TEN(8) MOH_TEN(9) MOH_TEN(10) MOH_TEN(11)             \
        ", %120, %121, %122, %123, %124, %125, %126, %127"

// Operands after the accumulators start at %n/2.
#define MOH_WGMMA_SS(name, b_major, T, n, names, o0, o1, o2, ...)                                                     \
    template <> MOH_DEVICE void name<T, n>(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {                \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #o2 ", 0;\n\t"                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #T "." #T " {" names "}, %" #o0 ", %" #o1       \
                     ", p, 1, 1, 0, " #b_major ";\n\t}"                                                                \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }
#define MOH_WGMMA(T, n, names, o0, o1, o2, o3, o4, o5, ...)                                                            \
    MOH_WGMMA_SS(wgmma_ss, 0, T, n, names, o0, o1, o2, __VA_ARGS__)                                                    \
    MOH_WGMMA_SS(wgmma_ss_mn, 1, T, n, names, o0, o1, o2, __VA_ARGS__)                                                 \
    template <> MOH_DEVICE void wgmma_rs<T, n>(float (&d)[n / 2], const uint32_t* a, uint64_t b, int accumulate) {     \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #o5 ", 0;\n\t"                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #T "." #T " {" names "}, {%" #o0 ", %" #o1      \
                     ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, 1;\n\t}"                                               \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }
#define MOH_D36 MOH_D32(0), MOH_D(32), MOH_D(33), MOH_D(34), MOH_D(35)
#define MOH_D16(i) MOH_D8(i), MOH_D8(i + 8)
#define MOH_D48 MOH_D32(0), MOH_D16(32)
#define MOH_D64 MOH_D32(0), MOH_D32(32)
#define MOH_D80 MOH_D64, MOH_D16(64)
#define MOH_D128 MOH_D64, MOH_D32(64), MOH_D32(96)
#define MOH_WGMMA_BOTH(...) MOH_WGMMA(f16, __VA_ARGS__) MOH_WGMMA(bf16, __VA_ARGS__)
MOH_WGMMA_BOTH(16, MOH_NAMES_8, 8, 9, 10, 11, 12, 13, MOH_D8(0))
MOH_WGMMA_BOTH(32, MOH_NAMES_16, 16, 17, 18, 19, 20, 21, MOH_D16(0))
MOH_WGMMA_BOTH(64, MOH_NAMES_32, 32, 33, 34, 35, 36, 37, MOH_D32(0))
MOH_WGMMA_BOTH(72, MOH_NAMES_36, 36, 37, 38, 39, 40, 41, MOH_D36)
MOH_WGMMA_BOTH(96, MOH_NAMES_48, 48, 49, 50, 51, 52, 53, MOH_D48)
MOH_WGMMA_BOTH(128, MOH_NAMES_64, 64, 65, 66, 67, 68, 69, MOH_D64)
MOH_WGMMA_BOTH(160, MOH_NAMES_80, 80, 81, 82, 83, 84, 85, MOH_D80)
MOH_WGMMA_BOTH(256, MOH_NAMES_128, 128, 129, 130, 131, 132, 133, MOH_D128)
#endif
