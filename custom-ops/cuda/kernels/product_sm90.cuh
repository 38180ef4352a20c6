// Products of matrices on Hopper, for the linear operators: a block of three warpgroups that takes tile after tile.
//
// Warpgroup 0 fills a ring of stages, each with 64 of the inner length: rows of A by cp.async, because they are gathered or masked, or
// by TMA where they lie side by side; B, the weight, by TMA. Warpgroups 1 and 2 multiply: units of 64 rows go to them in
// turn, two each at most. What a stage belongs to is written beside it, so that the producer alone knows the schedule.
#pragma once

#include "hopper.cuh"
#include "params.h"

namespace {

constexpr int kUnitRows = 64;
constexpr int kProducers = 128; // threads
constexpr int kThreads = 384;
// Multiples of 8; with 168 for each thread at first they are what the block has.
constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

// Tiles of up to 256 rows and `columns` columns. Layout 0: B is [column][k]; 1: [k][column], in panels of 64 columns.
template <class T_, int layout_, int columns_, int stages_> struct Product {
    using T = T_;
    static constexpr int layout = layout_, columns = columns_, stages = stages_;
    static constexpr int rows = 256, depth = 64, row_bytes = 2 * depth;
    static constexpr int panels = (columns + 63) / 64, panel_bytes = 64 * row_bytes;
    static constexpr int a_bytes = rows * row_bytes, b_bytes = layout == 0 ? columns * row_bytes : panels * panel_bytes;
    static constexpr int stage_bytes = a_bytes + b_bytes;
    // Stages whose copies are under way. Consumers hold one stage and wait for the next: the ring has room for both.
    static constexpr int ahead = stages - 2;
    static_assert(b_bytes % 1024 == 0, "swizzle patterns start at multiples of 1024");
};

// What a stage is part of: its tile's head, first row, first column and number of rows, and these flags.
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

// A thread of the producing warpgroup. In every step the thread has a chunk of 8 elements, number `chunk`, of the rows
// 16 i + row; begin() and end() enclose its copies.
template <class P> struct Producer {
    using T = typename P::T;
    static constexpr int own = P::rows / 16;
    Shared<P>& shared;
    const int thread = int(threadIdx.x), lane = thread % 32, row = thread / 8, chunk = thread % 8;
    Position<P::stages> filling, ready;
    int pending = 0;

    MOH_DEVICE explicit Producer(Shared<P>& shared) : shared(shared) {}

    // Waits for room. One thread says what comes, and how many bytes of it by TMA.
    MOH_DEVICE unsigned char* begin(const Message& message, int bytes) {
        mbarrier_wait(&shared.empty[filling.slot], filling.parity ^ 1);
        if (thread == 0) {
            shared.message[filling.slot] = message.packed();
            mbarrier_arrive_expect(&shared.full[filling.slot], uint32_t(bytes));
        }
        return shared.stage[filling.slot];
    }
    MOH_DEVICE uint64_t* barrier() { return &shared.full[filling.slot]; }
    // `copied`: whether there was a copy that is not TMA's.
    MOH_DEVICE void end(bool copied) {
        filling.advance();
        pending++;
        if (!copied && pending == 1) return pass_on();
        cp_async_commit();
        if (pending <= P::ahead) return;
        cp_async_wait<P::ahead>();
        pass_on();
    }
    // Everything under way, before anything else is done for long.
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
    // The oldest stage, whose copies have arrived, to the consumers.
    MOH_DEVICE void pass_on() {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&shared.full[ready.slot]);
        ready.advance();
        pending--;
    }

    // Copies the chunk of row 16 i + row from `x` + `stride` bytes * number(i), or zeros where that is negative, for rows below `count`.
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

// A warpgroup that multiplies: w = 0 or 1. Its unit u is unit w + 2 u of the tile; a thread holds of that unit the rows
// 16 warp + lane / 4 and 8 more, columns 8 j + 2 (lane % 4) and one more: sums[u][4 j + 2 (second row) + (second column)].
template <class P> struct Consumer {
    using T = typename P::T;
    Shared<P>& shared;
    const int w, warp, lane;
    Position<P::stages> at;
    float sums[2][P::columns / 2];

    MOH_DEVICE Consumer(Shared<P>& shared, int w) : shared(shared), w(w), warp(int(threadIdx.x) / 32 % 4), lane(int(threadIdx.x) % 32) {}

    // The next tile, whose stages multiply() takes.
    MOH_DEVICE Message next() {
        mbarrier_wait(&shared.full[at.slot], at.parity);
        return Message(shared.message[at.slot]);
    }
    MOH_DEVICE int units(const Message& tile) const { return ((tile.rows + kUnitRows - 1) / kUnitRows + 1 - w) / 2; }
    // The row of the tile that the thread holds.
    MOH_DEVICE int row(int unit, int second) const { return (w + 2 * unit) * kUnitRows + 16 * warp + lane / 4 + 8 * second; }

    MOH_DEVICE void multiply(const Message& tile) {
        const int own = units(tile);
        if (own == 2)
            multiply_units<2>();
        else if (own == 1)
            multiply_units<1>();
        else
            multiply_units<0>();
    }

    template <int own> MOH_DEVICE void multiply_units() {
#pragma unroll
        for (int u = 0; u < own; u++)
#pragma unroll
            for (int i = 0; i < P::columns / 2; i++) sums[u][i] = 0.0f;
        int before = -1, flags;
        do {
            mbarrier_wait(&shared.full[at.slot], at.parity);
            flags = shared.message[at.slot].w >> 16;
            // A tile has either products in all stages, or one stage and none.
            if (own > 0 && (flags & Message::product)) issue<own>(at.slot);
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

    // This warp is done with the stage; its lanes are together, as after a wait for wgmma.
    MOH_DEVICE void release(int slot) const {
        if (slot >= 0 && lane == 0) mbarrier_arrive(&shared.empty[slot]);
    }
};

// From the 4 words of lane q, of blocks 0 to 3, to the 4 words of block q, of lanes 0 to 3 of each 4.
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

// Stores a row of fragments: word(j) is the thread's two of columns 8 j to 8 j + 7, for j below `blocks`. at(j) is where those 8 go,
// aligned to 16, or null. Where !is_on(j / 4), which each thread is asked for its own j, they are zeros; not those beyond a multiple of 32.
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

// Runs produce(Producer) in the first warpgroup, consume(Consumer) in the others.
template <class P, class Produce, class Consume> MOH_DEVICE void run_roles(Shared<P>& shared, Produce produce, Consume consume) {
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < P::stages; i++) {
            mbarrier_init(&shared.full[i], 1 + kProducers / 32); // what comes by TMA, and a warp's copies each
            mbarrier_init(&shared.empty[i], 8);                  // a warp of the consumers each
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < 4) {
        registers_decrease<kProducerRegisters>();
        Producer<P> producer(shared);
        produce(producer);
        producer.stop();
    } else {
        registers_increase<kConsumerRegisters>();
        Consumer<P> consumer(shared, warp / 4 - 1);
        for (Message tile = consumer.next(); !(tile.flags & Message::stop); tile = consumer.next()) {
            consume(consumer, tile);
        }
    }
}

} // namespace
