// Implements device.cuh's functions in the emulator. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16"
// and "ldmatrix".
#pragma once

float half_to_float(uint16_t bits);
uint16_t float_to_half(float x);

inline float to_float(float x) { return x; }
inline float to_float(f16 x) { return half_to_float(x.bits); }
inline float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

template <class T> T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline f16 from_float<f16>(float x) { return {float_to_half(x)}; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t u = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <class T> uint32_t pack(float lo, float hi) {
    return uint32_t(from_float<T>(lo).bits) | uint32_t(from_float<T>(hi).bits) << 16;
}
template <class T> uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    auto half = [](uint32_t pair, int i) { return to_float(T{uint16_t(pair >> (16 * i))}); };
    // A product of halves is exact in double precision, and a float that is rounded again keeps enough digits of the sum.
    auto one = [&](int i) { return float(double(half(a, i)) * half(b, i) + half(c, i)); };
    return pack<T>(one(0), one(1));
}
inline float exp2_approx(float x) { return exp2f(x); }
inline int opaque(int x) { return x; }

inline uint32_t shared_address(const void* p) { return simt::shared_address(p); }

inline void cp_async_16(void* shared, const void* global, bool valid) {
    if ((uintptr_t(shared) | (valid ? uintptr_t(global) : 0)) & 15) simt::fail("cp_async_16: address not aligned to 16");
    simt::copy_async(shared, global, 16, valid);
}
inline void cp_async_4(void* shared, const void* global, bool valid) {
    if ((uintptr_t(shared) | (valid ? uintptr_t(global) : 0)) & 3) simt::fail("cp_async_4: address not aligned to 4");
    simt::copy_async(shared, global, 4, valid);
}
inline void cp_async_commit() { simt::copy_commit(); }
template <int pending> void cp_async_wait() { simt::copy_wait(pending); }

namespace simt {
struct Ldmatrix {
    const void* row;
    uint32_t r[4];
};
// Lane i gets elements (i / 4, 2 (i % 4) and + 1) of every matrix; transposed, (2 (i % 4) and + 1, i / 4).
template <int matrices, bool transposed> void ldmatrix(uint32_t* r, const void* row) {
    if (lane() < 8 * matrices) {
        if (uintptr_t(row) & 15) fail("ldmatrix: row not aligned to 16");
        shared_pointer(simt::shared_address(row), 16);
    }
    Ldmatrix argument{row, {}};
    collective(transposed ? "ldmatrix.trans" : "ldmatrix", 32, &argument, [](void** lanes) {
        for (int m = 0; m < matrices; m++) {
            uint16_t matrix[8][8];
            for (int i = 0; i < 8; i++) memcpy(matrix[i], static_cast<Ldmatrix*>(lanes[8 * m + i])->row, 16);
            for (int i = 0; i < 32; i++) {
                int major = i / 4, minor = 2 * (i % 4);
                uint32_t lo = transposed ? matrix[minor][major] : matrix[major][minor];
                uint32_t hi = transposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
                static_cast<Ldmatrix*>(lanes[i])->r[m] = lo | hi << 16;
            }
        }
    });
    memcpy(r, argument.r, 4 * matrices);
}

struct Mma {
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};
template <class T> void mma(void** lanes) {
    auto half = [](uint32_t pair, int i) { return to_float(T{uint16_t(pair >> (16 * i))}); };
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; i++) {
        const Mma& lane = *static_cast<Mma*>(lanes[i]);
        int row = i / 4, column = 2 * (i % 4);
        for (int e = 0; e < 2; e++) {
            a[row][column + e] = half(lane.a[0], e);
            a[row + 8][column + e] = half(lane.a[1], e);
            a[row][column + 8 + e] = half(lane.a[2], e);
            a[row + 8][column + 8 + e] = half(lane.a[3], e);
            b[column + e][row] = half(lane.b[0], e);
            b[column + 8 + e][row] = half(lane.b[1], e);
        }
    }
    for (int i = 0; i < 16; i++) {
        float sum[8] = {};
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) sum[j] += a[i][k] * b[k][j];
        for (int j = 0; j < 8; j++) static_cast<Mma*>(lanes[(i % 8) * 4 + j / 2])->d[(i / 8) * 2 + j % 2] += sum[j];
    }
}
} // namespace simt

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { simt::ldmatrix<4, false>(r, row); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { simt::ldmatrix<4, true>(r, row); }
inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) { simt::ldmatrix<2, false>(r, row); }
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) { simt::ldmatrix<2, true>(r, row); }

template <class T> void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    simt::Mma argument{d, a, {b0, b1}};
    simt::collective("mma_m16n8k16", 32, &argument, simt::mma<T>);
}

inline void start_next_kernel() {}
inline void wait_for_previous_kernel() { simt::wait_for_previous_kernel(); }

inline void barrier_sync(int id, int threads) { simt::barrier("barrier_sync", id, threads, true); }
inline void barrier_arrive(int id, int threads) { simt::barrier("barrier_arrive", id, threads, false); }
