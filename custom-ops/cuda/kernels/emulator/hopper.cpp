// mbarrier, TMA and wgmma on a CPU, computed from the contents of shared memory and the bits of the descriptors.
// Sources of the layouts are in hopper.cuh; only the descriptor type is shared with the kernels.

#include "../hopper.cuh"

#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

namespace simt {
namespace {

// ---------------------------------------------------------------------------------------------------------- mbarrier

// Fits the 8 bytes of a hardware barrier, whose layout is opaque.
struct Barrier {
    uint32_t phase;
    uint8_t arrivals, pending;
    int16_t units; // outstanding bytes / 16
};
constexpr uint8_t poisoned = 0xff;

// The barrier at this address in the shared memory of the cluster's block `rank`.
Barrier& barrier_of(uint64_t* word, unsigned rank, const char* what) {
    auto barrier = static_cast<Barrier*>(cluster_pointer(shared_address(word), 8, rank));
    if (uintptr_t(word) % 8 != 0) fail("%s: barrier not aligned to 8", what);
    if (barrier->arrivals == poisoned || barrier->arrivals == 0) fail("%s: barrier not initialised", what);
    return *barrier;
}
Barrier& barrier_at(uint64_t* word, const char* what) { return barrier_of(word, cluster_rank(), what); }

void complete_if_done(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.units != 0) return;
    barrier.phase++;
    barrier.pending = barrier.arrivals;
}

// -------------------------------------------------------------------------------------------------------------- wgmma

using Bits = std::vector<uint16_t>;

struct Pending {
    Wgmma lane[32];
    Bits a;                      // snapshot of the operands when the product was issued; a only if in shared memory
    std::shared_ptr<const Bits> b; // shared by all four warps
    std::vector<float> before[32]; // the accumulator before the first pending product
    unsigned group;
    int first_row;
};
struct Queue {
    std::deque<Pending> products;
    unsigned open = 0; // index of the group that is not yet committed
};
Queue queues[32]; // by warp of the cluster

struct Matrix {
    uint32_t start, leading, stride, row_bytes, mask;
    bool k_major;

    Matrix(uint64_t descriptor, bool k_major)
        : start(uint32_t(descriptor & 0x3fff) << 4), leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
          stride(uint32_t(descriptor >> 32 & 0x3fff) << 4), k_major(k_major) {
        uint32_t mode = uint32_t(descriptor >> 62), base = uint32_t(descriptor >> 49) & 7;
        if (mode == 0) fail("wgmma: matrices without swizzle are not emulated");
        if (base != 0) fail("wgmma: base offset %u is not emulated", base);
        row_bytes = 256u >> mode;
        mask = (8u >> (mode - 1)) - 1;
    }
    // Element (i, k); i is a row of M or N.
    uint16_t at(int i, int k) const {
        uint32_t address = start;
        if (k_major)
            address += uint32_t(i) / 8 * stride + uint32_t(i) % 8 * row_bytes + uint32_t(k) * 2;
        else
            address += uint32_t(i) * 2 / row_bytes * leading + uint32_t(i) * 2 % row_bytes + uint32_t(k) / 8 * stride +
                       uint32_t(k) % 8 * row_bytes;
        address ^= (address >> 7 & mask) << 4;
        uint16_t bits;
        memcpy(&bits, shared_pointer(address, 2), 2);
        return bits;
    }
};

// 16 rows of A, [row][k]; B, [k][column].
Bits read_a(const Wgmma& op, int first_row) {
    Bits a;
    if (op.product == Product::RegisterA) return a;
    Matrix matrix(op.a_descriptor, true);
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) a.push_back(matrix.at(first_row + i, k));
    return a;
}
Bits read_b(const Wgmma& op) {
    Bits b;
    Matrix matrix(op.b_descriptor, op.product == Product::SharedA);
    for (int k = 0; k < 16; k++)
        for (int j = 0; j < op.n; j++) b.push_back(matrix.at(j, k));
    return b;
}

// Computes the 16 rows of one warp.
void execute(const Pending& p) {
    const Wgmma& op = p.lane[0];
    if (read_a(op, p.first_row) != p.a || (p.first_row == 0 && read_b(op) != *p.b))
        fail("wgmma: an operand changed between the product and the wait for it");
    std::vector<float> b(size_t(op.n) * 16);
    for (size_t i = 0; i < b.size(); i++) b[i] = op.convert((*p.b)[i]);
    float a[16][16];
    if (op.product != Product::RegisterA) {
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) a[i][k] = op.convert(p.a[size_t(i * 16 + k)]);
    } else {
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 8; e++)
                a[lane / 4 + e / 2 % 2 * 8][lane % 4 * 2 + e % 2 + e / 4 * 8] =
                    op.convert(uint16_t(p.lane[lane].a[e / 2] >> (e % 2 * 16)));
    }
    std::vector<float> row(static_cast<size_t>(op.n));
    for (int i = 0; i < 16; i++) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < op.n; j++) row[size_t(j)] += a[i][k] * b[size_t(k * op.n + j)];
        for (int j = 0; j < op.n; j++) {
            int lane = i % 8 * 4 + j % 8 / 2, index = j / 8 * 4 + i / 8 * 2 + j % 2;
            const std::vector<float>& before = p.before[lane];
            float* d = p.lane[lane].d + index;
            float old = op.accumulate ? before.empty() ? *d : before[size_t(index)] : 0.0f;
            *d = old + row[size_t(j)];
        }
    }
}

} // namespace

void mbarrier_init(uint64_t* word, uint32_t arrivals) {
    for (const Queue& queue : queues)
        if (!queue.products.empty()) fail("wgmma: products without a wait");
    if (arrivals == 0 || arrivals >= poisoned) fail("mbarrier_init: %u arrivals", arrivals);
    *static_cast<Barrier*>(shared_pointer(shared_address(word), 8)) = {0, uint8_t(arrivals), uint8_t(arrivals), 0};
}

void mbarrier_arrive(uint64_t* word, uint32_t bytes) {
    Barrier& barrier = barrier_at(word, "mbarrier_arrive");
    if (barrier.pending == 0) fail("mbarrier_arrive: more than %u arrivals in a phase", barrier.arrivals);
    if (bytes % 16 != 0) fail("mbarrier_arrive_expect: %u bytes", bytes);
    barrier.units = int16_t(barrier.units + bytes / 16);
    barrier.pending--;
    complete_if_done(barrier);
}

void mbarrier_arrive_at(uint64_t* word, unsigned rank) {
    Barrier& barrier = barrier_of(word, rank, "mbarrier_arrive_at");
    if (barrier.pending == 0) fail("mbarrier_arrive_at: more than %u arrivals in a phase", barrier.arrivals);
    barrier.pending--;
    complete_if_done(barrier);
}

void mbarrier_wait(uint64_t* word, uint32_t parity) {
    Barrier& barrier = barrier_at(word, "mbarrier_wait");
    for (uint32_t phase = barrier.phase; (phase & 1) == (parity & 1); phase = barrier.phase)
        wait("mbarrier_wait", &barrier.phase, phase);
}

void wgmma(Wgmma argument) {
    const char* what = argument.product == Product::RegisterA ? "wgmma_rs" : "wgmma_ss";
    struct Thread {
        Wgmma wgmma;
        unsigned warp;
    } thread{argument, warp_of_cluster()};
    collective(what, 128, &thread, [](void** threads) {
        const Wgmma& first = static_cast<Thread*>(threads[0])->wgmma;
        const auto b = std::make_shared<const Bits>(read_b(first));
        for (int warp = 0; warp < 4; warp++) {
            Queue& queue = queues[static_cast<Thread*>(threads[32 * warp])->warp];
            Pending p;
            p.group = queue.open;
            p.first_row = 16 * warp;
            p.a = read_a(first, p.first_row);
            p.b = b;
            for (int lane = 0; lane < 32; lane++) {
                const Wgmma& op = p.lane[lane] = static_cast<Thread*>(threads[32 * warp + lane])->wgmma;
                if (op.a_descriptor != first.a_descriptor || op.b_descriptor != first.b_descriptor || op.n != first.n ||
                    op.accumulate != first.accumulate)
                    fail("wgmma: the threads of a warpgroup disagree");
                bool chained = false;
                for (const Pending& other : queue.products) chained |= other.lane[lane].d == op.d;
                if (chained) continue;
                p.before[lane].assign(op.d, op.d + op.n / 2);
                std::fill(op.d, op.d + op.n / 2, NAN);
            }
            queue.products.push_back(std::move(p));
        }
    });
}

void wgmma_commit() {
    collective("wgmma_commit", 32, &queues[warp_of_cluster()], [](void** lanes) { static_cast<Queue*>(lanes[0])->open++; });
}

void wgmma_wait(unsigned pending) {
    struct Wait {
        Queue* queue;
        unsigned pending;
    } argument{&queues[warp_of_cluster()], pending};
    collective("wgmma_wait", 32, &argument, [](void** lanes) {
        auto [queue, pending] = *static_cast<Wait*>(lanes[0]);
        while (!queue->products.empty() && queue->products.front().group + pending < queue->open) {
            execute(queue->products.front());
            queue->products.pop_front();
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------- TMA

namespace {
constexpr uint64_t magic = 0x4d4f48544d415031;
struct Map {
    uint64_t magic;
    unsigned char* address;
    uint64_t sizes[4], strides[3];
    uint32_t boxes[4];
    uint32_t element, swizzle;
};
static_assert(sizeof(Map) <= sizeof(TensorMap), "a descriptor's 128 bytes");
} // namespace

namespace {
void copy_box(const Map& map, uint32_t address, const int (&start)[4], unsigned rank) {
    uint32_t inner = map.boxes[0] * map.element, rows = map.boxes[1] * map.boxes[2] * map.boxes[3], mask = (1u << map.swizzle) - 1;
    for (uint32_t row = 0; row < rows; row++) {
        int64_t at[4] = {start[0], start[1] + int64_t(row % map.boxes[1]), start[2] + int64_t(row / map.boxes[1] % map.boxes[2]),
                         start[3] + int64_t(row / map.boxes[1] / map.boxes[2])};
        bool inside = true;
        const unsigned char* from = map.address;
        for (int d = 1; d < 4; d++) {
            inside &= at[d] >= 0 && at[d] < int64_t(map.sizes[d]);
            from += at[d] * int64_t(map.strides[d - 1]);
        }
        for (uint32_t byte = 0; byte < inner; byte += map.element) {
            int64_t column = at[0] + byte / map.element;
            uint32_t to = address + row * inner + byte;
            void* target = cluster_pointer(to ^ ((to >> 7 & mask) << 4), map.element, rank);
            if (inside && column >= 0 && column < int64_t(map.sizes[0]))
                memcpy(target, from + column * map.element, map.element);
            else
                memset(target, 0, map.element);
        }
    }
}
} // namespace

void tma_load(void* shared, const TensorMap* opaque, uint64_t* word, const int (&start)[4], unsigned mask) {
    Map map;
    memcpy(&map, opaque, sizeof map);
    if (uintptr_t(opaque) % 64 != 0 || map.magic != magic) fail("tma_load: no tensor map");
    if (mask == 0) fail("tma_load: no block to copy to");
    uint32_t bytes = map.boxes[0] * map.element * map.boxes[1] * map.boxes[2] * map.boxes[3], address = shared_address(shared);
    if (address % 1024 != 0) fail("tma_load: shared memory not aligned to 1024");
    for (unsigned rank = 0; mask >> rank != 0; rank++) {
        if (!(mask >> rank & 1)) continue;
        cluster_pointer(address, bytes, rank);
        Barrier& barrier = barrier_of(word, rank, "tma_load");
        copy_box(map, address, start, rank);
        barrier.units = int16_t(barrier.units - bytes / 16);
        complete_if_done(barrier);
    }
}

} // namespace simt

// Returns an error for everything that the driver's documentation of cuTensorMapEncodeTiled forbids. Supports rank 4
// and 16-bit elements.
extern "C" __attribute__((visibility("default"))) int
cuTensorMapEncodeTiled(void* out, unsigned type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* boxes, const uint32_t* element_strides, unsigned interleave, unsigned swizzle,
                       unsigned l2_promotion, unsigned fill) {
    constexpr int invalid = 1;
    constexpr unsigned float16 = 6, bfloat16 = 9;
    simt::Map map{simt::magic, static_cast<unsigned char*>(address), {}, {}, {}, 2, swizzle};
    if (uintptr_t(out) % 64 != 0 || (type != float16 && type != bfloat16) || rank != 4 || uintptr_t(address) % 16 != 0) return invalid;
    if (interleave != 0 || swizzle == 0 || swizzle > 3 || l2_promotion > 3 || fill != 0) return invalid;
    for (int d = 0; d < 4; d++) {
        if (sizes[d] == 0 || sizes[d] > uint64_t(1) << 32 || boxes[d] == 0 || boxes[d] > 256 || element_strides[d] != 1) return invalid;
        map.sizes[d] = sizes[d];
        map.boxes[d] = boxes[d];
    }
    for (int d = 0; d < 3; d++) {
        if (strides[d] % 16 != 0 || strides[d] >= uint64_t(1) << 40) return invalid;
        if (strides[d] < (d == 0 ? 2 * sizes[0] : strides[d - 1])) return invalid; // we order strides ascending
        map.strides[d] = strides[d];
    }
    if (boxes[0] * 2 % 16 != 0 || boxes[0] * 2 > 16u << swizzle) return invalid;
    memset(out, 0, sizeof(TensorMap));
    memcpy(out, &map, sizeof map);
    return 0;
}
