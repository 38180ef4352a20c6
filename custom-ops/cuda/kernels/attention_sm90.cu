// RoutedAttention for Hopper (sm_90a), f16 and bf16.
//
// A block is persistent: it processes tiles (rows of one list of the plan, which share a KV head). Warps are
// specialised:
// - warp 0 finds tiles and loads key and value blocks by TMA into a ring of slots, in the order of use: K0 K1 V0 K2
//   V1 ...; block 0 is the last one of the sequence, so that masked blocks come first;
// - gather warp w copies the query rows of consumer warpgroup w into swizzled shared memory, one unit (64 rows) ahead,
//   and between units writes zeros for blocks that are off;
// - consumer warpgroups process a unit each: S = Q K^T of block i + 1 and O += P V of block i run during the softmax
//   of block i + 1. P stays in registers: the accumulator fragment of S is the A fragment of the second product.
//
// There are two schedules. In step: unit w goes to warpgroup w, slots are freed as they are used, and the warpgroups
// issue their products in turn, so that the softmax of one overlaps with the products of another. Resident (keys and
// values of a tile fit the ring): tiles have many rows, and units go to the warpgroups round-robin across tiles, each
// at its own pace, so that no tensor core idles during a short tile.

#include "hopper.cuh"
#include "params.h"
#include "tiles.cuh"
#include "zeros.cuh"

namespace {

constexpr int kUnitRows = 64;
constexpr int kTileQueue = 4;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.44269504f;

template <class T, int head, int warpgroups, int keys, int slots, int query_slots, bool bias> struct Config {
    using Element = T;
    static constexpr int kHead = head;             // maximum head width; narrower heads are zero-padded
    static constexpr int kWarpgroups = warpgroups; // consumer warpgroups
    static constexpr int kKeys = keys;             // keys per block
    static constexpr int kSlots = slots;           // slots of the ring, with one key or value block each
    static constexpr int kQuerySlots = query_slots;
    static constexpr bool kBias = bias;
    // Multiples of 8. The sum over all threads equals the initial allocation of 128 (warpgroups + 1) threads with 128
    // or 168 registers each.
    static constexpr int kProducerRegisters = warpgroups == 3 ? 32 : 40;
    static constexpr int kConsumerRegisters = warpgroups == 3 ? 160 : 232;

    // Panels have the widest swizzle that divides the head width.
    static constexpr int kPanel = head % 64 == 0 ? 64 : head % 32 == 0 ? 32 : 16;
    static constexpr Swizzle kSwizzle = kPanel == 64 ? Swizzle::B128 : kPanel == 32 ? Swizzle::B64 : Swizzle::B32;
    static constexpr int kPanels = head / kPanel;
    static constexpr int kRowBytes = 2 * kPanel;
    static constexpr int kSlotBytes = 2 * keys * head;
    static constexpr int kQueryBytes = 2 * kUnitRows * head;
    static_assert(kSlotBytes % 1024 == 0 && kQueryBytes % 1024 == 0, "swizzle patterns start at multiples of 1024");
};

// A unit's rows: index (b, token, head) into gates, query and output; -1 after the tile's last row.
struct Rows {
    int32_t row[kUnitRows];
    float gate[kUnitRows];
};

template <class C> struct Shared {
    unsigned char ring[C::kSlots][C::kSlotBytes];
    unsigned char query[C::kWarpgroups][C::kQuerySlots][C::kQueryBytes];
    Rows rows[C::kWarpgroups][C::kQuerySlots];
    int4 tiles[kTileQueue];
    uint64_t tile_full[kTileQueue], tile_empty[kTileQueue];
    uint64_t slot_full[C::kSlots], slot_empty[C::kSlots];
    uint64_t query_full[C::kWarpgroups][C::kQuerySlots], query_empty[C::kWarpgroups][C::kQuerySlots];
};

MOH_DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------- producer

// Finds tile `index` and passes it to the other warps.
template <class C>
MOH_DEVICE int4 fetch_tile(const AttentionSm90Params& p, Shared<C>& shared, TileSearch& search, Position<kTileQueue>& at, int index) {
    int4 tile = find_tile(p.tiles, search, index);
    if (threadIdx.x % 32 == 0) {
        mbarrier_wait(&shared.tile_empty[at.slot], at.parity ^ 1);
        shared.tiles[at.slot] = tile;
        mbarrier_arrive(&shared.tile_full[at.slot]);
    }
    at.advance();
    return tile;
}

template <class C>
MOH_DEVICE void load_block(const AttentionSm90Params& p, const TensorMap* map, Shared<C>& shared, Position<C::kSlots>& at, int list,
                           int block) {
    uint64_t* full = &shared.slot_full[at.slot];
    int token = block * C::kKeys, batch = list / p.kv_num_heads, head = list % p.kv_num_heads;
    mbarrier_wait(&shared.slot_empty[at.slot], at.parity ^ 1);
    mbarrier_arrive_expect(full, C::kSlotBytes);
#pragma unroll
    for (int panel = 0; panel < C::kPanels; panel++)
        tma_load(shared.ring[at.slot] + panel * C::kKeys * C::kRowBytes, map, full, panel * C::kPanel,
                 p.cache_layout ? token : head, p.cache_layout ? head : token, batch);
    at.advance();
}

// Runs on one warp: all lanes find tiles, the first one loads blocks. The other warps access global memory only after
// they have got a tile from it.
template <class C> MOH_DEVICE void produce(const AttentionSm90Params& p, Shared<C>& shared) {
    const bool loads = threadIdx.x % 32 == 0;
    if (loads) {
        tma_prefetch(&p.key_map);
        tma_prefetch(&p.value_map);
    }
    wait_for_previous_kernel();
    TileSearch search;
    Position<kTileQueue> tile_at;
    Position<C::kSlots> slot_at;
    int4 tile = fetch_tile(p, shared, search, tile_at, int(blockIdx.x));
    while (tile.z > 0) {
        int blocks = divide_up(tile.w, C::kKeys);
        int4 next = tile;
        for (int i = 0; i <= blocks; i++) {
            if (loads && i < blocks) load_block(p, &p.key_map, shared, slot_at, tile.x, blocks - 1 - i);
            // Early enough for the gather warps to work ahead, late enough not to delay this tile.
            if (i == 0) next = fetch_tile(p, shared, search, tile_at, take_number(p.tiles));
            if (loads && i > 0) load_block(p, &p.value_map, shared, slot_at, tile.x, blocks - i);
        }
        tile = next;
    }
}

// Returns the next tile to a warp.
template <class C> MOH_DEVICE int4 next_tile(Shared<C>& shared, Position<kTileQueue>& at) {
    mbarrier_wait(&shared.tile_full[at.slot], at.parity);
    int4 tile = shared.tiles[at.slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared.tile_empty[at.slot]);
    at.advance();
    return tile;
}

// The first of the tile's units for warpgroup w; the others follow in steps of kWarpgroups. `before` is the number of
// units of earlier tiles.
template <class C> MOH_DEVICE int first_unit(const AttentionSm90Params& p, int w, int before) {
    return p.resident ? (w + C::kWarpgroups - before % C::kWarpgroups) % C::kWarpgroups : w;
}

// A gather warp's share of the zero writes, done a part at a time.
template <class C> struct Zeros {
    int64_t next, end;
    MOH_DEVICE Zeros(const AttentionSm90Params& p, int w) {
        int64_t blocks = int64_t(p.batch) * p.q_len * p.num_heads, warps = int64_t(gridDim.x) * C::kWarpgroups;
        int64_t share = (blocks + 32 * warps - 1) / (32 * warps) * 32;
        next = min((int64_t(blockIdx.x) * C::kWarpgroups + w) * share, blocks);
        end = min(next + share, blocks);
    }
    MOH_DEVICE void write(const AttentionSm90Params& p, int64_t blocks) {
        int64_t count = min(blocks, end - next);
        write_zeros(static_cast<unsigned char*>(p.output) + next * p.value_dim * 2, p.gates + next, count, p.value_dim * 2, 0, 1);
        next += count;
    }
};

// Runs on one warp: loads the query rows of warpgroup w.
template <class C> MOH_DEVICE void gather(const AttentionSm90Params& p, Shared<C>& shared, int w) {
    using T = typename C::Element;
    constexpr int kChunks = C::kHead / 8;
    const int lane = threadIdx.x % 32, group = p.num_heads / p.kv_num_heads;
    Position<kTileQueue> tile_at;
    Position<C::kQuerySlots> at;
    Zeros<C> zeros(p, w);
    for (int before = 0;;) {
        int4 tile = next_tile(shared, tile_at);
        if (tile.z == 0) break;
        int units = divide_up(tile.z, kUnitRows);
        int batch = tile.x / p.kv_num_heads, first_head = tile.x % p.kv_num_heads * group;
        const int32_t* entries = p.tiles.entries + int64_t(tile.x) * p.q_len * group + tile.y;
        for (int unit = first_unit<C>(p, w, before); unit < units; unit += C::kWarpgroups) {
            // Reads that need no free query slot.
            int row[kUnitRows / 32];
#pragma unroll
            for (int i = 0; i < kUnitRows / 32; i++) {
                int r = unit * kUnitRows + i * 32 + lane;
                int entry = r < tile.z ? entries[r] : 0;
                row[i] = r < tile.z ? (batch * p.q_len + entry / group) * p.num_heads + first_head + entry % group : -1;
            }
            mbarrier_wait(&shared.query_empty[w][at.slot], at.parity ^ 1);
            Rows& rows = shared.rows[w][at.slot];
#pragma unroll
            for (int i = 0; i < kUnitRows / 32; i++) {
                rows.row[i * 32 + lane] = row[i];
                cp_async_4(&rows.gate[i * 32 + lane], p.gates + row[i], row[i] >= 0);
            }
            __syncwarp();
            unsigned char* query = shared.query[w][at.slot];
#pragma unroll 4
            for (int i = lane; i < kUnitRows * kChunks; i += 32) {
                int r = i / kChunks, element = i % kChunks * 8, row = rows.row[r];
                uint32_t panel = element / C::kPanel * (kUnitRows * C::kRowBytes);
                uint32_t offset = panel + r * C::kRowBytes + element % C::kPanel * 2;
                cp_async_16(query + swizzle(offset, C::kSwizzle),
                            static_cast<const T*>(p.query) + int64_t(row) * p.head_dim + element,
                            row >= 0 && element < p.head_dim);
            }
            cp_async_commit();
            cp_async_wait<0>();
            fence_async_proxy();
            mbarrier_arrive(&shared.query_full[w][at.slot]);
            at.advance();
            zeros.write(p, 128);
        }
        before += units;
    }
    zeros.write(p, zeros.end);
}

// --------------------------------------------------------------------------------------------------------- consumers

// A consumer warpgroup: its index w and the thread's position in the fragments.
template <class C> struct Consumer {
    using T = typename C::Element;
    const AttentionSm90Params& p;
    Shared<C>& shared;
    int w, warp, lane;
    Position<C::kQuerySlots> query_at;

    // State of this thread's two rows of the unit: lane / 4 and lane / 4 + 8 of the warp's 16.
    float output[C::kHead / 2];
    float maximum[2], sum[2];
    int limit[2]; // number of keys visible to the row

    // Turns order the warpgroups: each issues its products, then passes the turn on. All take as many turns as the
    // tile has blocks.
    MOH_DEVICE void begin_turn() const {
        if (!p.resident) barrier_sync(1 + w, 256);
    }
    MOH_DEVICE void end_turn() const {
        if (!p.resident) barrier_arrive(1 + (w + 1) % C::kWarpgroups, 256);
    }

    MOH_DEVICE void wait_slot(const Position<C::kSlots>& at) const { mbarrier_wait(&shared.slot_full[at.slot], at.parity); }
    // Releases the slot for this warp. Its lanes are converged, as after a wait for wgmma.
    MOH_DEVICE void leave_slot(Position<C::kSlots>& at, bool release) const {
        if (release && lane == 0) mbarrier_arrive(&shared.slot_empty[at.slot]);
        at.advance();
    }
    MOH_DEVICE void skip_slot(Position<C::kSlots>& at, bool release) const {
        if (release) {
            wait_slot(at); // otherwise this could arrive in an earlier phase
            __syncwarp();  // otherwise a slow lane could miss the phase
        }
        leave_slot(at, release);
    }
    // Skips the tile's first `count` blocks, except the values of the last one, which follow the next keys.
    MOH_DEVICE void skip_blocks(Position<C::kSlots>& at, int count, bool release) const {
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            begin_turn();
            end_turn();
            skip_slot(at, release);
            if (i > 0) skip_slot(at, release);
        }
    }

    // S = Q K^T
    MOH_DEVICE void issue_scores(float (&scores)[C::kKeys / 2], int slot) const {
        using KMajor = Operand<C::kSwizzle, 16, 8 * C::kRowBytes>;
        KMajor query(shared_address(shared.query[w][query_at.slot])), key(shared_address(shared.ring[slot]));
#pragma unroll
        for (int k = 0; k < C::kHead; k += 16) {
            uint32_t panel = k / C::kPanel * C::kRowBytes, inside = k % C::kPanel * 2;
            wgmma_ss<T, C::kKeys>(scores, query.at(kUnitRows * panel + inside), key.at(C::kKeys * panel + inside), k > 0);
        }
        wgmma_commit();
    }

    // O += P V
    MOH_DEVICE void issue_values(const uint32_t (&weights)[C::kKeys / 4], int slot) {
        Operand<C::kSwizzle, C::kKeys * C::kRowBytes, 8 * C::kRowBytes> value(shared_address(shared.ring[slot]));
#pragma unroll
        for (int k = 0; k < C::kKeys; k += 16) wgmma_rs<T, C::kHead>(output, weights + k / 4, value.at(k * C::kRowBytes), 1);
        wgmma_commit();
    }

    MOH_DEVICE void add_bias(float (&scores)[C::kKeys / 2], int first_key, int batch, const int (&row)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int head = max(row[r], 0) % p.num_heads, token = max(row[r], 0) / p.num_heads % p.q_len;
            const T* bias = static_cast<const T*>(p.bias) + batch * p.bias_strides[0] + head * p.bias_strides[1] +
                            token * p.bias_strides[2];
            const int biased = p.bias ? limit[r] : 0; // without a bias the scores are only scaled
#pragma unroll
            for (int i = 0; i < C::kKeys / 4; i++) {
                int key = first_key + i / 2 * 8 + lane % 4 * 2 + i % 2;
                float& score = scores[i / 2 * 4 + r * 2 + i % 2];
                score *= p.scale_log2;
                if (key < biased) score += to_float(bias[key * p.bias_strides[3]]) * kLog2E;
            }
        }
    }

    // Converts scores to weights, exp2(scores * factor - maximum), and returns the rescaling factor of earlier
    // weights. Each row has two independent chains for maximum and sum, to hide latency.
    template <bool masked> MOH_DEVICE void softmax(float (&scores)[C::kKeys / 2], int first_key, float (&shrink)[2]) {
        const float factor = C::kBias ? 1.0f : p.scale_log2;
        if (masked) {
#pragma unroll
            for (int i = 0; i < C::kKeys / 2; i++)
                if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] - first_key - lane % 4 * 2) scores[i] = -kInfinity;
        }
        float top[4] = {maximum[0], maximum[0], maximum[1], maximum[1]}; // by row and column parity, like scores[i % 4]
#pragma unroll
        for (int i = 0; i < C::kKeys / 2; i++) top[i % 4] = fmaxf(top[i % 4], scores[i]);
        float offset[2], total[4] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float row = fmaxf(top[2 * r], top[2 * r + 1]);
            row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 1));
            row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 2));
            // While all keys are masked the maximum is -inf, and -inf - -inf would be NaN.
            offset[r] = row == -kInfinity ? 0.0f : row * factor;
            shrink[r] = exp2_approx(fmaf(maximum[r], factor, -offset[r]));
            maximum[r] = row;
        }
#pragma unroll
        for (int i = 0; i < C::kKeys / 2; i++) {
            scores[i] = exp2_approx(fmaf(scores[i], factor, -offset[i / 2 % 2]));
            total[i % 4] += scores[i];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] = fmaf(sum[r], shrink[r], total[2 * r] + total[2 * r + 1]);
    }

    MOH_DEVICE void to_weights(const float (&scores)[C::kKeys / 2], uint32_t (&weights)[C::kKeys / 4]) const {
#pragma unroll
        for (int i = 0; i < C::kKeys / 4; i++) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }

    // A block after the first. Its scores, and the previous block's product with the values, are computed during the
    // softmax.
    template <bool masked>
    MOH_DEVICE void step(float (&scores)[C::kKeys / 2], uint32_t (&weights)[C::kKeys / 4], Position<C::kSlots>& at, bool release,
                         int first_key, int batch, const int (&row)[2]) {
        Position<C::kSlots> value_at = at;
        value_at.advance();
        wait_slot(at);
        begin_turn();
        keep(output);
        keep(weights);
        wgmma_fence();
        issue_scores(scores, at.slot);
        wait_slot(value_at);
        wgmma_fence();
        issue_values(weights, value_at.slot);
        end_turn();
        wgmma_wait<1>();
        keep(scores);
        leave_slot(at, release);
        float shrink[2];
        if (C::kBias) add_bias(scores, first_key, batch, row);
        softmax<masked || C::kBias>(scores, first_key, shrink);
        // The softmax precedes the wait, the conversion follows it: the product is still reading the weights'
        // registers.
        order_after(sum[0] + sum[1]);
        wgmma_wait<0>();
        keep(output);
        keep(scores);
        leave_slot(at, release);
#pragma unroll
        for (int i = 0; i < C::kHead / 2; i++) output[i] *= shrink[i / 2 % 2];
        to_weights(scores, weights);
    }

    // Attention of 64 rows to the tile's blocks, whose slots start at `at`. The last pass over a tile releases the
    // slots (`release`).
    MOH_DEVICE void unit(const int4& tile, int unit, Position<C::kSlots> at, bool release) {
        const int blocks = divide_up(tile.w, C::kKeys), batch = tile.x / p.kv_num_heads;
        const int last_row = min(tile.z - unit * kUnitRows, kUnitRows) - 1;
        mbarrier_wait(&shared.query_full[w][query_at.slot], query_at.parity);
        const Rows& rows = shared.rows[w][query_at.slot];
        const int row[2] = {rows.row[warp * 16 + lane / 4], rows.row[warp * 16 + lane / 4 + 8]};
        // Rows past the end are zero and see all keys of the tile.
        auto visible = [&](int row) {
            return p.is_causal && row >= 0 ? min(tile.w, max(0, row / p.num_heads % p.q_len + 1 + p.kv_len - p.q_len)) : tile.w;
        };
        limit[0] = visible(row[0]);
        limit[1] = visible(row[1]);
        const int needed = divide_up(visible(rows.row[last_row]), C::kKeys), skipped = blocks - needed;
        // Blocks that end at or before this key need no mask, because rows are ascending.
        const int all_see = visible(rows.row[0]);

        skip_blocks(at, skipped, release);
#pragma unroll
        for (int i = 0; i < C::kHead / 2; i++) output[i] = 0.0f;
        maximum[0] = maximum[1] = -kInfinity;
        sum[0] = sum[1] = 0.0f;
        if (needed == 0) {
            if (skipped > 0) skip_slot(at, release);
        } else {
            float scores[C::kKeys / 2], shrink[2];
            uint32_t weights[C::kKeys / 4];
            int first_key = (needed - 1) * C::kKeys;
            wait_slot(at);
            begin_turn();
            wgmma_fence();
            issue_scores(scores, at.slot);
            end_turn();
            wgmma_wait<0>();
            keep(scores);
            leave_slot(at, release);
            if (skipped > 0) skip_slot(at, release);
            if (C::kBias) add_bias(scores, first_key, batch, row);
            softmax<true>(scores, first_key, shrink);
            to_weights(scores, weights);
            for (; first_key > all_see; first_key -= C::kKeys)
                step<true>(scores, weights, at, release, first_key - C::kKeys, batch, row);
            for (; first_key > 0; first_key -= C::kKeys)
                step<false>(scores, weights, at, release, first_key - C::kKeys, batch, row);
            wait_slot(at);
            keep(output);
            keep(weights);
            wgmma_fence();
            issue_values(weights, at.slot);
            wgmma_wait<0>();
            keep(output);
            leave_slot(at, release);
        }
        // A wgmma wait covers only the warp's own part of the products, but all warps read the query's memory.
        barrier_sync(4 + w, 128);
        store(rows);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.query_empty[w][query_at.slot]);
        query_at.advance();
    }

    // Stores the output rows through the query's shared memory (16 rows per warp), so that whole rows are written at
    // once.
    MOH_DEVICE void store(const Rows& rows) const {
        constexpr int kChunks = C::kHead / 8;
        unsigned char* staged = shared.query[w][query_at.slot];
        auto chunk = [&](int row, int column) {
            uint32_t panel = column / C::kPanel * (kUnitRows * C::kRowBytes);
            return staged + swizzle(panel + row * C::kRowBytes + column % C::kPanel * 2, C::kSwizzle);
        };
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = warp * 16 + lane / 4 + 8 * r;
            float total = sum[r];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            // All keys are masked: 0.
            float factor = total == 0.0f ? 0.0f : __fdividef(rows.gate[row], total);
#pragma unroll
            for (int i = 0; i < kChunks; i++)
                reinterpret_cast<uint32_t*>(chunk(row, 8 * i))[lane % 4] =
                    pack<T>(output[4 * i + 2 * r] * factor, output[4 * i + 2 * r + 1] * factor);
        }
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < 16 * kChunks; i += 32) {
            int r = warp * 16 + i / kChunks, column = i % kChunks * 8, row = rows.row[r];
            if (row >= 0 && column < p.value_dim)
                *reinterpret_cast<uint4*>(static_cast<T*>(p.output) + int64_t(row) * p.value_dim + column) =
                    *reinterpret_cast<const uint4*>(chunk(r, column));
        }
    }

    MOH_DEVICE void run() {
        Position<kTileQueue> tile_at;
        Position<C::kSlots> at;
        if (!p.resident && w == C::kWarpgroups - 1) end_turn(); // the first turn is warpgroup 0's
        for (int before = 0;;) {
            int4 tile = next_tile(shared, tile_at);
            if (tile.z == 0) return;
            int units = divide_up(tile.z, kUnitRows), blocks = divide_up(tile.w, C::kKeys);
            int index = first_unit<C>(p, w, before);
            if (index >= units) {
                skip_blocks(at, blocks, true);
                if (blocks > 0) skip_slot(at, true);
            } else {
                for (; index < units; index += C::kWarpgroups) unit(tile, index, at, index + C::kWarpgroups >= units);
#pragma unroll 1
                for (int i = 0; i < 2 * blocks; i++) at.advance();
            }
            before += units;
        }
    }
};

template <class C> MOH_DEVICE void attention(const AttentionSm90Params& p) {
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(shared_memory());
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kTileQueue; i++) {
            mbarrier_init(&shared.tile_full[i], 1);
            mbarrier_init(&shared.tile_empty[i], 5 * C::kWarpgroups); // 4 consumer warps and a gather warp each
        }
        for (int i = 0; i < C::kSlots; i++) {
            mbarrier_init(&shared.slot_full[i], 1);
            mbarrier_init(&shared.slot_empty[i], 4 * C::kWarpgroups);
        }
        for (int w = 0; w < C::kWarpgroups; w++)
            for (int i = 0; i < C::kQuerySlots; i++) {
                mbarrier_init(&shared.query_full[w][i], 32);
                mbarrier_init(&shared.query_empty[w][i], 4);
            }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < 4) {
        registers_decrease<C::kProducerRegisters>();
        if (warp == 0) {
            produce(p, shared);
        } else if (warp <= C::kWarpgroups) {
            gather(p, shared, warp - 1);
        }
    } else {
        registers_increase<C::kConsumerRegisters>();
        Consumer<C> consumer{p, shared, warp / 4 - 1, warp % 4, lane};
        consumer.run();
    }
}

} // namespace

// Instances: name, type, maximum width, warpgroups, keys per block, slots, query slots, bias.
// src/routed_attention/hopper.rs repeats these numbers.
#define MOH_ATTENTION(name, T, head, warpgroups, keys, slots, query_slots, bias)                                       \
    MOH_KERNEL(name, AttentionSm90Params, 128 * (warpgroups + 1), 1) {                                                 \
        using C = Config<T, head, warpgroups, keys, slots, query_slots, bias>;                                         \
        static_assert(sizeof(Shared<C>) <= 232448, "shared memory of a block");                                        \
        attention<C>(p);                                                                                               \
    }
#define MOH_ATTENTION_PLAIN(head, ...)                                                                                 \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head, f16, head, __VA_ARGS__, false)                                       \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head, bf16, head, __VA_ARGS__, false)
#define MOH_ATTENTION_BIAS(head, ...)                                                                                  \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head##_bias, f16, head, __VA_ARGS__, true)                                 \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head##_bias, bf16, head, __VA_ARGS__, true)
#define MOH_ATTENTION_BOTH(...) MOH_ATTENTION_PLAIN(__VA_ARGS__) MOH_ATTENTION_BIAS(__VA_ARGS__)
MOH_ATTENTION_PLAIN(64, 3, 128, 10, 2)
MOH_ATTENTION_BIAS(64, 2, 128, 10, 2) // three warpgroups would spill registers
MOH_ATTENTION_BOTH(80, 2, 128, 9, 2)
MOH_ATTENTION_BOTH(96, 2, 128, 7, 2)
MOH_ATTENTION_BOTH(128, 2, 128, 5, 2)
MOH_ATTENTION_PLAIN(256, 2, 64, 5, 1)
