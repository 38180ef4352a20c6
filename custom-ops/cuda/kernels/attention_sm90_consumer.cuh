// The consumer warpgroups of attention_sm90.cu: products, softmax, and storing of the results.
#pragma once

#include "attention_sm90.cuh"

namespace {

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

    // Converts scores to weights, exp2(scores * factor - maximum), and finds the rescaling factor of earlier weights. The maximum
    // stays, and nothing has to be rescaled, while it is exceeded by less than kSlack in all rows of the warp: weights are then
    // larger than 1, which f16 and the sums have room for. Returns whether earlier weights have to be rescaled, the same in
    // all lanes. Each row has independent chains for maximum and sum, to hide latency.
    template <bool masked> MOH_DEVICE bool softmax(float (&scores)[C::kKeys / 2], int first_key, float (&shrink)[2]) {
        const float factor = C::kBias ? kLog2E : p.scale_log2;
        // With a bias the product of a large score and `factor` would be infinite, or be off by more than the range of weights.
        auto exponent = [&](float score, float offset) {
            return C::kBias ? (score - offset) * factor : fmaf(score, factor, -offset);
        };
        if (masked) {
#pragma unroll
            for (int i = 0; i < C::kKeys / 2; i++)
                if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] - first_key - lane % 4 * 2) scores[i] = -kInfinity;
        }
        float top[8]; // by row, like scores[i % 8]
#pragma unroll
        for (int i = 0; i < 8; i++) top[i] = fmaxf(maximum[i / 2 % 2], scores[i]);
#pragma unroll
        for (int i = 8; i < C::kKeys / 2; i++) top[i % 8] = fmaxf(top[i % 8], scores[i]);
        float highest[2], offset[2], total[4] = {};
        bool grows = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float row = fmaxf(fmaxf(top[2 * r], top[2 * r + 1]), fmaxf(top[2 * r + 4], top[2 * r + 5]));
            row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 1));
            row = fmaxf(row, __shfl_xor_sync(0xffffffffu, row, 2));
            grows |= C::kBias ? row > maximum[r] + kSlack * kLn2 : row * factor > fmaf(maximum[r], factor, kSlack);
            highest[r] = row;
        }
        grows = __any_sync(0xffffffffu, grows);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float row = grows ? highest[r] : maximum[r];
            // While all keys are masked the maximum is -inf, and -inf - -inf would be NaN.
            offset[r] = row == -kInfinity ? 0.0f : C::kBias ? row : row * factor;
            // Exactly 1 while the maximum stays: computed, it would be off by the rounding of `offset`, in every step.
            shrink[r] = grows ? exp2_approx(exponent(maximum[r], offset[r])) : 1.0f;
            maximum[r] = row;
        }
#pragma unroll
        for (int i = 0; i < C::kKeys / 2; i++) {
            scores[i] = exp2_approx(exponent(scores[i], offset[i / 2 % 2]));
            total[i % 4] += scores[i];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] = fmaf(sum[r], shrink[r], total[2 * r] + total[2 * r + 1]);
        return grows;
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
        const bool grows = softmax<masked>(scores, first_key, shrink);
        // The softmax precedes the wait, the conversion follows it: the product is still reading the weights'
        // registers.
        order_after(sum[0] + sum[1]);
        wgmma_wait<0>();
        keep(output);
        keep(scores);
        leave_slot(at, release);
        if (grows) {
#pragma unroll
            for (int i = 0; i < C::kHead / 2; i++) output[i] *= shrink[i / 2 % 2];
        }
        to_weights(scores, weights);
    }

    // Attention of 64 rows to the tile's blocks, whose slots start at `at`. The last pass over a tile releases the
    // slots (`release`).
    MOH_DEVICE void unit(const Tile& tile, int unit, Position<C::kSlots> at, bool release) {
        const int blocks = divide_up(tile.keys, C::kKeys), batch = tile.list / p.kv_num_heads;
        const int last_row = min(tile.rows - unit * kUnitRows, kUnitRows) - 1;
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
            const Tile tile = next_tile(shared, tile_at);
            if (tile.rows == 0) return;
            int units = divide_up(tile.rows, kUnitRows), blocks = divide_up(tile.keys, C::kKeys);
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

} // namespace
