// What the roles of attention_sm90.cu share: an instance's numbers, its shared memory, tiles, and the queue that passes
// them on.
#pragma once

#include "hopper.cuh"
#include "params.h"

namespace {

constexpr int kUnitRows = 64;
constexpr int kTileQueue = 4;
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;
constexpr float kSlack = 8; // a weight is at most 2 to this power

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

// Rows of one list of the plan, which share a KV head, and the keys that they see.
struct alignas(16) Tile {
    int list;      // batch * kv_num_heads + KV head
    int first;     // entry
    int rows;      // 0: there are no more tiles
    int keys;      // that the last row sees
    int first_key; // the position of the first of them
    int before;    // with is_causal, token t sees before + t + 1 keys
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
    Tile tiles[kTileQueue];
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
MOH_DEVICE int visible_keys(const AttentionSm90Params& p, const Tile& tile, int row) {
    return p.is_causal && row >= 0 ? min(tile.keys, max(0, row / p.num_heads % p.q_len + 1 + tile.before)) : tile.keys;
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

// Returns the next tile to a warp.
template <class C> MOH_DEVICE Tile next_tile(Shared<C>& shared, Position<kTileQueue>& at) {
    mbarrier_wait(&shared.tile_full[at.slot], at.parity);
    const Tile tile = shared.tiles[at.slot];
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

} // namespace
