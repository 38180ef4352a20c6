// RoutedProjection on Hopper, the first half of RoutedMLP, and combinations that are one product, in f16 and bf16: as
// linear.cu, with the products of product_sm90.cuh. Gathered tiles have rows of one head's list. Dense tiles have
// consecutive tokens, loaded by TMA, and columns of any heads. Between tiles, the producers write the zeros of heads that
// are off.
#include "combine_check.cuh"
#include "linear.cuh"
#include "product_sm90.cuh"
#include "zeros.cuh"

namespace {

// Iterates over this block's tiles, ordered by row, head, column, so that concurrent tiles read nearby rows. In clusters,
// it iterates over pairs of tiles: those of the same columns one below the other, which share the weight, or those of
// the same rows side by side, which share x.
template <class P> struct Tiles {
    const LinearParams& p;
    const bool dense, shares_x;
    const int rank, tile_columns, rows, columns, spans; // rows and columns per tile or pair, pairs per row of them
    int row = 0;
    int64_t left = blockIdx.x / P::cluster; // number of tiles or pairs from that row on before this block's next one

    MOH_DEVICE Tiles(const LinearSm90Params& params, bool dense, int tile_columns)
        : p(params.linear), dense(dense), shares_x(P::cluster > 1 && dense && params.shares_x),
          rank(P::cluster > 1 ? int(cluster_rank()) : 0), tile_columns(tile_columns),
          rows(shares_x ? params.tile_rows : P::cluster * params.tile_rows), columns(shares_x ? 2 * tile_columns : tile_columns),
          spans(((dense ? p.heads * p.columns : p.columns) + columns - 1) / columns) {}

    MOH_DEVICE int heads() const { return dense ? 1 : p.heads; }
    MOH_DEVICE int rows_of(int head) const { return dense ? p.tokens : p.counts[head]; }
    // A bit for each of 32 heads: whether it has rows from `row` on.
    MOH_DEVICE uint32_t ballot(int first_head) const {
        const int head = first_head + int(threadIdx.x & 31);
        return __ballot_sync(0xffffffffu, head < heads() && rows_of(head) > row);
    }

    MOH_DEVICE bool next(Message& tile) {
        for (;; row += rows) {
            int active = 0;
            for (int head = 0; head < heads(); head += 32) active += __popc(ballot(head));
            if (active == 0) return false;
            if (left < int64_t(active) * spans) break;
            left -= int64_t(active) * spans;
        }
        int index = int(left / spans), head = 0;
        for (;; head += 32) {
            const uint32_t active = ballot(head);
            if (index >= __popc(active)) {
                index -= __popc(active);
                continue;
            }
            const int lane = int(threadIdx.x & 31);
            const bool wanted = (active >> lane & 1) && __popc(active & ((1u << lane) - 1)) == index;
            head += __ffs(int(__ballot_sync(0xffffffffu, wanted))) - 1;
            break;
        }
        tile = Message(head, row, int(left % spans) * columns, min(rows, rows_of(head) - row));
        if (P::cluster > 1) take_own(tile);
        left += gridDim.x / P::cluster;
        return true;
    }

    // Replaces a pair by this block's tile. Of two tiles one below the other, the first has half of the units, rounded
    // up, so the second may be empty.
    MOH_DEVICE void take_own(Message& tile) const {
        if (shares_x) {
            tile.column += rank * tile_columns;
        } else {
            const int first = (tile.rows + 2 * kUnitRows - 1) / (2 * kUnitRows) * kUnitRows;
            tile.row += rank * first;
            tile.rows = rank == 0 ? min(tile.rows, first) : max(tile.rows - first, 0);
        }
    }
};

// A warp's share of the zero writes, done a part at a time.
struct Zeros {
    int64_t next, end;
    MOH_DEVICE explicit Zeros(const LinearParams& p) {
        const int64_t blocks = int64_t(p.tokens) * p.heads, warps = int64_t(gridDim.x) * (kProducers / 32);
        const int64_t share = (blocks + 32 * warps - 1) / (32 * warps) * 32;
        next = min((int64_t(blockIdx.x) * (kProducers / 32) + int(threadIdx.x) / 32) * share, blocks);
        end = min(next + share, blocks);
    }
    template <class T> MOH_DEVICE void write(const LinearParams& p, int64_t blocks) {
        const int bytes = p.columns * int(sizeof(T));
        const int64_t count = min(blocks, end - next);
        write_zeros(static_cast<unsigned char*>(p.output) + next * bytes, p.gates + next, count, bytes, 0, 1);
        next += count;
    }
};

// is_mlp: with an activation; pairs: SwiGLU, where the second half of a tile's columns multiplies the first.
template <class P, bool is_mlp, bool pairs> struct Projection {
    using T = typename P::T;
    static constexpr int tile_columns = pairs ? P::columns / 2 : P::columns;

    // Runs on one thread: loads the weights of a step. If the blocks of the cluster share them, each loads one box.
    static MOH_DEVICE void load_weight(const LinearSm90Params& params, const Message& tile, const Tiles<P>& tiles, int k, unsigned char* b,
                                       uint64_t* barrier) {
        const LinearParams& p = params.linear;
        const bool shared = P::cluster > 1 && !tiles.shares_x;
#pragma unroll
        for (int box = 0; box < P::boxes; box++) {
            if (shared && box != tiles.rank) continue;
            unsigned char* to = b + box * P::box_bytes;
            if constexpr (P::layout == 0) {
                const int column = tile.head * p.columns + tile.column + box * (P::columns / P::boxes);
                load_box<P>(shared, to, &params.weight_map, barrier, k, column, 0);
            } else {
                int head = tile.head, column = tile.column + box * (pairs ? p.columns : 64);
                if (tiles.dense) {
                    // The width of a head is a multiple of the panel width.
                    head = column / p.columns;
                    column -= head * p.columns;
                }
                load_box<P>(shared, to, &params.weight_map, barrier, column, k, head);
            }
        }
    }

    // Runs on one thread: loads the rows of a step of a dense tile. If the blocks of the cluster share them, each loads half.
    static MOH_DEVICE void load_rows(const LinearSm90Params& params, const Message& tile, const Tiles<P>& tiles, int k, unsigned char* a,
                                     uint64_t* barrier) {
        const int first = tiles.shares_x ? tiles.rank * (params.tile_rows / 2) : 0;
        load_box<P>(tiles.shares_x, a + first * P::row_bytes, &params.x_map, barrier, k, tile.row + first, 0);
    }

    static MOH_DEVICE void produce(Producer<P>& producer, const LinearSm90Params& params, bool dense) {
        const LinearParams& p = params.linear;
        const int steps = (p.depth + P::depth - 1) / P::depth;
        Tiles<P> tiles(params, dense, tile_columns);
        Zeros zeros(p);
        const bool write_zeros = p.write_zeros && !dense;
        Message tile(0, 0, 0, 0);
        while (tiles.next(tile)) {
            int number[Producer<P>::own];
#pragma unroll
            for (int i = 0; i < Producer<P>::own; i++) {
                const int row = 16 * i + producer.row;
                number[i] = dense || row >= tile.rows ? -1 : p.entries[int64_t(tile.head) * p.tokens + tile.row + row];
            }
            for (int step = 0; step < steps; step++) {
                const int first = step * P::depth, k = first + producer.chunk * 8;
                tile.flags = Message::product | (step + 1 == steps ? Message::last : 0);
                unsigned char* a = producer.begin(tile, P::b_bytes + (dense ? params.tile_rows * P::row_bytes : 0));
                if (producer.thread == 0) {
                    load_weight(params, tile, tiles, first, a + P::a_bytes, producer.barrier());
                    if (dense) load_rows(params, tile, tiles, first, a, producer.barrier());
                }
                if (!dense)
                    producer.copy_rows(a, static_cast<const unsigned char*>(p.x) + 2 * k, uint32_t(2 * p.x_row), tile.rows,
                                       [&](int i) { return k < p.depth ? number[i] : -1; });
                producer.end(!dense);
            }
            producer.flush();
            if (write_zeros) zeros.write<T>(p, 128);
        }
        if (write_zeros) zeros.write<T>(p, zeros.end);
    }

    // What the results need from memory is loaded behind the first products, so that storing them waits for nothing.
    static MOH_DEVICE void consume(Consumer<P>& consumer, const LinearParams& p, const Message& tile, bool dense) {
        const int own = consumer.units(tile), pair = consumer.lane % 4, columns = dense ? p.heads * p.columns : p.columns;
        int token[2][2]; // -1 where the tile has no row
        // Some heads may be off in a dense tile: whether the head of the thread's columns 32 i + 8 pair to + 7 is on for row s of
        // unit u, as bit 8 u + 4 s + i.
        const bool gated = dense && p.gates != nullptr;
        uint32_t heads_on = gated ? 0 : ~0u;
        // The bias of columns 8 j + 2 pair and one more.
        uint32_t bias[P::columns / 8];
        consumer.multiply(tile, [&] {
            // All loads are issued before the first one is used.
            int head[tile_columns / 32]; // of columns 32 i + 8 pair to + 7; -1: none
            float gate[4][tile_columns / 32];
#pragma unroll
            for (int i = 0; i < tile_columns / 32; i++) {
                const int column = tile.column + 32 * i + 8 * pair;
                head[i] = gated && column < columns ? column / p.columns : -1;
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = consumer.row(r / 2, r % 2);
                const bool exists = row < tile.rows;
                token[r / 2][r % 2] = !exists ? -1 : dense ? tile.row + row : p.entries[int64_t(tile.head) * p.tokens + tile.row + row];
                const float* gates = p.gates + int64_t(exists ? tile.row + row : 0) * p.heads;
#pragma unroll
                for (int i = 0; i < tile_columns / 32; i++) gate[r][i] = exists && head[i] >= 0 ? gates[head[i]] : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < P::columns / 8; j++) {
                const int column = tile.column + 8 * j % tile_columns + 2 * pair, part = 8 * j / tile_columns * p.columns;
                bias[j] = p.bias && column < columns ? load_two(p.bias, tile.head * p.bias_head + part + column) : 0;
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int i = 0; i < tile_columns / 32; i++) heads_on |= (gate[r][i] != 0.0f ? 1u : 0u) << (4 * r + i);
        });

        if (p.checked != nullptr) note_failure(consumer, p, own);
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                if (u >= own) continue;
                const auto start = uint64_t(static_cast<T*>(p.output) + token[u][s] * p.output_row + tile.head * p.output_head + tile.column);
                uint32_t halves[2] = {uint32_t(start), uint32_t(start >> 32)};
                keep(halves); // otherwise the compiler computes the address again for each store
                T* const output = reinterpret_cast<T*>(halves[0] | uint64_t(halves[1]) << 32);
                auto value = [&](int j, int e) { return consumer.sums[u][4 * j + 2 * s + e] + element<T>(bias[j], e); };
                auto result = [&](int j, int e) {
                    float x = value(j, e);
                    if (is_mlp) x = activate_fast(x, p.activation);
                    return pairs ? x * value(j + tile_columns / 8, e) : x;
                };
                auto word = [&](int j) { return pack<T>(result(j, 0), result(j, 1)); };
                auto at = [&](int j) -> T* { return token[u][s] >= 0 && tile.column + 8 * j < columns ? output + 8 * j : nullptr; };
                auto is_on = [&](int i) { return (heads_on >> (8 * u + 4 * s + i) & 1) != 0; };
                store_row<tile_columns / 8>(word, at, is_on);
            }
    }

    // Says in `checked` whether a sum of the tile is not finite.
    static MOH_DEVICE void note_failure(const Consumer<P>& consumer, const LinearParams& p, int own) {
        bool finite = true;
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int i = 0; i < P::columns / 2; i++) finite &= u >= own || fabsf(consumer.sums[u][i]) <= 3.4028235e38f;
        if (__any_sync(0xffffffffu, !finite) && consumer.lane == 0) *p.checked = 1;
    }

    static MOH_DEVICE void run(const LinearSm90Params& params) {
        const LinearParams& p = params.linear;
        if (threadIdx.x == 0) {
            tma_prefetch(&params.x_map);
            tma_prefetch(&params.weight_map);
        }
        start_next_kernel();
        expect_shared_memory(sizeof(Shared<P>));
        Shared<P>& shared = *reinterpret_cast<Shared<P>*>(shared_memory());
        start_barriers(shared);
        wait_for_previous_kernel();
        const bool dense = !is_mlp && is_dense(p);
        if (p.only == (dense ? 1 : 2) || (p.checked != nullptr && !is_one_product(p))) return;
        run_roles(
            shared, [&](Producer<P>& producer) { produce(producer, params, dense); },
            [&](Consumer<P>& consumer, const Message& tile) { consume(consumer, p, tile, dense); });
    }
};

} // namespace

// moh_projection_sm90_<type>_<layout>_<columns>, in layout 1 also _mlp and _pairs (64 columns). src/product/hopper.rs
// repeats these numbers. Only the tiles of 128 columns, gathered and dense, run in clusters.
#define MOH_PROJECTION_BODY(type, layout, columns, stages, cluster, is_mlp, pairs)                                     \
    {                                                                                                                  \
        using P = Product<type, layout, columns, stages, cluster>;                                                     \
        static_assert(sizeof(Shared<P>) <= 232448, "shared memory of a block");                                        \
        Projection<P, is_mlp, pairs>::run(p);                                                                          \
    }
#define MOH_PROJECTION(name, type, layout, columns, stages, is_mlp, pairs)                                             \
    MOH_KERNEL(moh_projection_sm90_##type##_##layout##_##name, LinearSm90Params, kThreads, 1)                          \
    MOH_PROJECTION_BODY(type, layout, columns, stages, 1, is_mlp, pairs)
#define MOH_PROJECTIONS(type, layout)                                                                                  \
    MOH_PROJECTION(64, type, layout, 64, 5, false, false)                                                              \
    MOH_PROJECTION(72, type, layout, 72, 4, false, false)                                                              \
    MOH_CLUSTER_KERNEL(moh_projection_sm90_##type##_##layout##_128, LinearSm90Params, kThreads, 2)                     \
    MOH_PROJECTION_BODY(type, layout, 128, 4, 2, false, false)
#define MOH_PROJECTIONS_MLP(type)                                                                                      \
    MOH_PROJECTION(mlp, type, 1, 128, 4, true, false)                                                                  \
    MOH_PROJECTION(pairs, type, 1, 128, 4, true, true)
MOH_PROJECTIONS(f16, 0)
MOH_PROJECTIONS(f16, 1)
MOH_PROJECTIONS(bf16, 0)
MOH_PROJECTIONS(bf16, 1)
MOH_PROJECTIONS_MLP(f16)
MOH_PROJECTIONS_MLP(bf16)
