// Implements hopper.cuh's functions in the emulator, and exposes undefined behaviour: a product is computed when its
// warp waits for it, and until then its accumulators are NaN; operands that change between issue and wait are an
// error; a TMA copy overwrites its destination at once.
#pragma once

namespace simt {
enum class Product { SharedA, SharedAMajorN, RegisterA };
struct Wgmma {
    Product product;
    int n;
    float* d;
    const uint32_t* a; // RegisterA
    uint64_t a_descriptor, b_descriptor;
    int accumulate;
    float (*convert)(uint16_t);
};
void wgmma(Wgmma argument);
void wgmma_commit();
void wgmma_wait(unsigned pending);
void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void mbarrier_arrive(uint64_t* barrier, uint32_t bytes);
void mbarrier_wait(uint64_t* barrier, uint32_t parity);
void mbarrier_arrive_at(uint64_t* barrier, unsigned rank);
// Copies to all blocks of the cluster in the mask.
void tma_load(void* shared, const TensorMap* map, uint64_t* barrier, const int (&start)[4], unsigned mask);
} // namespace simt

inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { simt::mbarrier_init(barrier, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint64_t* barrier) { simt::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) { simt::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_arrive_after_copies(uint64_t* barrier) {
    simt::copy_commit();
    simt::copy_wait(0);
    simt::mbarrier_arrive(barrier, 0);
}
inline void mbarrier_wait(uint64_t* barrier, uint32_t parity) { simt::mbarrier_wait(barrier, parity); }
inline void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) { simt::mbarrier_arrive_at(barrier, rank); }

inline uint32_t cluster_rank() { return simt::cluster_rank(); }
inline void cluster_sync() { simt::cluster_sync(); }

inline void cp_async_first(void* shared, const void* global, int bytes) {
    if (bytes < 0 || bytes > 16) simt::fail("cp_async_first: %d bytes", bytes);
    if ((uintptr_t(shared) | (bytes > 0 ? uintptr_t(global) : 0)) & 15) simt::fail("cp_async_first: address not aligned to 16");
    simt::copy_async(shared, global, unsigned(bytes), true);
    simt::copy_async(static_cast<unsigned char*>(shared) + bytes, nullptr, unsigned(16 - bytes), false);
}
inline void tma_prefetch(const TensorMap*) {}
inline void tma_load(void* shared, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
    simt::tma_load(shared, map, barrier, {c0, c1, c2, c3}, 1u << simt::cluster_rank());
}
inline void tma_load_multicast(void* shared, const TensorMap* map, uint64_t* barrier, uint16_t mask, int c0, int c1, int c2, int c3) {
    simt::tma_load(shared, map, barrier, {c0, c1, c2, c3}, mask);
}
inline void fence_async_proxy() {}

template <int count> void registers_increase() {
    simt::collective("registers_increase", 128, nullptr, [](void**) {});
}
template <int count> void registers_decrease() {
    simt::collective("registers_decrease", 128, nullptr, [](void**) {});
}

inline void wgmma_fence() {
    simt::collective("wgmma_fence", 32, nullptr, [](void**) {});
}
inline void wgmma_commit() { simt::wgmma_commit(); }
template <int pending> void wgmma_wait() { simt::wgmma_wait(pending); }
inline void order_after(float) {}
template <int n> void keep(float (&)[n]) {}
template <int n> void keep(uint32_t (&)[n]) {}

template <class T, int n> void wgmma_ss(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    simt::wgmma({simt::Product::SharedA, n, d, nullptr, a, b, accumulate, [](uint16_t bits) { return to_float(T{bits}); }});
}
template <class T, int n> void wgmma_ss_mn(float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {
    simt::wgmma({simt::Product::SharedAMajorN, n, d, nullptr, a, b, accumulate, [](uint16_t bits) { return to_float(T{bits}); }});
}
template <class T, int n> void wgmma_rs(float (&d)[n / 2], const uint32_t* a, uint64_t b, int accumulate) {
    simt::wgmma({simt::Product::RegisterA, n, d, a, 0, b, accumulate, [](uint16_t bits) { return to_float(T{bits}); }});
}
