// The emulator's scheduler, shared memory and collective operations. See simt.h.

#include "simt.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

simt::Index threadIdx, blockIdx, blockDim, gridDim;

namespace {

constexpr size_t page = 4096, stack_bytes = 128 * 1024, max_threads = 1024;
constexpr size_t shared_alignment = 1024, shared_limit = 256 * 1024;
constexpr unsigned max_cluster = 2;
constexpr unsigned char poison = 0xff; // NaN in every float, -1 in every integer

struct Copy {
    void* shared;
    const void* global;
    unsigned bytes;
    bool valid;
    void run() const {
        if (valid)
            memcpy(shared, global, bytes);
        else
            memset(shared, 0, bytes);
    }
};

struct Fiber {
    void* stack = nullptr;
#if defined(__x86_64__)
    void* pointer = nullptr; // the stack pointer while suspended
#else
    ucontext_t context;
#endif
    bool done = false;
    const char* waits_for = nullptr;
    const volatile uint32_t* word = nullptr; // suspended while *word == old
    uint32_t old = 0;
    std::vector<std::vector<Copy>> copies; // groups, oldest first; the last is open
};

// Synchronisation state of a warp or a larger group.
struct Group {
    const char* what = nullptr;
    unsigned arrived = 0;
    uint32_t generation = 0;
    void* arguments[max_threads];
};

struct Barrier {
    unsigned arrived = 0, expected = 0;
    uint32_t generation = 0;
};

// A block of the cluster that is running.
struct Block {
    simt::Index index;
    unsigned char* shared_end = nullptr; // followed by an inaccessible page
    unsigned char* shared = nullptr;
    Barrier barriers[16];
    unsigned live = 0;     // threads that have not returned
    bool accessed = false; // a neighbour accessed its shared memory after the last barrier of the cluster
};

struct Machine {
    const simt::Kernel* kernel = nullptr;
    const void* params = nullptr;
    std::vector<Fiber> fibers = std::vector<Fiber>(max_threads); // of all blocks of the cluster, one block after the other
    std::map<unsigned, Group> groups; // by width * 1024 + first fiber
    Block blocks[max_cluster];
    Block* block = nullptr; // the current fiber's
    Barrier cluster_barrier;
    unsigned threads = 0, cluster = 1, current = 0; // per block; blocks per cluster; fiber
    bool running = false;
    void (*hide)(bool) = nullptr; // see simt::launch
    bool waited = false;          // a thread of the cluster waits for the previous kernel
    uint32_t previous_ended = 1;  // 0 while global memory is hidden
    bool reversed = false; // run threads from last to first, and complete copies at once
    size_t shared_bytes = 0;
#if defined(__x86_64__)
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
} machine;

std::mutex one_launch;

Fiber& self() { return machine.fibers[machine.current]; }

void enter(); // entry function of a fiber

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer in *from, and resumes the fiber saved in `to`.
extern "C" void moh_switch(void** from, void* to);
asm(R"(
.text
.globl moh_switch
.hidden moh_switch
.type moh_switch,@function
moh_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size moh_switch,.-moh_switch
)");
void prepare(Fiber& fiber) {
    void** top = reinterpret_cast<void**>(static_cast<char*>(fiber.stack) + stack_bytes);
    *--top = nullptr; // stack alignment as after a call: 8 bytes off a multiple of 16
    *--top = reinterpret_cast<void*>(&enter);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.pointer = top;
}
void resume(Fiber& fiber) { moh_switch(&machine.scheduler, fiber.pointer); }
void suspend(Fiber& fiber) { moh_switch(&fiber.pointer, machine.scheduler); }
#else
void prepare(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack, 0, stack_bytes};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &enter, 0);
}
void resume(Fiber& fiber) { swapcontext(&machine.scheduler, &fiber.context); }
void suspend(Fiber& fiber) { swapcontext(&fiber.context, &machine.scheduler); }
#endif

void enter() {
    machine.kernel->body(machine.params);
    self().done = true;
    suspend(self());
    abort();
}

// A memory fault inside a kernel is an access out of bounds of an allocation or of shared memory.
void fault(int signal, siginfo_t* info, void*) {
    if (machine.running) {
        machine.running = false;
        auto address = static_cast<unsigned char*>(info->si_addr);
        const Block& block = *machine.block;
        if (address >= block.shared_end && address < block.shared_end + page)
            simt::fail("shared memory: access %td bytes beyond size %zu", address - block.shared, machine.shared_bytes);
        if (!machine.previous_ended) simt::fail("access to global memory at %p before waiting for the previous kernel", info->si_addr);
        simt::fail("invalid memory access at %p", info->si_addr);
    }
    std::signal(signal, SIG_DFL);
}

void initialise() {
    static bool done = false;
    if (done) return;
    done = true;
    auto map = [](size_t bytes) {
        void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) simt::fail("the emulator is out of memory");
        return static_cast<unsigned char*>(p);
    };
    unsigned char* stacks = map(max_threads * (stack_bytes + page));
    for (size_t i = 0; i < max_threads; i++) {
        mprotect(stacks + i * (stack_bytes + page), page, PROT_NONE);
        machine.fibers[i].stack = stacks + i * (stack_bytes + page) + page;
    }
    for (Block& block : machine.blocks) {
        unsigned char* shared = map(shared_limit + 2 * page);
        mprotect(shared, page, PROT_NONE);
        block.shared_end = shared + page + shared_limit;
        mprotect(block.shared_end, page, PROT_NONE);
    }
}

// Installs the fault handler during a launch; the host process has its own.
struct FaultHandler {
    struct sigaction old_segv, old_bus;
    stack_t old_stack;
    FaultHandler() {
        static unsigned char memory[64 * 1024];
        stack_t stack{};
        stack.ss_sp = memory;
        stack.ss_size = sizeof memory;
        sigaltstack(&stack, &old_stack);
        struct sigaction action {};
        action.sa_sigaction = fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &old_segv);
        sigaction(SIGBUS, &action, &old_bus);
        machine.running = true;
    }
    ~FaultHandler() {
        machine.running = false;
        sigaction(SIGSEGV, &old_segv, nullptr);
        sigaction(SIGBUS, &old_bus, nullptr);
        sigaltstack(&old_stack, nullptr);
    }
};

[[noreturn]] void deadlock() {
    std::string waits;
    for (unsigned rank = 0; rank < machine.cluster; rank++) {
        if (machine.cluster > 1) waits += "\n  block " + std::to_string(rank) + " of the cluster:";
        const Fiber* fibers = &machine.fibers[rank * machine.threads];
        const char* last = nullptr;
        for (unsigned i = 0, first = 0; i <= machine.threads; i++) {
            const char* what = i == machine.threads ? "" : fibers[i].done ? "(returned)" : fibers[i].waits_for;
            if (last && what != last) {
                waits += "\n  threads " + std::to_string(first) + " to " + std::to_string(i - 1) + ": " + last;
                first = i;
            }
            last = what;
        }
    }
    simt::fail("deadlock, all threads are waiting:%s", waits.c_str());
}

// Runs each thread of a block that does not wait, once; returns whether there was one.
bool run_threads(unsigned rank) {
    Block& block = machine.blocks[rank];
    machine.block = &block;
    blockIdx = block.index;
    bool progress = false;
    for (unsigned n = 0; n < machine.threads; n++) {
        unsigned i = machine.reversed ? machine.threads - 1 - n : n;
        Fiber& fiber = machine.fibers[rank * machine.threads + i];
        if (fiber.done || (fiber.word && *fiber.word == fiber.old)) continue;
        machine.current = rank * machine.threads + i;
        threadIdx = {i, 0, 0};
        fiber.word = nullptr;
        resume(fiber);
        progress = true;
        block.live -= fiber.done;
        if (block.live == 0 && block.accessed)
            simt::fail("the block returned before a barrier of the cluster, after its neighbour's last access to its shared memory");
    }
    return progress;
}

// Runs the blocks of a cluster, of which `first` has the lowest index. A block runs until all of its threads wait, then
// the next one does.
void run_cluster(simt::Index first) {
    for (unsigned i = 0; i < machine.threads * machine.cluster; i++) {
        Fiber& fiber = machine.fibers[i];
        fiber.done = false;
        fiber.word = nullptr;
        fiber.copies.assign(1, {});
        prepare(fiber);
    }
    machine.groups.clear();
    machine.cluster_barrier = Barrier{};
    size_t used = (machine.shared_bytes + shared_alignment - 1) / shared_alignment * shared_alignment;
    for (unsigned rank = 0; rank < machine.cluster; rank++) {
        Block& block = machine.blocks[rank];
        block.index = {first.x + rank, first.y, first.z};
        block.shared = block.shared_end - used;
        block.live = machine.threads;
        block.accessed = false;
        for (Barrier& barrier : block.barriers) barrier = Barrier{};
        memset(block.shared, poison, used);
    }
    auto running = [] {
        unsigned live = 0;
        for (unsigned rank = 0; rank < machine.cluster; rank++) live += machine.blocks[rank].live;
        return live > 0;
    };
    machine.waited = false;
    if (machine.hide) machine.hide(true), machine.previous_ended = 0;
    while (running()) {
        bool progress = false;
        for (unsigned n = 0; n < machine.cluster; n++)
            while (run_threads(machine.reversed ? machine.cluster - 1 - n : n)) progress = true;
        if (!progress && machine.waited && !machine.previous_ended)
            machine.hide(false), machine.previous_ended = 1;
        else if (!progress)
            deadlock();
    }
    if (!machine.previous_ended) simt::fail("the block ended without waiting for the previous kernel");
    for (unsigned rank = 0; rank < machine.cluster; rank++) {
        const Block& block = machine.blocks[rank];
        for (unsigned char* p = block.shared + machine.shared_bytes; p < block.shared_end; p++)
            if (*p != poison) simt::fail("shared memory: byte %td written beyond size %zu", p - block.shared, machine.shared_bytes);
    }
}

simt::Kernel*& kernels() {
    static simt::Kernel* first = nullptr;
    return first;
}

} // namespace

namespace simt {

Kernel::Kernel(const char* name, size_t params_size, unsigned max_threads, unsigned cluster, void (*body)(const void*))
    : name(name), params_size(params_size), max_threads(max_threads), cluster(cluster), body(body), next(kernels()) {
    kernels() = this;
}

const Kernel* find(const char* name) {
    const Kernel* kernel = kernels();
    while (kernel && strcmp(kernel->name, name) != 0) kernel = kernel->next;
    return kernel;
}

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const char* seed = getenv("MOH_SEED");
    fprintf(stderr, "emulator, MOH_SEED=%s: ", seed ? seed : "1");
    if (machine.kernel)
        fprintf(stderr, "%s, block (%u, %u, %u), thread %u: ", machine.kernel->name, blockIdx.x, blockIdx.y, blockIdx.z,
                threadIdx.x);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

void wait(const char* what, const volatile uint32_t* word, uint32_t old) {
    Fiber& fiber = self();
    while (*word == old) {
        fiber.waits_for = what;
        fiber.word = word;
        fiber.old = old;
        suspend(fiber);
    }
}

void collective(const char* what, unsigned width, void* argument, void (*work)(void** arguments)) {
    unsigned thread = machine.current, first = thread / width * width;
    Group& group = machine.groups[width * 1024 + first];
    if (group.arrived == 0) group.what = what;
    if (strcmp(group.what, what) != 0)
        fail("threads %u to %u diverged: one is in %s, this one in %s", first, first + width - 1, group.what, what);
    group.arguments[thread - first] = argument;
    if (++group.arrived == width) {
        work(group.arguments);
        group.arrived = 0;
        group.generation++;
        return;
    }
    wait(what, &group.generation, group.generation);
}

void barrier(const char* what, unsigned id, unsigned threads, bool sync) {
    if (id > 15 || threads % 32 != 0) {
        if (id != 0 || threads != machine.threads) fail("%s(%u, %u): no such barrier", what, id, threads);
    }
    Barrier& barrier = machine.block->barriers[id];
    if (barrier.arrived > 0 && barrier.expected != threads)
        fail("%s: barrier %u of %u and of %u threads", what, id, barrier.expected, threads);
    barrier.expected = threads;
    uint32_t generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.generation++;
    } else if (sync) {
        wait(what, &barrier.generation, generation);
    }
}

unsigned char* shared_memory() { return machine.block->shared; }
size_t shared_size() { return machine.shared_bytes; }

// On hardware, a block's own addresses have its rank in the cluster above the offset, too: what takes an offset has to mask it.
constexpr unsigned rank_bit = 24;

uint32_t shared_address(const void* p) {
    ptrdiff_t offset = static_cast<const unsigned char*>(p) - machine.block->shared;
    if (offset < 0 || size_t(offset) > machine.shared_bytes) fail("%p is not in shared memory", p);
    return uint32_t(offset) + 1024 + (cluster_rank() << rank_bit);
}

void* shared_pointer(uint32_t address, size_t bytes) { return cluster_pointer(address, bytes, cluster_rank()); }

unsigned cluster_rank() { return unsigned(machine.block - machine.blocks); }
unsigned warp_of_cluster() { return machine.current / 32; }

void* cluster_pointer(uint32_t address, size_t bytes, unsigned rank) {
    address &= (1u << rank_bit) - 1;
    size_t offset = size_t(address) - 1024;
    if (address < 1024 || offset + bytes > machine.shared_bytes)
        fail("shared memory: %zu bytes at offset %td of %zu", bytes, ptrdiff_t(address) - 1024, machine.shared_bytes);
    if (rank >= machine.cluster) fail("block %u of a cluster of %u", rank, machine.cluster);
    Block& block = machine.blocks[rank];
    if (&block != machine.block) {
        if (block.live == 0) fail("access to the shared memory of block %u of the cluster, which has returned", rank);
        block.accessed = true;
    }
    return block.shared + offset;
}

void cluster_sync() {
    Barrier& barrier = machine.cluster_barrier;
    uint32_t generation = barrier.generation;
    if (++barrier.arrived == machine.threads * machine.cluster) {
        barrier.arrived = 0;
        barrier.generation++;
        for (Block& block : machine.blocks) block.accessed = false;
    } else {
        wait("cluster_sync", &barrier.generation, generation);
    }
}

void copy_async(void* shared, const void* global, unsigned bytes, bool valid) {
    shared_pointer(shared_address(shared), bytes);
    if (valid && !machine.previous_ended) fail("copy from global memory before waiting for the previous kernel");
    Copy copy{shared, global, bytes, valid};
    if (machine.reversed)
        copy.run();
    else
        self().copies.back().push_back(copy);
}
void copy_commit() { self().copies.emplace_back(); }
void copy_wait(unsigned pending) {
    auto& copies = self().copies;
    while (copies.size() > size_t(pending) + 1) {
        for (const Copy& copy : copies.front()) copy.run();
        copies.erase(copies.begin());
    }
}

namespace {
// The order of `blocks` blocks: reversed, or random.
std::vector<unsigned> order_of(unsigned blocks, Order order) {
    std::vector<unsigned> numbers(blocks);
    for (unsigned i = 0; i < blocks; i++) numbers[i] = order.reversed ? blocks - 1 - i : i;
    if (!order.reversed) std::shuffle(numbers.begin(), numbers.end(), std::mt19937_64(order.seed));
    return numbers;
}
} // namespace

void wait_for_previous_kernel() {
    machine.waited = true;
    if (!machine.previous_ended) wait("wait_for_previous_kernel", &machine.previous_ended, 0);
}

void launch(const Kernel& kernel, Index grid, unsigned threads, size_t shared_bytes, const void* params, Order order, void (*hide)(bool)) {
    std::lock_guard<std::mutex> lock(one_launch);
    initialise();
    machine.kernel = &kernel;
    machine.hide = hide;
    machine.reversed = order.reversed;
    if (threads == 0 || threads > kernel.max_threads) fail("%u threads, at most %u", threads, kernel.max_threads);
    if (shared_bytes > shared_limit) fail("%zu bytes of shared memory", shared_bytes);
    const unsigned cluster = kernel.cluster;
    if (grid.x % cluster != 0 || (cluster > 1 && threads % 128 != 0) || cluster > max_cluster || threads * cluster > max_threads)
        fail("clusters of %u blocks of %u threads in a grid of %u", cluster, threads, grid.x);
    if (const char* log = getenv("MOH_EMULATOR_LOG")) {
        FILE* file = fopen(log, "a");
        if (!file) fail("MOH_EMULATOR_LOG: cannot write %s", log);
        fprintf(file, "%s\t%u\t%zu\n", kernel.name, threads, shared_bytes);
        fclose(file);
    }
    std::vector<unsigned char> copy(static_cast<const unsigned char*>(params),
                                    static_cast<const unsigned char*>(params) + kernel.params_size);
    // A parameter struct may contain 64-byte-aligned descriptors.
    std::vector<unsigned char> aligned(kernel.params_size + 128);
    unsigned char* start = aligned.data() + (128 - uintptr_t(aligned.data()) % 128);
    memcpy(start, copy.data(), copy.size());
    machine.params = start;
    machine.threads = threads;
    machine.cluster = cluster;
    machine.shared_bytes = shared_bytes;
    blockDim = {threads, 1, 1};
    gridDim = grid;
    FaultHandler handler;
    const unsigned row = grid.x / cluster; // clusters in a row of the grid
    for (unsigned i : order_of(row * grid.y * grid.z, order)) run_cluster({i % row * cluster, i / row % grid.y, i / row / grid.y});
    machine.kernel = nullptr;
}

} // namespace simt

// ------------------------------------------------------------------------------------------------------- binary16

uint16_t float_to_half(float x) {
    uint32_t u = __float_as_uint(x), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return 0x7fff;                  // NaN
    if (u >= 0x477ff000) return uint16_t(sign | 0x7c00); // rounds to infinity
    if (u < 0x38800000) {                               // subnormal: units of 2^-24, rounded to even by the FPU
        float units = __uint_as_float(u) * 16777216.0f;
        return uint16_t(sign | uint32_t(nearbyintf(units)));
    }
    u += 0xfff + ((u >> 13) & 1);
    return uint16_t(sign | ((u - 0x38000000) >> 13));
}

float half_to_float(uint16_t bits) {
    static const std::vector<float> table = [] {
        std::vector<float> table(65536);
        for (uint32_t i = 0; i < 65536; i++) {
            uint32_t exponent = (i >> 10) & 31, mantissa = i & 1023;
            float x = exponent == 31  ? (mantissa ? NAN : INFINITY)
                      : exponent == 0 ? ldexpf(float(mantissa), -24)
                                      : ldexpf(float(1024 + mantissa), int(exponent) - 25);
            table[i] = i & 0x8000 ? -x : x;
        }
        return table;
    }();
    return table[bits];
}
