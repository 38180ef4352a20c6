// RoutedAttention for Hopper (sm_90a), f16 and bf16.
//
// A block is persistent: it processes tiles (rows of one list of the plan, which share a KV head). Warps are
// specialised:
// - warp 0 finds tiles and loads key and value blocks by TMA into a ring of slots, in the order of use: K0 K1 V0 K2
//   V1 ...; block 0 is the last one of the sequence, so that masked blocks come first;
// - gather warp w copies the query rows of consumer warpgroup w into swizzled shared memory, one unit (64 rows) ahead,
//   then the unit's bias, one block ahead; between units it writes zeros for blocks that are off;
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
constexpr float kLn2 = 0.693147181f;

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
    static constexpr int kProducerRegisters = warpgroups == 3 ? 32 : bias ? 72 : 40;
    static constexpr int kConsumerRegisters = warpgroups == 3 ? 160 : bias ? 216 : 232;

    // A matrix is stored as panels of 64 columns, rows of 128 bytes, and a narrower panel with the other columns: the
    // tail.
    static constexpr int kMain = head / 64 * 64;
    static constexpr int kTail = head - kMain;
    static constexpr Swizzle kTailSwizzle = kTail == 32 ? Swizzle::B64 : Swizzle::B32;
    static_assert(kTail == 0 || kTail == 16 || kTail == 32, "a tail's row is as wide as a swizzle");
    static constexpr int kSlotBytes = 2 * keys * head;
    static constexpr int kQueryBytes = 2 * kUnitRows * head;
    static_assert(2 * keys * kMain % 1024 == 0 && kSlotBytes % 1024 == 0 && kQueryBytes % 1024 == 0,
                  "swizzle patterns start at multiples of 1024");

    // The offset in bytes of an element in a matrix of `rows` rows; `column` is a multiple of 8.
    static MOH_DEVICE uint32_t offset(int rows, int row, int column) {
        if (column < kMain) return swizzle((column / 64 * rows + row) * 128 + column % 64 * 2, Swizzle::B128);
        return swizzle(2 * (rows * kMain + row * kTail + column - kMain), kTailSwizzle);
    }
};

// A unit's rows: index (b, token, head) into gates, query and output; -1 after the tile's last row.
struct Rows {
    int32_t row[kUnitRows];
    float gate[kUnitRows];
};

template <class C> struct SharedPlain {
    unsigned char ring[C::kSlots][C::kSlotBytes];
    unsigned char query[C::kWarpgroups][C::kQuerySlots][C::kQueryBytes];
    Rows rows[C::kWarpgroups][C::kQuerySlots];
    int4 tiles[kTileQueue];
    uint64_t tile_full[kTileQueue], tile_empty[kTileQueue];
    uint64_t slot_full[C::kSlots], slot_empty[C::kSlots];
    uint64_t query_full[C::kWarpgroups][C::kQuerySlots], query_empty[C::kWarpgroups][C::kQuerySlots];
};
template <class C, bool bias = C::kBias> struct Shared : SharedPlain<C> {};
// With the bias of one block and unit per warpgroup. A row starts at a multiple of 16 bytes, at or before its first key,
// so it may take a chunk more. Rows are an odd number of chunks apart, which avoids bank conflicts.
template <class C> struct Shared<C, true> : SharedPlain<C> {
    static constexpr int kBiasRowBytes = 2 * C::kKeys + 16;
    alignas(16) unsigned char bias[C::kWarpgroups][kUnitRows][kBiasRowBytes];
    uint64_t bias_full[C::kWarpgroups], bias_empty[C::kWarpgroups];
};

MOH_DEVICE int divide_up(int a, int b) { return (a + b - 1) / b; }

// Number of keys that a row of the tile sees. Rows past the end see all keys of the tile.
MOH_DEVICE int visible_keys(const AttentionSm90Params& p, const int4& tile, int row) {
    return p.is_causal && row >= 0 ? min(tile.w, max(0, row / p.num_heads % p.q_len + 1 + p.kv_len - p.q_len)) : tile.w;
}

// The bias of a row, in elements from the start; for rows past the end, any row's.
MOH_DEVICE int64_t bias_row(const AttentionSm90Params& p, int batch, int row) {
    int head = max(row, 0) % p.num_heads, token = max(row, 0) / p.num_heads % p.q_len;
    return batch * p.bias_strides[0] + head * p.bias_strides[1] + token * p.bias_strides[2];
}
// Whether the bias differs between keys, so that it is copied to shared memory. Otherwise it is a number per row.
MOH_DEVICE bool bias_has_keys(const AttentionSm90Params& p) { return p.bias && p.bias_strides[3] != 0; }
// Whether the bias differs between the rows of a tile.
MOH_DEVICE bool bias_has_rows(const AttentionSm90Params& p) {
    return p.bias_strides[2] != 0 || (p.bias_strides[1] != 0 && p.num_heads != p.kv_num_heads);
}
// Whether all rows of the bias start at a multiple of 16 bytes.
MOH_DEVICE bool bias_is_aligned(const AttentionSm90Params& p) {
    return (p.bias_strides[0] | p.bias_strides[1] | p.bias_strides[2]) % 8 == 0;
}

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
MOH_DEVICE void load_block(const AttentionSm90Params& p, const TensorMap* map, const TensorMap* tail_map, Shared<C>& shared,
                           Position<C::kSlots>& at, int list, int block) {
    uint64_t* full = &shared.slot_full[at.slot];
    int token = block * C::kKeys, batch = list / p.kv_num_heads, head = list % p.kv_num_heads;
    int inner = p.cache_layout ? token : head, outer = p.cache_layout ? head : token;
    mbarrier_wait(&shared.slot_empty[at.slot], at.parity ^ 1);
    mbarrier_arrive_expect(full, C::kSlotBytes);
#pragma unroll
    for (int column = 0; column < C::kMain; column += 64)
        tma_load(shared.ring[at.slot] + 2 * C::kKeys * column, map, full, column, inner, outer, batch);
    if (C::kTail > 0) tma_load(shared.ring[at.slot] + 2 * C::kKeys * C::kMain, tail_map, full, C::kMain, inner, outer, batch);
    at.advance();
}

// Runs on one warp: all lanes find tiles, the first one loads blocks. The other warps access global memory only after
// they have got a tile from it.
template <class C> MOH_DEVICE void produce(const AttentionSm90Params& p, Shared<C>& shared) {
    const bool loads = threadIdx.x % 32 == 0;
    if (loads) {
        tma_prefetch(&p.key_map);
        tma_prefetch(&p.value_map);
        if (C::kTail > 0) {
            tma_prefetch(&p.key_tail_map);
            tma_prefetch(&p.value_tail_map);
        }
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
            if (loads && i < blocks) load_block(p, &p.key_map, &p.key_tail_map, shared, slot_at, tile.x, blocks - 1 - i);
            // Early enough for the gather warps to work ahead, late enough not to delay this tile.
            if (i == 0) next = fetch_tile(p, shared, search, tile_at, take_number(p.tiles));
            if (loads && i > 0) load_block(p, &p.value_map, &p.value_tail_map, shared, slot_at, tile.x, blocks - i);
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

// Where a row's bias is, from the 16-byte chunk that has key 0. Elements before key 0 belong to the row before it,
// because the tensor is aligned to 16 bytes.
struct BiasRow {
    uint64_t start; // address of the chunk
    int bytes;      // from there to the row's end
};

// Copies the bias of a unit and of the block of keys that starts at first_key, and does not wait for the copies. Lane l
// passes rows l and l + 32.
template <class C>
MOH_DEVICE void copy_bias(const AttentionSm90Params& p, Shared<C>& shared, int w, const BiasRow (&rows)[2], int first_key) {
    constexpr int kChunks = C::kKeys / 8;
    const int lane = threadIdx.x % 32;
    auto copy = [&](int row, int chunk, uint64_t start, int bytes) {
        int offset = 2 * first_key + 16 * chunk;
        cp_async_first(shared.bias[w][row] + 16 * chunk, reinterpret_cast<const unsigned char*>(start) + offset,
                       min(16, max(0, bytes - offset)));
    };
    if (bias_has_rows(p)) {
        const bool is_aligned = bias_is_aligned(p);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll 4
            for (int j = lane; j < 32 * kChunks; j += 32) {
                int row = j / kChunks;
                uint64_t start = __shfl_sync(0xffffffffu, rows[i].start, row);
                int bytes = __shfl_sync(0xffffffffu, rows[i].bytes, row);
                copy(32 * i + row, j % kChunks, start, bytes);
            }
            if (!is_aligned) copy(32 * i + lane, kChunks, rows[i].start, rows[i].bytes);
        }
    } else {
        uint64_t start = __shfl_sync(0xffffffffu, rows[0].start, 0);
        int bytes = __shfl_sync(0xffffffffu, rows[0].bytes, 0);
        if (lane <= kChunks) copy(0, lane, start, bytes);
    }
    mbarrier_arrive_after_copies(&shared.bias_full[w]);
}

// Runs on one warp: loads the query rows of warpgroup w, and their bias.
template <class C> MOH_DEVICE void gather(const AttentionSm90Params& p, Shared<C>& shared, int w) {
    using T = typename C::Element;
    constexpr int kChunks = C::kHead / 8;
    const int lane = threadIdx.x % 32, group = p.num_heads / p.kv_num_heads;
    Position<kTileQueue> tile_at;
    Position<C::kQuerySlots> at;
    Position<1> bias_at;
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
                cp_async_16(query + C::offset(kUnitRows, r, element),
                            static_cast<const T*>(p.query) + int64_t(row) * p.head_dim + element,
                            row >= 0 && element < p.head_dim);
            }
            cp_async_commit();
            cp_async_wait<0>();
            fence_async_proxy();
            mbarrier_arrive(&shared.query_full[w][at.slot]);
            at.advance();
            if constexpr (C::kBias) {
                if (bias_has_keys(p)) {
                    const int last = min(tile.z - unit * kUnitRows, kUnitRows) - 1;
                    const int last_row = __shfl_sync(0xffffffffu, last < 32 ? row[0] : row[1], last % 32);
                    BiasRow rows[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int64_t start = bias_row(p, batch, row[i]);
                        int before = int(start & 7);
                        rows[i] = {reinterpret_cast<uint64_t>(static_cast<const T*>(p.bias) + start - before), 2 * (before + p.kv_len)};
                    }
#pragma unroll 1
                    for (int block = divide_up(visible_keys(p, tile, last_row), C::kKeys) - 1; block >= 0; block--) {
                        mbarrier_wait(&shared.bias_empty[w], bias_at.parity ^ 1);
                        copy_bias(p, shared, w, rows, block * C::kKeys);
                        bias_at.advance();
                    }
                }
            }
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
    Position<1> bias_at;

    // State of this thread's two rows of the unit: lane / 4 and lane / 4 + 8 of the warp's 16.
    float output[C::kHead / 2];
    float maximum[2], sum[2];
    int limit[2]; // number of keys visible to the row
    // The row's bias: a number if it is the same for all keys, else its offset in a chunk of shared memory.
    float bias_number[2];
    int bias_offset[2];

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
        using Main = Operand<Swizzle::B128, 16, 8 * 128>;
        using Tail = Operand<C::kTailSwizzle, 16, 8 * 2 * C::kTail>;
        const uint32_t query = shared_address(shared.query[w][query_at.slot]), key = shared_address(shared.ring[slot]);
#pragma unroll
        for (int k = 0; k < C::kMain; k += 16) {
            uint32_t panel = k / 64 * 128, inside = k % 64 * 2;
            wgmma_ss<T, C::kKeys>(scores, Main(query).at(kUnitRows * panel + inside), Main(key).at(C::kKeys * panel + inside), k > 0);
        }
#pragma unroll
        for (int k = 0; k < C::kTail; k += 16)
            wgmma_ss<T, C::kKeys>(scores, Tail(query).at(2 * (kUnitRows * C::kMain + k)), Tail(key).at(2 * (C::kKeys * C::kMain + k)), 1);
        wgmma_commit();
    }

    // O += P V
    MOH_DEVICE void issue_values(const uint32_t (&weights)[C::kKeys / 4], int slot) {
        const uint32_t address = shared_address(shared.ring[slot]);
        Operand<Swizzle::B128, C::kKeys * 128, 8 * 128> value(address);
        auto& main = reinterpret_cast<float(&)[C::kMain / 2]>(output);
#pragma unroll
        for (int k = 0; k < C::kKeys; k += 16) {
            wgmma_rs<T, C::kMain>(main, weights + k / 4, value.at(k * 128), 1);
            if constexpr (C::kTail > 0) {
                // One panel wide, so the leading offset is not used.
                Operand<C::kTailSwizzle, 16, 8 * 2 * C::kTail> tail(address);
                auto& rest = reinterpret_cast<float(&)[C::kTail / 2]>(output[C::kMain / 2]);
                wgmma_rs<T, C::kTail>(rest, weights + k / 4, tail.at(2 * (C::kKeys * C::kMain + k * C::kTail)), 1);
            }
        }
        wgmma_commit();
    }

    // scores = scores * scale + bias, of the next block that the gather warp copies
    MOH_DEVICE void add_bias(float (&scores)[C::kKeys / 2]) {
        const float scale = p.scale_log2 * kLn2;
        auto add = [&](int i, uint32_t pair) {
            scores[i] = fmaf(scores[i], scale, to_float(T{uint16_t(pair)}));
            scores[i + 1] = fmaf(scores[i + 1], scale, to_float(T{uint16_t(pair >> 16)}));
        };
        if (!bias_has_keys(p)) {
#pragma unroll
            for (int i = 0; i < C::kKeys / 2; i++) scores[i] = fmaf(scores[i], scale, bias_number[i / 2 % 2]);
            return;
        }
        mbarrier_wait(&shared.bias_full[w], bias_at.parity);
        const int row_bytes = bias_has_rows(p) ? Shared<C>::kBiasRowBytes : 0;
        const unsigned char* rows = shared.bias[w][0] + warp * 16 * row_bytes;
        if (bias_is_aligned(p)) {
            // Two matrices of 8 keys for each half of the warp's 16 rows.
            const unsigned char* from = rows + lane % 16 * row_bytes + lane / 16 * 16;
#pragma unroll
            for (int i = 0; i < C::kKeys / 16; i++) {
                uint32_t pairs[4];
                ldmatrix_x4(pairs, from + 32 * i);
#pragma unroll
                for (int m = 0; m < 4; m++) add((2 * i + m / 2) * 4 + m % 2 * 2, pairs[m]);
            }
        } else {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const uint32_t* from = reinterpret_cast<const uint32_t*>(rows + (lane / 4 + 8 * r) * row_bytes) +
                                       bias_offset[r] / 2 + lane % 4;
                const int odd = bias_offset[r] % 2 * 16;
#pragma unroll
                for (int i = 0; i < C::kKeys / 8; i++)
                    add(i * 4 + r * 2, uint32_t((uint64_t(from[4 * i + 1]) << 32 | from[4 * i]) >> odd));
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.bias_empty[w]);
        bias_at.advance();
    }

    // Converts scores to weights, exp2(scores * factor - maximum), and returns the rescaling factor of earlier
    // weights. Each row has two independent chains for maximum and sum, to hide latency.
    template <bool masked> MOH_DEVICE void softmax(float (&scores)[C::kKeys / 2], int first_key, float (&shrink)[2]) {
        const float factor = C::kBias ? kLog2E : p.scale_log2;
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
                         int first_key) {
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
        if constexpr (C::kBias) add_bias(scores);
        softmax<masked>(scores, first_key, shrink);
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
#pragma unroll
        for (int r = 0; r < 2; r++) {
            limit[r] = visible_keys(p, tile, row[r]);
            if constexpr (C::kBias) {
                int64_t start = bias_row(p, batch, row[r]);
                bias_offset[r] = int(start & 7);
                bias_number[r] = p.bias && !bias_has_keys(p) ? to_float(static_cast<const T*>(p.bias)[start]) : 0.0f;
            }
        }
        const int needed = divide_up(visible_keys(p, tile, rows.row[last_row]), C::kKeys), skipped = blocks - needed;
        // Blocks that end at or before this key need no mask, because rows are ascending.
        const int all_see = visible_keys(p, tile, rows.row[0]);

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
            if constexpr (C::kBias) add_bias(scores);
            softmax<true>(scores, first_key, shrink);
            to_weights(scores, weights);
            for (; first_key > all_see; first_key -= C::kKeys)
                step<true>(scores, weights, at, release, first_key - C::kKeys);
            for (; first_key > 0; first_key -= C::kKeys)
                step<false>(scores, weights, at, release, first_key - C::kKeys);
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
        auto chunk = [&](int row, int column) { return staged + C::offset(kUnitRows, row, column); };
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
    expect_shared_memory(sizeof shared);
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
        if constexpr (C::kBias)
            for (int w = 0; w < C::kWarpgroups; w++) {
                mbarrier_init(&shared.bias_full[w], 32);
                mbarrier_init(&shared.bias_empty[w], 4);
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
// Longer blocks for long sequences.
#define MOH_ATTENTION_LONG(head, ...)                                                                                  \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head##_long, f16, head, __VA_ARGS__, false)                                \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head##_long, bf16, head, __VA_ARGS__, false)
MOH_ATTENTION_PLAIN(64, 3, 128, 10, 2)
MOH_ATTENTION_BIAS(64, 2, 128, 9, 2) // with three warpgroups registers would spill
MOH_ATTENTION_PLAIN(80, 2, 128, 9, 2)
MOH_ATTENTION_BIAS(80, 2, 128, 7, 2)
MOH_ATTENTION_PLAIN(96, 2, 128, 7, 2)
MOH_ATTENTION_BIAS(96, 2, 128, 5, 2)
MOH_ATTENTION_PLAIN(128, 2, 128, 5, 2)
MOH_ATTENTION_LONG(128, 2, 160, 4, 2)
MOH_ATTENTION_BIAS(128, 2, 96, 5, 2)
MOH_ATTENTION_PLAIN(256, 2, 64, 5, 1)
