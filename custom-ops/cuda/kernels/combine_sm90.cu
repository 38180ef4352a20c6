// The check of a combination on Hopper (combine_check.cuh), and its dense kernel, in f16 and bf16: multiplies consecutive tokens by all heads that any of
// them uses, with the products of product_sm90.cuh. Steps of the inner dimension whose heads all tokens use are copied
// by TMA. In other steps, blocks that are off are copied as zeros; steps that no token uses are skipped.
#include "combine.cuh"
#include "combine_check.cuh"
#include "product_sm90.cuh"

namespace {

template <class P> struct Combination {
    using T = typename P::T;
    static constexpr int words = P::rows / 32;

    // The heads of a tile: a bit per row, and the state 0, 1 or 2 if none, some or all rows are on.
    struct Heads {
        uint32_t* bits;
        int* state;
        int on = 0; // number of (token, head) pairs that are on

        MOH_DEVICE Heads(unsigned char* memory, const LinearParams& p)
            : bits(reinterpret_cast<uint32_t*>(memory)), state(reinterpret_cast<int*>(bits + (p.heads + 31) / 32 * 32 * words)) {}

        // Called by all producers, after they have read the previous contents.
        MOH_DEVICE void read(const LinearParams& p, int first, int rows) {
            const int lane = int(threadIdx.x & 31);
            barrier_sync(1, kProducers);
            gather_bits(p, first, rows, 0, p.heads, bits, words, kProducers / 32);
            barrier_sync(1, kProducers);
            on = 0;
            for (int head = lane; head < p.heads; head += 32) {
                int count = 0;
#pragma unroll
                for (int word = 0; word < words; word++) count += __popc(bits[head * words + word]);
                on += count;
                if (threadIdx.x < 32) state[head] = count == 0 ? 0 : count == rows ? 2 : 1;
            }
            for (int lanes = 16; lanes > 0; lanes /= 2) on += __shfl_xor_sync(0xffffffffu, on, lanes);
            barrier_sync(1, kProducers);
        }
    };

    // The next step, from `step` on, that any token needs; `steps` if there is none.
    static MOH_DEVICE int next_step(const LinearParams& p, const Heads& heads, int step, int steps, int chunk) {
        for (; step < steps; step++) {
            const int k = step * P::depth + 8 * chunk;
            if (__any_sync(0xffffffffu, k < p.heads * p.depth && heads.state[k / p.depth] != 0)) break;
        }
        return step;
    }

    static MOH_DEVICE void load_weight(const LinearSm90Params& params, int k, int column, unsigned char* b, uint64_t* barrier) {
        if constexpr (P::layout == 0) {
            tma_load(b, &params.weight_map, barrier, k, column, 0, 0);
        } else {
#pragma unroll
            for (int panel = 0; panel < P::panels; panel++)
                tma_load(b + panel * P::panel_bytes, &params.weight_map, barrier, column + 64 * panel, k, 0, 0);
        }
    }

    static MOH_DEVICE void produce(Producer<P>& producer, const LinearSm90Params& params, unsigned char* memory) {
        const LinearParams& p = params.linear;
        const int inner = p.heads * p.depth, steps = (inner + P::depth - 1) / P::depth;
        const int spans = (p.columns + P::columns - 1) / P::columns;
        const int64_t tiles = int64_t((p.tokens + params.tile_rows - 1) / params.tile_rows) * spans;
        Heads heads(memory, p);
        for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
            const int first = int(index / spans) * params.tile_rows;
            Message tile(0, first, int(index % spans) * P::columns, min(params.tile_rows, p.tokens - first));
            heads.read(p, first, tile.rows);
            if (is_routed(p, tile.rows, heads.on)) continue;
            int step = next_step(p, heads, 0, steps, producer.chunk);
            if (step == steps) {
                tile.flags = Message::last;
                producer.begin(tile, 0);
                producer.end(false);
            }
            while (step < steps) {
                const int next = next_step(p, heads, step + 1, steps, producer.chunk);
                const int k = step * P::depth + 8 * producer.chunk, head = k / p.depth;
                const bool whole = __all_sync(0xffffffffu, k >= inner || heads.state[head] == 2);
                tile.flags = Message::product | (next == steps ? Message::last : 0);
                unsigned char* a = producer.begin(tile, P::b_bytes + (whole ? params.tile_rows * P::row_bytes : 0));
                if (producer.thread == 0) {
                    load_weight(params, step * P::depth, tile.column, a + P::a_bytes, producer.barrier());
                    if (whole) tma_load(a, &params.x_map, producer.barrier(), step * P::depth, first, 0, 0);
                }
                if (!whole)
                    producer.copy_rows(a, static_cast<const unsigned char*>(p.x) + 2 * k, uint32_t(2 * p.x_row), tile.rows, [&](int i) {
                        const int row = 16 * i + producer.row;
                        const bool is_on = k < inner && (heads.bits[head * words + row / 32] >> (row % 32) & 1);
                        return is_on ? first + row : -1;
                    });
                producer.end(!whole);
                step = next;
            }
            producer.flush();
        }
    }

    // The bias is loaded behind the first products, so that storing the results waits for nothing.
    static MOH_DEVICE void consume(Consumer<P>& consumer, const LinearParams& p, const Message& tile) {
        const int own = consumer.units(tile), pair = consumer.lane % 4;
        // Of columns 8 j + 2 pair and one more.
        uint32_t bias[P::columns / 8];
        consumer.multiply(tile, [&] {
#pragma unroll
            for (int j = 0; j < P::columns / 8; j++) {
                const int column = tile.column + 8 * j + 2 * pair;
                bias[j] = p.bias && column < p.columns ? load_two(p.bias, column) : 0;
            }
        });
        bool finite = true;
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                if (u >= own) continue;
                const int row = consumer.row(u, s);
                const bool valid = row < tile.rows;
                T* output = static_cast<T*>(p.output) + (tile.row + row) * p.output_row + tile.column;
                auto result = [&](int j, int e) {
                    float x = consumer.sums[u][4 * j + 2 * s + e];
                    finite &= !valid || fabsf(x) <= 3.4028235e38f;
                    return x + element<T>(bias[j], e);
                };
                auto word = [&](int j) { return pack<T>(result(j, 0), result(j, 1)); };
                auto at = [&](int j) -> T* { return valid && tile.column + 8 * j < p.columns ? output + 8 * j : nullptr; };
                store_row<P::columns / 8>(word, at, [](int) { return true; });
            }
        if (__any_sync(0xffffffffu, !finite)) sum_again(consumer, p, tile);
    }

    // Elements that are not finite may come from 0 * infinity or 0 * NaN with the weight of a head that the token does
    // not use. The warp recomputes those of its stored elements one by one.
    static MOH_DEVICE void sum_again(const Consumer<P>& consumer, const LinearParams& p, const Message& tile) {
        __syncwarp();
        const T* bias = static_cast<const T*>(p.bias);
#pragma unroll 1
        for (int i = consumer.lane; i < 2 * 16 * P::columns; i += 32) {
            const int unit = i / (16 * P::columns), column = tile.column + i % P::columns;
            const int row = (consumer.w + 2 * unit) * kUnitRows + 16 * consumer.warp + i / P::columns % 16, token = tile.row + row;
            if (row >= tile.rows || column >= p.columns) continue;
            T* at = static_cast<T*>(p.output) + token * p.output_row + column;
            if (fabsf(to_float(*at)) <= 3.4028235e38f) continue;
            float sum = p.bias ? to_float(bias[column]) : 0.0f;
#pragma unroll 1
            for (int head = 0; head < p.heads; head++) {
                if (p.gates[int64_t(token) * p.heads + head] == 0.0f) continue;
                const T* x = static_cast<const T*>(p.x) + token * p.x_row + head * p.x_head;
                const T* weight = static_cast<const T*>(p.weight) + head * p.weight_head;
#pragma unroll 1
                for (int k = 0; k < p.depth; k++)
                    sum = fmaf(to_float(x[k]), to_float(weight[P::layout == 0 ? column * p.weight_row + k : k * p.weight_row + column]), sum);
            }
            *at = from_float<T>(sum);
        }
    }

    static MOH_DEVICE void run(const LinearSm90Params& params) {
        const LinearParams& p = params.linear;
        Shared<P>& shared = *reinterpret_cast<Shared<P>*>(shared_memory());
        expect_shared_memory(sizeof shared + (p.heads + 31) / 32 * 32 * words * sizeof(uint32_t) + p.heads * sizeof(int)); // and Heads
        if (threadIdx.x == 0) {
            tma_prefetch(&params.x_map);
            tma_prefetch(&params.weight_map);
        }
        start_barriers(shared);
        wait_for_previous_kernel();
        if (is_done(p)) return;
        run_roles(
            shared, [&](Producer<P>& producer) { produce(producer, params, shared_memory() + sizeof(Shared<P>)); },
            [&](Consumer<P>& consumer, const Message& tile) { consume(consumer, p, tile); });
    }
};

} // namespace

// moh_combine_sm90_<type>_check and moh_combine_sm90_<type>_<layout>_dense.
MOH_KERNEL(moh_combine_sm90_f16_check, LinearParams, 256, 1) { check_blocks<f16>(p); }
MOH_KERNEL(moh_combine_sm90_bf16_check, LinearParams, 256, 1) { check_blocks<bf16>(p); }
#define MOH_COMBINE(type, layout)                                                                                      \
    MOH_KERNEL(moh_combine_sm90_##type##_##layout##_dense, LinearSm90Params, kThreads, 1) {                                    \
        Combination<Product<type, layout, 128, 4>>::run(p);                                                            \
    }
MOH_COMBINE(f16, 0)
MOH_COMBINE(f16, 1)
MOH_COMBINE(bf16, 0)
MOH_COMBINE(bf16, 1)
