// The second half of RoutedMLP on Hopper, in f16 and bf16, in two launches.
//
// moh_expert_products_sm90 multiplies every expert's rows, gathered by its list of tokens, with the expert's weight,
// by the products of product_sm90.cuh. Each (token, expert) pair has its own row of products, in f32. So tiles have
// rows of the whole list: an expert's weight is read once for 256 of its rows, and rows are padded once per list. In
// combine_routed.cuh, whose sums are in shared memory, both happen for every 256 tokens.
// moh_expert_sum_sm90 adds a token's rows, multiplied by their gates, in the order of the experts, and stores zeros
// where no expert is on.
//
// The host does not know the number of pairs that are on. If they exceed `capacity`, both kernels return at once, and
// combine_routed.cuh computes the output.
#include "linear.cuh"
#include "product_sm90.cuh"

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;

// Iterates over this block's tiles, ordered by expert, row, column, so that concurrent tiles share an expert's weight
// and rows in the L2 cache. The rows of products have the same order: by expert, then as in its list.
template <int columns> struct Tiles {
    const LinearParams& p;
    const int lane = int(threadIdx.x) % 32, spans;
    const int tile_rows;
    int first_expert = 0;       // of 32 experts
    int first_position = 0;     // row of products of first_expert's first token
    int left = int(blockIdx.x); // number of tiles from first_expert on before this block's next tile
    int row = 0;                // of the current tile, in its expert's list

    MOH_DEVICE explicit Tiles(const LinearParams& p) : p(p), spans((p.columns + columns - 1) / columns), tile_rows(height()) {}

    MOH_DEVICE int rows_of(int expert) const { return expert < p.heads ? p.counts[expert] : 0; }
    MOH_DEVICE static int tiles_of(int rows, int height) { return (rows + height - 1) / height; }

    // The tile height for which a block copies least: rounds of tiles over all blocks, times the rows and the columns of
    // a tile. With few tiles, lower ones fill more multiprocessors; with many, higher ones read the weights less often.
    MOH_DEVICE int height() const {
        int best = 0, least = 0;
        for (int height = 256; height >= 64; height -= 64) {
            int tiles = 0;
            for (int expert = lane; expert < p.heads; expert += 32) tiles += tiles_of(rows_of(expert), height);
            for (int lanes = 16; lanes > 0; lanes /= 2) tiles += __shfl_xor_sync(kAllLanes, tiles, lanes);
            const int rounds = (tiles * spans + int(gridDim.x) - 1) / int(gridDim.x), copies = rounds * (height + columns);
            if (best == 0 || copies < least) best = height, least = copies;
        }
        return best;
    }

    // Its message has the row of products instead of the row of the list. All 32 lanes call.
    MOH_DEVICE bool next(Message& tile) {
        for (; first_expert < p.heads; first_expert += 32) {
            const int rows = rows_of(first_expert + lane), tiles = tiles_of(rows, tile_rows) * spans;
            int rows_end = rows, tiles_end = tiles; // sums up to and including this lane's expert
            for (int step = 1; step < 32; step *= 2) {
                const int more_rows = __shfl_up_sync(kAllLanes, rows_end, step), more_tiles = __shfl_up_sync(kAllLanes, tiles_end, step);
                if (lane >= step) rows_end += more_rows, tiles_end += more_tiles;
            }
            const uint32_t reached = __ballot_sync(kAllLanes, left < tiles_end);
            if (reached != 0) {
                const int found = __ffs(int(reached)) - 1;
                const int index = left - __shfl_sync(kAllLanes, tiles_end - tiles, found);
                row = index / spans * tile_rows;
                const int position = first_position + __shfl_sync(kAllLanes, rows_end - rows, found) + row;
                tile = Message(first_expert + found, position, index % spans * columns,
                               min(tile_rows, __shfl_sync(kAllLanes, rows, found) - row));
                left += int(gridDim.x);
                return true;
            }
            left -= __shfl_sync(kAllLanes, tiles_end, 31);
            first_position += __shfl_sync(kAllLanes, rows_end, 31);
        }
        return false;
    }
};

template <class P> struct ExpertProducts {
    static MOH_DEVICE void produce(Producer<P>& producer, const LinearSm90Params& params) {
        const LinearParams& p = params.linear;
        const int steps = (p.depth + P::depth - 1) / P::depth;
        Tiles<P::columns> tiles(p);
        Message tile(0, 0, 0, 0);
        int token[Producer<P>::own];
        auto next_tile = [&] {
            if (!tiles.next(tile)) return false;
            const int32_t* list = p.entries + int64_t(tile.head) * p.tokens + tiles.row;
#pragma unroll
            for (int i = 0; i < Producer<P>::own; i++) {
                const int row = 16 * i + producer.row;
                token[i] = row < tile.rows ? list[row] : -1;
            }
            return true;
        };
        for (bool more = next_tile(); more;) {
            if (tile.column == 0 && producer.chunk == 0) {
#pragma unroll
                for (int i = 0; i < Producer<P>::own; i++)
                    if (token[i] >= 0) p.positions[int64_t(token[i]) * p.heads + tile.head] = tile.row + 16 * i + producer.row;
            }
            const unsigned char* x = static_cast<const unsigned char*>(p.x) + 2 * (tile.head * p.x_head);
            for (int step = 0; step < steps; step++) {
                const int first = step * P::depth, k = first + producer.chunk * 8;
                tile.flags = Message::product | (step + 1 == steps ? Message::last : 0);
                unsigned char* a = producer.begin(tile, P::b_bytes);
                if (producer.thread == 0) {
#pragma unroll
                    for (int panel = 0; panel < P::panels; panel++)
                        tma_load(a + P::a_bytes + panel * P::panel_bytes, &params.weight_map, producer.barrier(), tile.column + 64 * panel,
                                 first, tile.head, 0);
                }
                producer.copy_rows(a, x + 2 * k, uint32_t(2 * p.x_row), tile.rows, [&](int i) { return k < p.depth ? token[i] : -1; });
                producer.end(true);
            }
            more = next_tile(); // its list arrives while this tile's last copies do
            producer.flush();
        }
    }

    static MOH_DEVICE void consume(Consumer<P>& consumer, const LinearParams& p, const Message& tile) {
        const int own = consumer.units(tile);
        consumer.multiply(tile);
        float* products = p.partial + int64_t(tile.row) * p.columns + tile.column + 2 * (consumer.lane % 4);
#pragma unroll
        for (int u = 0; u < 2; u++)
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const int row = consumer.row(u, s);
                // Rows of a unit after the last one of the tile are another tile's.
                const bool valid = u < own && row < tile.rows;
                float* at = products + int64_t(row) * p.columns;
#pragma unroll
                for (int j = 0; j < P::columns / 8; j++)
                    if (valid && tile.column + 8 * j < p.columns)
                        *reinterpret_cast<float2*>(at + 8 * j) = make_float2(consumer.sums[u][4 * j + 2 * s], consumer.sums[u][4 * j + 2 * s + 1]);
            }
    }

    static MOH_DEVICE void run(const LinearSm90Params& params) {
        const LinearParams& p = params.linear;
        if (threadIdx.x == 0) tma_prefetch(&params.weight_map);
        start_next_kernel();
        Shared<P>& shared = *reinterpret_cast<Shared<P>*>(shared_memory());
        start_barriers(shared);
        wait_for_previous_kernel();
        if (pairs_on(p) > p.capacity) return;
        run_roles(
            shared, [&](Producer<P>& producer) { produce(producer, params); },
            [&](Consumer<P>& consumer, const Message& tile) { consume(consumer, p, tile); });
    }
};

// Adds a token's products in `kSumColumns` columns; one warp each.
constexpr int kSumColumns = 512, kSumThreads = 256;

template <class T> MOH_DEVICE void sum_experts(const LinearParams& p) {
    constexpr int chunks = kSumColumns / 256; // of 8 columns a lane
    start_next_kernel();
    wait_for_previous_kernel();
    if (pairs_on(p) > p.capacity) return;
    const int lane = int(threadIdx.x) % 32, spans = (p.columns + kSumColumns - 1) / kSumColumns;
    const int64_t index = int64_t(blockIdx.x) * (kSumThreads / 32) + int(threadIdx.x) / 32;
    const int64_t token = index / spans;
    const int first = int(index % spans) * kSumColumns + 8 * lane;
    if (token >= p.tokens) return;
    union Chunk {
        uint4 whole;
        T each[8];
    };
    float sums[chunks][8] = {};
    for (int first_expert = 0; first_expert < p.heads; first_expert += 32) {
        const int expert = first_expert + lane;
        const float gate = expert < p.heads ? p.gates[token * p.heads + expert] : 0.0f;
        const int position = gate != 0.0f ? p.positions[token * p.heads + expert] : 0;
        for (uint32_t on = __ballot_sync(kAllLanes, gate != 0.0f); on != 0; on &= on - 1) {
            const int found = __ffs(int(on)) - 1;
            const float scale = __shfl_sync(kAllLanes, gate, found);
            const float* products = p.partial + int64_t(__shfl_sync(kAllLanes, position, found)) * p.columns;
            const T* bias = static_cast<const T*>(p.bias) + (first_expert + found) * p.bias_head;
#pragma unroll
            for (int c = 0; c < chunks; c++) {
                const int column = first + 256 * c;
                if (column >= p.columns) continue;
                const float4 low = *reinterpret_cast<const float4*>(products + column);
                const float4 high = *reinterpret_cast<const float4*>(products + column + 4);
                const float product[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                Chunk added;
                if (p.bias) added.whole = *reinterpret_cast<const uint4*>(bias + column);
#pragma unroll
                for (int e = 0; e < 8; e++)
                    sums[c][e] = fmaf(scale, p.bias ? product[e] + to_float(added.each[e]) : product[e], sums[c][e]);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < chunks; c++) {
        const int column = first + 256 * c;
        if (column >= p.columns) continue;
        Chunk chunk;
#pragma unroll
        for (int e = 0; e < 8; e++) chunk.each[e] = from_float<T>(sums[c][e]);
        *reinterpret_cast<uint4*>(static_cast<T*>(p.output) + token * p.output_row + column) = chunk.whole;
    }
}

} // namespace

// src/product/hopper/experts.rs repeats these numbers.
#define MOH_EXPERTS(type)                                                                                              \
    MOH_KERNEL(moh_expert_products_sm90_##type, LinearSm90Params, kThreads, 1) {                                       \
        ExpertProducts<Product<type, 1, 128, 4>>::run(p);                                                              \
    }                                                                                                                  \
    MOH_KERNEL(moh_expert_sum_sm90_##type, LinearParams, kSumThreads, 4) { sum_experts<type>(p); }
MOH_EXPERTS(f16)
MOH_EXPERTS(bf16)
