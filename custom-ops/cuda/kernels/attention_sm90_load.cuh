// Loading for attention_sm90.cu: the producer warp, which finds tiles and loads keys and values, and the gather warps, which
// load the selected queries and their bias.
#pragma once

#include "attention_sm90.cuh"
#include "key_range.cuh"
#include "tiles.cuh"
#include "zeros.cuh"

namespace {

// Finds tile `index` and passes it to the other warps. Returns its place in the queue, where it stays for the next kTileQueue - 1
// calls.
template <class C>
MOH_DEVICE int fetch_tile(const AttentionSm90Params& p, Shared<C>& shared, TileSearch& search, Position<kTileQueue>& at, int index) {
    // What depends on the lane is computed again for each tile: this warp has few registers.
    const int4 found = find_tile(p.tiles, search, index, opaque(int(threadIdx.x)) % 32);
    const KeyRange range(p, found.x / p.kv_num_heads);
    Tile tile{found.x, found.y, found.z, found.w, range.first, range.before};
    if (p.first != nullptr && tile.rows > 0) {
        // The plan does not know the keys of a cache.
        const int group = p.num_heads / p.kv_num_heads;
        tile.keys = range.sees(p.tiles.entries[int64_t(tile.list) * p.q_len * group + tile.first + tile.rows - 1] / group);
    }
    if (threadIdx.x % 32 == 0) {
        mbarrier_wait(&shared.tile_empty[at.slot], at.parity ^ 1);
        shared.tiles[at.slot] = tile;
        mbarrier_arrive(&shared.tile_full[at.slot]);
    }
    __syncwarp();
    const int slot = at.slot;
    at.advance();
    return slot;
}

// Loads a block of keys or values by TMA. All lanes call.
template <class C>
MOH_DEVICE void load_block(const AttentionSm90Params& p, const TensorMap* map, const TensorMap* tail_map, Shared<C>& shared,
                           Position<C::kSlots>& at, const Tile& tile, int block) {
    uint64_t* full = &shared.slot_full[at.slot];
    int token = tile.first_key + block * C::kKeys, batch = tile.list / p.kv_num_heads, head = tile.list % p.kv_num_heads;
    int inner = p.cache_layout ? token : head, outer = p.cache_layout ? head : token;
    if (threadIdx.x % 32 == 0) {
        mbarrier_wait(&shared.slot_empty[at.slot], at.parity ^ 1);
        mbarrier_arrive_expect(full, C::kSlotBytes);
#pragma unroll
        for (int column = 0; column < C::kMain; column += 64)
            tma_load(shared.ring[at.slot] + 2 * C::kKeys * column, map, full, column, inner, outer, batch);
        if (C::kTail > 0) tma_load(shared.ring[at.slot] + 2 * C::kKeys * C::kMain, tail_map, full, C::kMain, inner, outer, batch);
    }
    at.advance();
}

// Loads the values of a tile's last block from a cache, if it is not full. What follows the tile's last key there is not the sequence's, and may
// be NaN, which is not masked by a weight of 0. Hence zeros take its place, and TMA, which knows only the end of the cache,
// is not used. All lanes call.
template <class C>
MOH_DEVICE void load_last_values(const AttentionSm90Params& p, Shared<C>& shared, Position<C::kSlots>& at, const Tile& tile) {
    using T = typename C::Element;
    constexpr int kChunks = C::kHead / 8;
    const int lane = threadIdx.x % 32, keys = tile.keys % C::kKeys, first = tile.first_key + tile.keys - keys;
    const T* value = static_cast<const T*>(p.value) + (int64_t(tile.list) * p.kv_len + first) * p.value_dim;
    mbarrier_wait(&shared.slot_empty[at.slot], at.parity ^ 1);
    unsigned char* slot = shared.ring[at.slot];
#pragma unroll 1
    for (int i = lane; i < C::kKeys * kChunks; i += 32) {
        const int key = i / kChunks, element = i % kChunks * 8;
        const bool exists = key < keys && element < p.value_dim;
        cp_async_16(slot + C::offset(C::kKeys, key, element), value + (exists ? int64_t(key) * p.value_dim + element : 0), exists);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&shared.slot_full[at.slot]);
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
    int slot = fetch_tile(p, shared, search, tile_at, int(blockIdx.x));
    for (;;) {
        const Tile& tile = shared.tiles[slot];
        if (tile.rows == 0) break;
        const int blocks = divide_up(tile.keys, C::kKeys);
        int next = slot;
        for (int i = 0; i <= blocks; i++) {
            if (i < blocks) load_block(p, &p.key_map, &p.key_tail_map, shared, slot_at, tile, blocks - 1 - i);
            // Early enough for the gather warps to work ahead, late enough not to delay this tile.
            if (i == 0) next = fetch_tile(p, shared, search, tile_at, take_number(p.tiles));
            if (i == 1 && p.first != nullptr && tile.keys % C::kKeys != 0)
                load_last_values(p, shared, slot_at, tile);
            else if (i > 0)
                load_block(p, &p.value_map, &p.value_tail_map, shared, slot_at, tile, blocks - i);
        }
        slot = next;
    }
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
        const Tile tile = next_tile(shared, tile_at);
        if (tile.rows == 0) break;
        int units = divide_up(tile.rows, kUnitRows);
        int batch = tile.list / p.kv_num_heads, first_head = tile.list % p.kv_num_heads * group;
        const int32_t* entries = p.tiles.entries + int64_t(tile.list) * p.q_len * group + tile.first;
        for (int unit = first_unit<C>(p, w, before); unit < units; unit += C::kWarpgroups) {
            // Reads that need no free query slot.
            int row[kUnitRows / 32];
#pragma unroll
            for (int i = 0; i < kUnitRows / 32; i++) {
                int r = unit * kUnitRows + i * 32 + lane;
                int entry = r < tile.rows ? entries[r] : 0;
                row[i] = r < tile.rows ? (batch * p.q_len + entry / group) * p.num_heads + first_head + entry % group : -1;
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
                    const int last = min(tile.rows - unit * kUnitRows, kUnitRows) - 1;
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

} // namespace
