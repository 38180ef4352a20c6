// Matrix products on Hopper for the linear operators: a persistent block of three warpgroups.
//
// Warpgroup 0 fills a ring of stages with 64 inner elements each: rows of A by cp.async if they are gathered or
// masked, by TMA if they are contiguous; B, the weight, by TMA. Warpgroups 1 and 2 multiply: units of 64 rows are
// assigned round-robin, at most two each. A message beside each stage says which tile it belongs to, so that only the
// producer needs to know the schedule.
//
// In a cluster of two blocks, a producer may load a part of a stage for both blocks by TMA multicast. The blocks fill
// and free their stages in the same order, but have rings, messages and barriers of their own. For each stage:
//
//     block 0 ----------------------------------------------------- block 1 (the same, mirrored)
//     producers: wait for empty[s] <------------------------------- (releases of block 1's consumers)
//       thread 0: message[s]; announces all bytes at full[s]
//                 own part of B (or A) ---- TMA multicast --------> stage[s], counted by block 1's full[s]
//       cp.async or TMA of the rest; arrive at full[s]
//     consumers: wait for full[s]; wgmma of stage[s]
//       each warp, when its wgmma have read the stage:
//                 arrive at empty[s] ------ remote arrival -------> empty[s]
//
// full[s] completes a phase with the producers' 5 arrivals and all bytes, whichever block's TMA writes them. empty[s]
// completes with the arrivals of the 8 consumer warps of each block, because either block's TMA overwrites both stages.
#pragma once

#include "hopper.cuh"
#include "params.h"

namespace {

constexpr int kUnitRows = 64;
constexpr int kProducers = 128; // threads
constexpr int kThreads = 384;
// Multiples of 8. Their sum over all threads equals the initial 168 per thread.
constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

// Tiles of up to 256 rows and `columns` columns. Layout 0: B is [column][k]; 1: [k][column], in panels of 64 columns.
// cluster: blocks per cluster, 1 or 2.
template <class T_, int layout_, int columns_, int stages_, int cluster_ = 1> struct Product {
    using T = T_;
    static constexpr int layout = layout_, columns = columns_, stages = stages_, cluster = cluster_;
    static constexpr int rows = 256, depth = 64, row_bytes = 2 * depth;
    static constexpr int panels = (columns + 63) / 64, panel_bytes = 64 * row_bytes;
    static constexpr int a_bytes = rows * row_bytes, b_bytes = layout == 0 ? columns * row_bytes : panels * panel_bytes;
    static constexpr int stage_bytes = a_bytes + b_bytes;
    // Boxes by which B is loaded: one, one per block that may load a part of it, or one per panel.
    static constexpr int boxes = layout == 0 ? cluster : panels, box_bytes = b_bytes / boxes;
    static_assert(cluster == 1 || boxes == cluster, "each block of a cluster loads one box of a shared B");
    // Stages with copies in flight. Consumers hold one stage and wait for the next, so the ring has two more.
    static constexpr int ahead = stages - 2;
    static_assert(b_bytes % 1024 == 0, "swizzle patterns start at multiples of 1024");
};

// The tile of a stage: head, first row, first column, number of rows, and these flags.
struct Message {
    enum { product = 1, last = 2, stop = 4 };
    int head, row, column, rows, flags;
    MOH_DEVICE int4 packed() const { return make_int4(head, row, column, rows | flags << 16); }
    MOH_DEVICE explicit Message(int4 m) : head(m.x), row(m.y), column(m.z), rows(m.w & 0xffff), flags(m.w >> 16) {}
    MOH_DEVICE Message(int head, int row, int column, int rows) : head(head), row(row), column(column), rows(rows), flags(0) {}
};

template <class P> struct Shared {
    unsigned char stage[P::stages][P::stage_bytes];
    int4 message[P::stages];
    uint64_t full[P::stages], empty[P::stages];
};

// A thread of the producer warpgroup. In every step it copies the chunk of 8 elements with index `chunk` of the rows
// 16 i + row; begin() and end() enclose its copies.
template <class P> struct Producer {
    using T = typename P::T;
    static constexpr int own = P::rows / 16;
    Shared<P>& shared;
    const int thread = int(threadIdx.x), lane = thread % 32, row = thread / 8, chunk = thread % 8;
    Position<P::stages> filling, ready;
    int pending = 0;

    MOH_DEVICE explicit Producer(Shared<P>& shared) : shared(shared) {}

    // Waits for a free stage, in all blocks of the cluster. One thread publishes the message and the number of bytes that
    // TMA will copy to this block.
    MOH_DEVICE unsigned char* begin(const Message& message, int bytes) {
        mbarrier_wait(&shared.empty[filling.slot], filling.parity ^ 1);
        if (thread == 0) {
            shared.message[filling.slot] = message.packed();
            mbarrier_arrive_expect(&shared.full[filling.slot], uint32_t(bytes));
        }
        return shared.stage[filling.slot];
    }
    MOH_DEVICE uint64_t* barrier() { return &shared.full[filling.slot]; }
    // `copied`: whether this step had copies by cp.async.
    MOH_DEVICE void end(bool copied) {
        filling.advance();
        pending++;
        if (!copied && pending == 1) return pass_on();
        cp_async_commit();
        if (pending <= P::ahead) return;
        cp_async_wait<P::ahead>();
        pass_on();
    }
    // Completes all copies in flight; called before longer work.
    MOH_DEVICE void flush() {
        cp_async_wait<0>();
        while (pending > 0) pass_on();
    }
    MOH_DEVICE void stop() {
        Message message(0, 0, 0, 0);
        message.flags = Message::stop;
        begin(message, 0);
        end(false);
        flush();
    }
    // Waits until all blocks of the cluster have released every stage but the last one, which nobody releases: after that,
    // no arrival is on its way to this block.
    MOH_DEVICE void drain() {
#pragma unroll 1
        for (int i = 1; i < P::stages; i++) {
            mbarrier_wait(&shared.empty[filling.slot], filling.parity ^ 1);
            filling.advance();
        }
    }
    // Passes the oldest stage, whose copies have arrived, to the consumers.
    MOH_DEVICE void pass_on() {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.full[ready.slot]);
        ready.advance();
        pending--;
    }

    // Copies the chunk of row 16 i + row from `x` + `stride` * number(i) bytes, for rows below `count`; zeros if
    // number(i) is negative.
    template <class Number> MOH_DEVICE void copy_rows(unsigned char* a, const unsigned char* x, uint32_t stride, int count, Number number) {
        unsigned char* to = a + row * P::row_bytes + ((chunk ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; i < own; i++) {
            if (16 * i >= count) break;
            const int from = number(i);
            cp_async_16(to + 16 * i * P::row_bytes, x + uint64_t(stride) * uint32_t(max(from, 0)), from >= 0);
        }
    }
};

// A consumer warpgroup, w = 0 or 1. Its unit u is unit w + 2 u of the tile. Of that unit a thread has rows 16 warp +
// lane / 4 and 8 more, columns 8 j + 2 (lane % 4) and one more: sums[u][4 j + 2 (second row) + (second column)].
template <class P> struct Consumer {
    using T = typename P::T;
    Shared<P>& shared;
    const int w, warp, lane;
    Position<P::stages> at;
    float sums[2][P::columns / 2];

    MOH_DEVICE Consumer(Shared<P>& shared, int w) : shared(shared), w(w), warp(int(threadIdx.x) / 32 % 4), lane(int(threadIdx.x) % 32) {}

    // Reads the next tile's message; multiply() then consumes its stages.
    MOH_DEVICE Message next() {
        mbarrier_wait(&shared.full[at.slot], at.parity);
        return Message(shared.message[at.slot]);
    }
    MOH_DEVICE int units(const Message& tile) const { return ((tile.rows + kUnitRows - 1) / kUnitRows + 1 - w) / 2; }
    // This thread's row of the tile.
    MOH_DEVICE int row(int unit, int second) const { return (w + 2 * unit) * kUnitRows + 16 * warp + lane / 4 + 8 * second; }

    MOH_DEVICE void multiply(const Message& tile) {
        multiply(tile, [] {});
    }
    // Also calls load(), if the warpgroup has units, while the products of the first stage are computed.
    template <class Load> MOH_DEVICE void multiply(const Message& tile, Load load) {
        const int own = units(tile);
        if (own == 2)
            multiply_units<2>(load);
        else if (own == 1)
            multiply_units<1>(load);
        else
            multiply_units<0>(load);
    }

    template <int own, class Load> MOH_DEVICE void multiply_units(Load load) {
#pragma unroll
        for (int u = 0; u < own; u++)
#pragma unroll
            for (int i = 0; i < P::columns / 2; i++) sums[u][i] = 0.0f;
        int before = -1, flags;
        do {
            flags = multiply_stage<own>();
            if (own > 0 && before < 0) load();
            wgmma_wait<1>();
            release(before);
            before = at.slot;
            at.advance();
        } while (!(flags & Message::last));
        wgmma_wait<0>();
#pragma unroll
        for (int u = 0; u < own; u++) keep(sums[u]);
        release(before);
    }

    // Waits for the next stage and issues its products. Returns its flags.
    template <int own> MOH_DEVICE int multiply_stage() {
        mbarrier_wait(&shared.full[at.slot], at.parity);
        const int flags = shared.message[at.slot].w >> 16;
        // A tile has products in all of its stages, or one stage without a product.
        if (own > 0 && (flags & Message::product)) issue<own>(at.slot);
        return flags;
    }

    template <int own> MOH_DEVICE void issue(int slot) {
        const uint32_t a_address = shared_address(shared.stage[slot]) + uint32_t(w * kUnitRows * P::row_bytes);
        const uint32_t b_address = shared_address(shared.stage[slot]) + P::a_bytes;
        Operand<Swizzle::B128, 16, 8 * P::row_bytes> a(a_address), b_rows(b_address);
        Operand<Swizzle::B128, P::panel_bytes, 8 * P::row_bytes> b_panels(b_address);
#pragma unroll
        for (int u = 0; u < own; u++) keep(sums[u]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < P::depth; k += 16)
#pragma unroll
            for (int u = 0; u < own; u++) {
                const uint64_t rows = a.at(uint32_t(2 * u * kUnitRows * P::row_bytes + 2 * k));
                if (P::layout == 0)
                    wgmma_ss<T, P::columns>(sums[u], rows, b_rows.at(uint32_t(2 * k)), 1);
                else
                    wgmma_ss_mn<T, P::columns>(sums[u], rows, b_panels.at(uint32_t(k * P::row_bytes)), 1);
            }
        wgmma_commit();
    }

    // Releases the stage for this warp, to all blocks of the cluster. Its lanes are converged, as after a wait for wgmma.
    MOH_DEVICE void release(int slot) const {
        if (slot < 0 || lane >= P::cluster) return;
        if constexpr (P::cluster == 1)
            mbarrier_arrive(&shared.empty[slot]);
        else
            mbarrier_arrive_at(&shared.empty[slot], uint32_t(lane));
    }
};

// Elements `index` (even) and one more of an aligned array of 16-bit elements, and one of the two (e = 0 or 1).
MOH_DEVICE uint32_t load_two(const void* elements, int64_t index) {
    return *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(elements) + index);
}
template <class T> MOH_DEVICE float element(uint32_t two, int e) { return to_float(T{uint16_t(two >> (16 * e))}); }

// Transposes within each 4 lanes: lane q has one word of blocks 0 to 3, and gets the 4 words of block q.
MOH_DEVICE void transpose(uint32_t (&v)[4]) {
    const int q = int(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, q & 1 ? v[i] : v[i + 1], 1);
        v[i] = q & 1 ? other : v[i];
        v[i + 1] = q & 1 ? v[i + 1] : other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, q & 2 ? v[i] : v[i + 2], 2);
        v[i] = q & 2 ? other : v[i];
        v[i + 2] = q & 2 ? v[i + 2] : other;
    }
}

// Stores a row of fragments. word(j), j < `blocks`, has the thread's two elements of columns 8 j to 8 j + 7; at(j) is
// the 16-byte-aligned address of these 8 columns, or null. If !is_on(j / 4), evaluated by each thread for its own j,
// zeros are stored instead; not for blocks after the last multiple of 4.
template <int blocks, class Word, class At, class IsOn> MOH_DEVICE void store_row(Word word, At at, IsOn is_on) {
    const int q = int(threadIdx.x) % 4;
#pragma unroll
    for (int first = 0; first + 4 <= blocks; first += 4) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = word(first + i);
        transpose(v);
        const int block = first + q;
        if (void* to = at(block)) *static_cast<uint4*>(to) = is_on(first / 4) ? make_uint4(v[0], v[1], v[2], v[3]) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int block = blocks / 4 * 4; block < blocks; block++) {
        uint32_t v = word(block);
        if (void* to = at(block)) static_cast<uint32_t*>(to)[q] = v;
    }
}

// Loads a box of a step by TMA; to all blocks of the cluster if `multicast`.
template <class P> MOH_DEVICE void load_box(bool multicast, void* to, const TensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
    if (P::cluster > 1 && multicast)
        tma_load_multicast(to, map, barrier, (1 << P::cluster) - 1, c0, c1, c2, 0);
    else
        tma_load(to, map, barrier, c0, c1, c2, 0);
}

// Prepares what run_roles() needs in shared memory, while the previous kernel may still be running. All threads of the
// cluster call.
template <class P> MOH_DEVICE void start_barriers(Shared<P>& shared) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < P::stages; i++) {
            mbarrier_init(&shared.full[i], 1 + kProducers / 32); // TMA, and the copies of each producer warp
            mbarrier_init(&shared.empty[i], 8 * P::cluster);     // each consumer warp of the cluster
        }
        mbarrier_init_fence();
    }
    if constexpr (P::cluster == 1)
        __syncthreads();
    else
        cluster_sync();
}

// Runs produce(Producer) in the first warpgroup, consume(Consumer) in the others.
template <class P, class Produce, class Consume> MOH_DEVICE void run_roles(Shared<P>& shared, Produce produce, Consume consume) {
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    if (warp < 4) {
        registers_decrease<kProducerRegisters>();
        Producer<P> producer(shared);
        produce(producer);
        producer.stop();
        if constexpr (P::cluster > 1) producer.drain();
    } else {
        registers_increase<kConsumerRegisters>();
        Consumer<P> consumer(shared, warp / 4 - 1);
        for (Message tile = consumer.next(); !(tile.flags & Message::stop); tile = consumer.next()) {
            consume(consumer, tile);
        }
    }
    if constexpr (P::cluster > 1) cluster_sync(); // no block ends while its neighbour may access its shared memory
}

} // namespace
