// Flash attention of one warp with mma.sync: M_TILES x 16 query rows against blocks of N keys in shared memory.
//
// Row strides in shared memory are an odd number of 16-byte units, so that the eight rows of an ldmatrix are in
// different banks.
#pragma once

#include "base_two.cuh"
#include "device.cuh"

// Sizes of an instance for heads up to D wide.
template <int D> struct HeadLayout {
    static constexpr int key_steps = (D + 15) / 16;         // mma steps over the head dimension of query and key
    static constexpr int value_tiles = (D + 7) / 8;         // 8-wide mma tiles of the value's width
    static constexpr int units = 2 * key_steps;             // 16-byte units of a row that hold data or zeros
    static constexpr int row_bytes = (units + 1) * 16;
};

// Starts the copies of rows first .. first + ROWS of a key or value matrix. Units after `width` elements and rows from
// `rows` on become 0. `base` is row 0; `stride` is in elements.
template <int D, int ROWS, int THREADS>
MOH_DEVICE void load_rows(unsigned char* shared, const uint16_t* base, int stride, int first, int rows, int width, unsigned thread) {
    constexpr unsigned units = HeadLayout<D>::units, row_bytes = HeadLayout<D>::row_bytes;
    if constexpr (THREADS % units == 0) {
        // Each thread has the same column in every round, so addresses grow by a constant.
        constexpr int step = THREADS / units;
        unsigned row = thread / units, unit = thread % units;
        int left = int(unit * 8) < width ? rows - first - int(row) : 0;
        const uint16_t* from = base + int64_t(first + int(row)) * stride + unit * 8;
        unsigned char* to = shared + row * row_bytes + unit * 16;
#pragma unroll
        for (int i = 0; i < ROWS / step; i++) {
            cp_async_16(to + i * step * row_bytes, from, i * step < left);
            from += int64_t(stride) * step;
        }
    } else {
        const uint16_t* start = base + int64_t(first) * stride;
#pragma unroll
        for (unsigned i = 0; i < (ROWS * units + THREADS - 1) / THREADS; i++) {
            unsigned index = i * THREADS + thread, row = index / units, unit = index % units;
            if (ROWS * units % THREADS != 0 && row >= ROWS) break;
            bool valid = int(row) < rows - first && int(unit * 8) < width;
            cp_async_16(shared + row * row_bytes + unit * 16, start + int64_t(int(row)) * stride + unit * 8, valid);
        }
    }
}

// Addresses of a warp's rows in the bias; elements of type T.
struct BiasRows {
    const uint16_t* row[2][2]; // of mma tile m, half h (rows lane / 4 and lane / 4 + 8): key 0
    int64_t stride;            // between consecutive keys
};

// The running softmax of a warp's rows. Lane i has rows i / 4 and i / 4 + 8 of every mma tile, and columns 2 (i % 4)
// and 2 (i % 4) + 1 of every 8.
template <class T, int D, int M_TILES, int N> struct WarpAttention {
    using Layout = HeadLayout<D>;
    static constexpr bool keeps_query = Layout::key_steps * M_TILES <= 8; // fragments in registers

    float out[M_TILES][Layout::value_tiles][4];
    float maximum[M_TILES][2]; // of the scores times scale * log2(e)
    float sum[M_TILES][2];     // over this lane's columns
    uint32_t query[keeps_query ? M_TILES : 1][keeps_query ? Layout::key_steps : 1][4];
    int limit[M_TILES][2];     // number of keys visible to the row

    MOH_DEVICE void clear() {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int n = 0; n < Layout::value_tiles; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) out[m][n][e] = 0.0f;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                maximum[m][h] = -INFINITY;
                sum[m][h] = 0.0f;
            }
        }
    }

    // This lane's ldmatrix address for the 16 x 16 matrix whose upper left corner is at `corner`: left halves of the
    // rows first, then right halves.
    static MOH_DEVICE const unsigned char* corner_row(const unsigned char* corner) {
        int lane = threadIdx.x % 32;
        return corner + lane % 16 * Layout::row_bytes + lane / 16 * 16;
    }

    MOH_DEVICE void load_query(const unsigned char* shared) {
        if constexpr (keeps_query) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int k = 0; k < Layout::key_steps; k++)
                    ldmatrix_x4(query[m][k], corner_row(shared + m * 16 * Layout::row_bytes) + k * 32);
        }
    }

    // Processes one block: keys first .. first + N, of which each row sees those below its limit. `masked` is whether
    // any row sees fewer than all. `scale` includes log2(e). `shared_query` points to the warp's rows.
    template <bool BIAS>
    MOH_DEVICE void block(const unsigned char* shared_query, const unsigned char* key, const unsigned char* value, int first,
                          bool masked, float scale, const BiasRows& bias) {
        int lane = threadIdx.x % 32;
        float score[M_TILES][N / 8][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) score[m][n][e] = 0.0f;

        // Keys are B: lanes 0-7 and 8-15 address the two halves of 8 keys, 16-31 those of the next 8.
        const unsigned char* key_row = key + (lane / 16 * 8 + lane % 8) * Layout::row_bytes + lane / 8 % 2 * 16;
#pragma unroll
        for (int k = 0; k < Layout::key_steps; k++) {
            uint32_t a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if constexpr (keeps_query) {
#pragma unroll
                    for (int e = 0; e < 4; e++) a[m][e] = query[m][k][e];
                } else {
                    ldmatrix_x4(a[m], corner_row(shared_query + m * 16 * Layout::row_bytes) + k * 32);
                }
            }
#pragma unroll
            for (int n = 0; n < N / 16; n++) {
                uint32_t b[4];
                ldmatrix_x4(b, key_row + n * 16 * Layout::row_bytes + k * 32);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(score[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(score[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }

        int column = first + lane % 4 * 2;
        if constexpr (BIAS) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int j = column + n * 8 + e % 2;
                        // Only the load depends on the condition, so that loads do not wait for each other.
                        T own{0};
                        if (bias.row[m][e / 2] != nullptr && j < limit[m][e / 2]) own.bits = bias.row[m][e / 2][j * bias.stride];
                        score[m][n][e] = score[m][n][e] * scale + bias_in_base_two(own);
                    }
            scale = 1.0f;
        }
        if (masked) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (column + n * 8 + e % 2 >= limit[m][e / 2]) score[m][n][e] = -INFINITY;
        }

        bool grew = false;
        float factor[M_TILES][2];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float largest = score[m][0][2 * h];
#pragma unroll
                for (int n = 0; n < N / 8; n++) largest = fmaxf(largest, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                float before = maximum[m][h], now = fmaxf(before, largest * scale);
                grew |= now > before;
                // If all keys so far are masked, any finite base will do: the weights are 2^-inf = 0.
                float base = now == -INFINITY ? 0.0f : now;
                factor[m][h] = exp2_approx(before - base);
                maximum[m][h] = now;
                float total = 0.0f;
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float weight = exp2_approx(fmaf(score[m][n][2 * h + e], scale, -base));
                        score[m][n][2 * h + e] = weight;
                        total += weight;
                    }
                sum[m][h] = fmaf(sum[m][h], factor[m][h], total);
            }
        if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int n = 0; n < Layout::value_tiles; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) out[m][n][e] *= factor[m][e / 2];
        }

        // Values are B, transposed by ldmatrix: lanes 0-15 address 16 keys, 16-31 the next 8 columns of the same keys.
        const unsigned char* value_row = corner_row(value);
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            uint32_t a[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) a[m][e] = pack<T>(score[m][2 * k + e / 2][e % 2 * 2], score[m][2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < Layout::value_tiles / 2; n++) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, value_row + k * 16 * Layout::row_bytes + n * 32);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    mma_m16n8k16<T>(out[m][2 * n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
            if constexpr (Layout::value_tiles % 2 == 1) {
                uint32_t b[2];
                ldmatrix_x2_trans(b, value_row + k * 16 * Layout::row_bytes + (Layout::value_tiles - 1) * 16);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) mma_m16n8k16<T>(out[m][Layout::value_tiles - 1], a[m], b[0], b[1]);
            }
        }
    }

    // Reduces the sums over the columns of all lanes.
    MOH_DEVICE void finish() {
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], 1);
                sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], 2);
            }
    }
};
