// RoutedProjection, RoutedCombine, both halves of RoutedMLP and dense layers with quantised weights, and the first two with weights
// of T, for up to 32 tokens in f16 and bf16: limited by the bandwidth of reading the weights, which are converted in registers.
//
// A block has 16 rows of the weight, which are the rows of mma.m16n8k16's A; tokens are the columns of B. Its warps take
// steps of the inner dimension, and add their sums at the end, in the same order in every run. A lane reads 16 bytes of
// each of its two rows a step; which of an mma's 16 inner elements they are does not matter, as x is read in the same
// order. Of a projection, rows of heads that no token uses are not read; of a combination, neither are the steps. The first
// half of RoutedMLP is a projection with an expert's rows as a head; the second half has a matrix for each expert, whose
// products are multiplied by the expert's gate. A dense layer is a projection with one head, which every token uses.

#include "linear.cuh"
#include "nbits.cuh"

namespace {

constexpr int warps = 8, threads = 32 * warps, tile_rows = 16;
constexpr int ahead = 4; // steps whose weights are loaded before the first is used
constexpr unsigned full = 0xffffffffu;

enum class Kind { Projection, Combine, Experts };

template <class T> constexpr bool is_f16 = false;
template <> constexpr bool is_f16<f16> = true;

// Words of weights as pairs of T, in the order in which `order_pairs` puts x.
template <class T, int BITS> struct Pairs;

// A nibble in the lower bits of a number between 2^n and 2^(n + 1), of which 2^n and the zero point are subtracted; both
// steps are exact. Nibbles i and i + 4 make a pair, which takes one instruction.
template <class T> struct Pairs<T, 4> {
    static constexpr int count = 4;
    uint32_t offset, scale;
    MOH_DEVICE Pairs() : offset(0), scale(0) {}
    MOH_DEVICE explicit Pairs(const Factors& f) {
        const float base = is_f16<T> ? 1024.0f : 128.0f;
        offset = pack<T>(-(base + f.zero), -(base + f.zero));
        scale = pack<T>(f.scale, f.scale);
    }
    MOH_DEVICE void convert(uint32_t word, uint32_t (&pairs)[count]) const {
        const uint32_t base = is_f16<T> ? 0x64006400u : 0x43004300u;
        const uint32_t one = is_f16<T> ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
        for (int i = 0; i < count; i++) pairs[i] = fma2<T>(fma2<T>((word >> (4 * i) & 0x000f000fu) | base, one, offset), scale, 0);
    }
};

// The same with bytes, in float32: bf16 has too few digits for 2^n and a byte.
template <class T> struct Pairs<T, 8> {
    static constexpr int count = 2;
    float offset, scale;
    MOH_DEVICE Pairs() : offset(0.0f), scale(0.0f) {}
    MOH_DEVICE explicit Pairs(const Factors& f) : offset(8388608.0f + f.zero), scale(f.scale) {}
    MOH_DEVICE float value(uint32_t byte) const { return (__uint_as_float(0x4b000000u | byte) - offset) * scale; }
    MOH_DEVICE void convert(uint32_t word, uint32_t (&pairs)[count]) const {
#pragma unroll
        for (int i = 0; i < count; i++)
            pairs[i] = pack<T>(value(word >> (16 * i) & 0xff), value(word >> (16 * i + 8) & 0xff));
    }
};

// Weights of T are pairs already.
template <class T> struct Pairs<T, 16> {
    static constexpr int count = 1;
    MOH_DEVICE void convert(uint32_t word, uint32_t (&pairs)[count]) const { pairs[0] = word; }
};

// Eight elements of x as pairs, as Pairs has the weights.
template <int BITS> MOH_DEVICE void order_pairs(const uint4& x, uint32_t (&pairs)[4]) {
    if (BITS != 4) {
        pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
        return;
    }
    pairs[0] = (x.x & 0xffff) | x.z << 16, pairs[1] = x.x >> 16 | (x.z & 0xffff0000u);
    pairs[2] = (x.y & 0xffff) | x.w << 16, pairs[3] = x.y >> 16 | (x.w & 0xffff0000u);
}

template <class T, int BITS, int N_TILES, Kind kind> struct Few {
    static constexpr int lane_depth = 128 / BITS, depth = 4 * lane_depth; // of a step, per lane and in all
    static constexpr int chunks = lane_depth / 8;                          // of x
    static constexpr int halves = BITS == 4 ? 2 : 1;                       // of a lane's weights, with factors of their own

    // The steps that some token uses, in shared memory.
    struct Steps {
        int* list;
        int count;
    };

    // A lane's weights of one step, in rows lane / 4 and lane / 4 + 8 of the tile.
    struct Weights {
        uint4 words[2];
        Pairs<T, BITS> pairs[2][halves];
        int matrix;
        int k; // the lane's first element; the depth, if there is none

        MOH_DEVICE void load(const QuantizedParams& w, const int64_t (&rows)[2], int step) {
            matrix = kind == Kind::Experts ? step / steps_of(w) : 0;
            const int first = step < all_steps(w) ? (step - matrix * steps_of(w)) * depth : w.depth;
            k = min(w.depth, first + int(threadIdx.x) % 4 * lane_depth);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int64_t row = rows[r] + int64_t(matrix) * w.rows;
                words[r] = make_uint4(0, 0, 0, 0);
                if (k >= w.depth) continue;
                words[r] = *reinterpret_cast<const uint4*>(w.weight + row * row_bytes(w) + int64_t(k) * BITS / 8);
                if constexpr (BITS != 16) pairs[r][0] = Pairs<T, BITS>(factors_at<T>(w, row, k));
                if constexpr (halves == 2) pairs[r][1] = w.block_log2 > 4 ? pairs[r][0] : Pairs<T, BITS>(factors_at<T>(w, row, k + 16));
            }
        }
    };

    // The number of steps of a matrix.
    static MOH_DEVICE int steps_of(const QuantizedParams& w) { return (w.depth + depth - 1) / depth; }
    static MOH_DEVICE int all_steps(const QuantizedParams& w) { return (kind == Kind::Experts ? w.matrices : 1) * steps_of(w); }

    static MOH_DEVICE bool is_on(const NbitsParams& p, int token, int head) {
        if (kind == Kind::Projection && p.gates == nullptr) return true;
        return p.gates[int64_t(token) * p.heads + head] != 0.0f;
    }
    // Whether a token uses one of the heads first .. last. All lanes call.
    static MOH_DEVICE bool any_on(const NbitsParams& p, int first, int last) {
        bool on = false;
        for (int head = first; head <= last; head++)
            if (int token = int(threadIdx.x) % 32; token < p.tokens) on = on || is_on(p, token, head);
        return __any_sync(full, on);
    }

    static MOH_DEVICE Steps find_steps(const NbitsParams& p, int* memory) {
        const int all = all_steps(p.weight), thread = int(threadIdx.x);
        int *list = memory, *used = memory + all + 1;
        if (kind != Kind::Projection) {
            for (int head = thread; head < p.heads; head += threads) {
                bool on = false;
                for (int token = 0; token < p.tokens; token++) on = on || is_on(p, token, head);
                used[head] = on;
            }
            __syncthreads();
        }
        if (thread < 32) {
            int listed = 0;
            for (int base = 0; base < all; base += 32) {
                const int first = (base + thread) * depth;
                bool on = base + thread < all;
                if (kind == Kind::Experts && on) on = used[(base + thread) / steps_of(p.weight)];
                if (kind == Kind::Combine && on) {
                    const int last = (min(p.weight.depth, first + depth) - 1) / p.head_width;
                    on = false;
                    for (int head = first / p.head_width; head <= last; head++) on = on || used[head];
                }
                const unsigned mask = __ballot_sync(full, on);
                if (on) list[1 + listed + __popc(mask & ((1u << thread) - 1))] = base + thread;
                listed += __popc(mask);
            }
            if (thread == 0) list[0] = listed;
        }
        __syncthreads();
        return {list + 1, list[0]};
    }

    // Eight elements of a token; zeros if there is no such token or element, or where the token does not use the head.
    static MOH_DEVICE uint4 load_x(const NbitsParams& p, int token, int matrix, int k) {
        if (token >= p.tokens || k >= p.weight.depth) return make_uint4(0, 0, 0, 0);
        if (kind != Kind::Projection && !is_on(p, token, kind == Kind::Experts ? matrix : k / p.head_width)) return make_uint4(0, 0, 0, 0);
        const int64_t row = kind == Kind::Experts ? int64_t(token) * p.weight.matrices + matrix : token;
        return *reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + row * p.weight.depth + k);
    }

    static MOH_DEVICE void multiply(const NbitsParams& p, const Weights& w, float (&all_sums)[N_TILES][4]) {
        if (kind != Kind::Experts) return add_products(p, w, all_sums);
        float sums[N_TILES][4] = {};
        add_products(p, w, sums);
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int token = n * 8 + int(threadIdx.x) % 4 * 2 + e % 2;
                const float gate = token < p.tokens ? p.gates[int64_t(token) * p.heads + w.matrix] : 0.0f;
                // Of an expert that the token does not use, the sum may be NaN.
                if (gate != 0.0f) all_sums[n][e] = fmaf(gate, sums[n][e], all_sums[n][e]);
            }
    }

    static MOH_DEVICE void add_products(const NbitsParams& p, const Weights& w, float (&sums)[N_TILES][4]) {
        const int lane = int(threadIdx.x) % 32;
        uint4 x[N_TILES][chunks];
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int c = 0; c < chunks; c++) x[n][c] = load_x(p, n * 8 + lane / 4, w.matrix, w.k + c * 8);
        // Words that are converted at a time, to two pairs at least, and their pairs.
        constexpr int words = BITS == 16 ? 2 : 1, count = Pairs<T, BITS>::count, all = words * count;
#pragma unroll
        for (int i = 0; i < 4; i += words) {
            uint32_t rows[2][all];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t word[4] = {w.words[r].x, w.words[r].y, w.words[r].z, w.words[r].w};
#pragma unroll
                for (int j = 0; j < words; j++) {
                    uint32_t pairs[count];
                    w.pairs[r][i * halves / 4].convert(word[i + j], pairs);
#pragma unroll
                    for (int pair = 0; pair < count; pair++) rows[r][j * count + pair] = pairs[pair];
                }
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                uint32_t columns[4];
                order_pairs<BITS>(x[n][i * chunks / 4], columns);
#pragma unroll
                for (int pair = 0; pair < all; pair += 2) {
                    const uint32_t a[4] = {rows[0][pair], rows[1][pair], rows[0][pair + 1], rows[1][pair + 1]};
                    const int at = (i * count + pair) % 4;
                    mma_m16n8k16<T>(sums[n], a, columns[at], columns[at + 1]);
                }
            }
        }
    }

    // An element of a combination, computed serially.
    static MOH_DEVICE float sum_alone(const NbitsParams& p, int token, int row) {
        float sum = 0.0f;
        for (int k = 0; k < p.weight.depth; k++)
            if (is_on(p, token, k / p.head_width))
                sum = fmaf(to_float(static_cast<const T*>(p.x)[int64_t(token) * p.weight.depth + k]), value_at<T>(p.weight, row, k), sum);
        return sum;
    }

    static MOH_DEVICE bool has_pairs(const NbitsParams& p) { return kind == Kind::Projection && p.activation == 4; }

    // The sum over all warps of element `i` of [token][row of the tile].
    static MOH_DEVICE float sum_of_warps(const float* staged, int i) {
        float x = 0.0f;
#pragma unroll
        for (int warp = 0; warp < warps; warp++) x += staged[warp * N_TILES * 8 * tile_rows + i];
        return x;
    }

    // The row of the weight, of all matrices, whose products are those of an output; of pairs, the first one.
    static MOH_DEVICE int64_t row_of(const NbitsParams& p, int output) {
        return has_pairs(p) ? output + int64_t(output / p.head_width) * p.head_width : output;
    }

    static MOH_DEVICE void store(const NbitsParams& p, const float* staged, int first, int count, int outputs) {
        const T* bias = static_cast<const T*>(p.bias);
        for (int i = int(threadIdx.x); i < p.tokens * count; i += threads) {
            const int token = i / count, at = token * tile_rows + i % count, output = first + i % count;
            if (output >= outputs) continue;
            float x = sum_of_warps(staged, at);
            // Not finite: possibly the 0 of a head that this token does not use, times the NaN of its scale.
            if (kind == Kind::Combine && !(fabsf(x) <= 3.4028235e38f)) x = sum_alone(p, token, output);
            if (kind == Kind::Experts && bias != nullptr)
                for (int expert = 0; expert < p.heads; expert++)
                    if (is_on(p, token, expert))
                        x = fmaf(p.gates[int64_t(token) * p.heads + expert], to_float(bias[int64_t(expert) * p.weight.rows + output]), x);
            const int64_t row = row_of(p, output);
            if (kind != Kind::Experts && bias != nullptr) x += to_float(bias[row]);
            if (kind == Kind::Projection) {
                x = activate(x, p.activation);
                if (has_pairs(p)) {
                    const float factor = sum_of_warps(staged, at + tile_rows / 2);
                    x *= bias != nullptr ? factor + to_float(bias[row + p.head_width]) : factor;
                }
                if (!is_on(p, token, output / p.head_width)) x = 0.0f;
            }
            static_cast<T*>(p.output)[int64_t(token) * outputs + output] = from_float<T>(x);
        }
    }

    static MOH_DEVICE void run(const NbitsParams& p) {
        start_next_kernel();
        wait_for_previous_kernel();
        const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
        // Outputs of the tile, and of a token. Of pairs, the tile's second half has the rows that the first half's are multiplied by.
        const int count = has_pairs(p) ? tile_rows / 2 : tile_rows, first = int(blockIdx.x) * count;
        const int outputs = kind == Kind::Projection ? p.heads * p.head_width : p.weight.rows, last = min(outputs, first + count) - 1;
        float* staged = reinterpret_cast<float*>(shared_memory());
        int* memory = reinterpret_cast<int*>(staged + warps * N_TILES * 8 * tile_rows);
        expect_shared_memory(size_t(warps * N_TILES * 8 * tile_rows + all_steps(p.weight) + 1 + p.heads) * 4);
        float sums[N_TILES][4] = {};
        if (kind != Kind::Projection || any_on(p, first / p.head_width, last / p.head_width)) {
            const Steps steps = find_steps(p, memory);
            const int64_t upper = row_of(p, min(last, first + lane / 4));
            const int64_t rows[2] = {upper, has_pairs(p) ? upper + p.head_width : min(last, first + lane / 4 + 8)};
            const int end = steps.count * (warp + 1) / warps;
#pragma unroll 1
            for (int step = steps.count * warp / warps; step < end; step += ahead) {
                Weights weights[ahead];
#pragma unroll
                for (int i = 0; i < ahead; i++) weights[i].load(p.weight, rows, step + i < end ? steps.list[step + i] : all_steps(p.weight));
#pragma unroll
                for (int i = 0; i < ahead; i++)
                    if (step + i < end) multiply(p, weights[i], sums);
            }
        }
        // [warp][token][row]
        float* own = staged + warp * N_TILES * 8 * tile_rows;
#pragma unroll
        for (int n = 0; n < N_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) own[(n * 8 + lane % 4 * 2 + e % 2) * tile_rows + lane / 4 + e / 2 * 8] = sums[n][e];
        __syncthreads();
        store(p, staged, first, count, outputs);
    }
};

} // namespace

// moh_nbits_<operation>_<type>_<bits>_<tokens>. Grid: ceil(outputs of a token / 16), for pairs / 8. Shared memory: a float for
// each warp, row and token of the tile, an integer for each step and one more, one for each head. For up to 8 tokens, two blocks
// share a multiprocessor, so that enough loads are in flight.
#define MOH_NBITS_OF(operation, kind, type, bits, tokens)                                                              \
    MOH_KERNEL(moh_nbits_##operation##_##type##_##bits##_##tokens, NbitsParams, 256, tokens == 8 ? 2 : 1) {            \
        Few<type, bits, tokens / 8, kind>::run(p);                                                                     \
    }
#define MOH_NBITS(type, bits, tokens)                                                                                  \
    MOH_NBITS_OF(projection, Kind::Projection, type, bits, tokens)                                                     \
    MOH_NBITS_OF(combine, Kind::Combine, type, bits, tokens)                                                           \
    MOH_NBITS_OF(experts, Kind::Experts, type, bits, tokens)
#define MOH_NBITS_PLAIN(type, tokens)                                                                                  \
    MOH_NBITS_OF(projection, Kind::Projection, type, 16, tokens)                                                       \
    MOH_NBITS_OF(combine, Kind::Combine, type, 16, tokens)
#define MOH_NBITS_ALL(type)                                                                                            \
    MOH_NBITS_PLAIN(type, 8)                                                                                           \
    MOH_NBITS_PLAIN(type, 16)                                                                                          \
    MOH_NBITS_PLAIN(type, 32)                                                                                          \
    MOH_NBITS(type, 4, 8)                                                                                              \
    MOH_NBITS(type, 4, 16)                                                                                             \
    MOH_NBITS(type, 4, 32)                                                                                             \
    MOH_NBITS(type, 8, 8)                                                                                              \
    MOH_NBITS(type, 8, 16)                                                                                             \
    MOH_NBITS(type, 8, 32)
MOH_NBITS_ALL(f16)
MOH_NBITS_ALL(bf16)
