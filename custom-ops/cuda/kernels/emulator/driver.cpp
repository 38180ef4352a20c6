// A replacement for libcuda.so: the driver functions that the launchers use, on host memory and the emulator.
//
// An allocation (rounded up to 16 bytes) ends at an inaccessible page and is filled with NaN. While a thread captures
// a stream, launches are recorded; waiting, allocating, copying and loading are errors, as in a real capture.

#include "simt.h"

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
constexpr size_t page = 4096;

struct Allocation {
    void* base;
    size_t bytes;
};
std::map<uintptr_t, Allocation> allocations;
std::mutex lock;
int context, module, stream;

struct Graph {
    std::vector<std::function<void()>> nodes;
    bool valid = true;
};
thread_local Graph* capture = nullptr;

int forbidden() {
    capture->valid = false;
    return CAPTURE_UNSUPPORTED;
}

// Runs the node, or records it during a capture.
template <class Node> int enqueue(Node node) {
    if (capture)
        capture->nodes.push_back(node);
    else
        node();
    return SUCCESS;
}
} // namespace

// Returns an error during a capture.
#define WAITS                                                                                                          \
    if (capture) return forbidden()

typedef uintptr_t Pointer;

EXPORT int cuInit(unsigned) { return SUCCESS; }
EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
EXPORT int cuDeviceGet(int* device, int ordinal) { return ordinal ? INVALID_VALUE : (*device = 0, SUCCESS); }
EXPORT int cuDeviceGetName(char* name, int length, int) {
    strncpy(name, "SIMT emulator", size_t(length));
    return SUCCESS;
}
// Values of CUdevice_attribute, as of a small Hopper GPU.
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 1: *value = 1024; return SUCCESS;                           // MAX_THREADS_PER_BLOCK
    case 10: *value = 32; return SUCCESS;                            // WARP_SIZE
    case 16: *value = 4; return SUCCESS;                             // MULTIPROCESSOR_COUNT
    case 38: *value = 1 << 20; return SUCCESS;                       // L2_CACHE_SIZE
    case 75: *value = 9; return SUCCESS;                              // COMPUTE_CAPABILITY_MAJOR
    case 76: *value = 0; return SUCCESS;                              // COMPUTE_CAPABILITY_MINOR
    case 81: *value = 228 << 10; return SUCCESS;                      // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 97: *value = 227 << 10; return SUCCESS;                      // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    default: *value = 0; return SUCCESS;
    }
}
EXPORT int cuDevicePrimaryCtxRetain(void** c, int) { return *c = &context, SUCCESS; }
EXPORT int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
EXPORT int cuCtxGetCurrent(void** c) { return *c = &context, SUCCESS; }
EXPORT int cuCtxSetCurrent(void*) { return SUCCESS; }
EXPORT int cuCtxPushCurrent_v2(void*) { return SUCCESS; }
EXPORT int cuCtxPopCurrent_v2(void** c) { return *c = &context, SUCCESS; }
EXPORT int cuCtxGetDevice(int* device) { return *device = 0, SUCCESS; }
EXPORT int cuCtxGetId(void*, unsigned long long* id) { return *id = 1, SUCCESS; }
EXPORT int cuCtxSynchronize() {
    WAITS;
    return SUCCESS;
}
EXPORT int cuStreamCreate(void** s, unsigned) { return *s = &stream, SUCCESS; }
EXPORT int cuStreamDestroy_v2(void*) { return SUCCESS; }
EXPORT int cuStreamGetCtx(void*, void** c) { return *c = &context, SUCCESS; }
EXPORT int cuStreamSynchronize(void*) {
    WAITS;
    return SUCCESS;
}
EXPORT int cuStreamIsCapturing(void*, int* status) { return *status = capture ? 1 : 0, SUCCESS; }
EXPORT int cuStreamBeginCapture_v2(void*, int) {
    if (capture) return INVALID_VALUE;
    return capture = new Graph, SUCCESS;
}
EXPORT int cuStreamEndCapture(void*, void** graph) {
    if (!capture) return INVALID_VALUE;
    const bool valid = capture->valid;
    *graph = valid ? capture : nullptr;
    capture = nullptr;
    return valid ? SUCCESS : CAPTURE_INVALIDATED;
}
EXPORT int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) { return *executable = graph, SUCCESS; }
EXPORT int cuGraphLaunch(void* executable, void*) {
    for (const auto& node : static_cast<Graph*>(executable)->nodes) node();
    return SUCCESS;
}

// Every image maps to the one linked into this library.
EXPORT int cuModuleLoadData(void** m, const void* image) {
    WAITS;
    return image ? (*m = &module, SUCCESS) : INVALID_VALUE;
}
EXPORT int cuModuleUnload(void*) { return SUCCESS; }
EXPORT int cuModuleGetFunction(const void** function, void*, const char* name) {
    *function = simt::find(name);
    return *function ? SUCCESS : NOT_FOUND;
}
EXPORT int cuFuncSetAttribute(const void*, int, int) { return SUCCESS; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { return *blocks = 2, SUCCESS; }

namespace {
// Makes all allocations inaccessible, or accessible again. Between the two, other threads wait with allocating,
// releasing and copying.
void hide(bool hidden) {
    if (hidden) lock.lock();
    for (const auto& [start, allocation] : allocations)
        mprotect(static_cast<char*>(allocation.base) + page, allocation.bytes - 2 * page, hidden ? PROT_NONE : PROT_READ | PROT_WRITE);
    if (!hidden) lock.unlock();
}

int launch(const void* function, simt::Index grid, simt::Index block, unsigned shared_bytes, void** params, void (*hide)(bool)) {
    if (!function || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || block.y != 1 || block.z != 1)
        return INVALID_VALUE;
    const auto& kernel = *static_cast<const simt::Kernel*>(function);
    const auto bytes = static_cast<const unsigned char*>(params[0]);
    std::vector<unsigned char> copy(bytes, bytes + kernel.params_size);
    return enqueue([=, &kernel] { simt::launch(kernel, grid, block.x, shared_bytes, copy.data(), hide); });
}

// CUlaunchConfig, with attributes whose value is an integer.
struct LaunchAttribute {
    int id, padding, value, unused[15];
};
struct LaunchConfig {
    simt::Index grid, block;
    unsigned shared_bytes;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned count;
};
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
} // namespace

EXPORT int cuLaunchKernel(const void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared_bytes, void*, void** params, void**) {
    return launch(function, {x, y, z}, {threads, threads_y, threads_z}, shared_bytes, params, nullptr);
}
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, const void* function, void** params, void**) {
    bool early = false;
    for (unsigned i = 0; i < config->count; i++) {
        if (config->attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION) return NOT_SUPPORTED;
        early = config->attributes[i].value != 0;
    }
    return launch(function, config->grid, config->block, config->shared_bytes, params, early ? hide : nullptr);
}

EXPORT int cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
    WAITS;
    if (!bytes) return INVALID_VALUE;
    size_t used = (bytes + 15) / 16 * 16, pages = (used + page - 1) / page * page;
    void* base = mmap(nullptr, pages + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    unsigned char* start = static_cast<unsigned char*>(base) + page;
    memset(start, 0xff, pages);
    mprotect(base, page, PROT_NONE);
    mprotect(start + pages, page, PROT_NONE);
    *pointer = Pointer(start + pages - used);
    std::lock_guard<std::mutex> guard(lock);
    allocations[*pointer] = {base, pages + 2 * page};
    return SUCCESS;
}
EXPORT int cuMemFree_v2(Pointer pointer) {
    WAITS;
    std::lock_guard<std::mutex> guard(lock);
    auto found = allocations.find(pointer);
    if (found == allocations.end()) return INVALID_VALUE;
    munmap(found->second.base, found->second.bytes);
    allocations.erase(found);
    return SUCCESS;
}
EXPORT int cuMemAllocAsync(Pointer* pointer, size_t bytes, void*) { return cuMemAlloc_v2(pointer, bytes); }
EXPORT int cuMemFreeAsync(Pointer pointer, void*) { return cuMemFree_v2(pointer); }

namespace {
int copy(void* to, const void* from, size_t bytes) {
    WAITS;
    std::lock_guard<std::mutex> guard(lock); // see hide
    return memmove(to, from, bytes), SUCCESS;
}
} // namespace
EXPORT int cuMemcpyHtoD_v2(void* to, const void* from, size_t bytes) { return copy(to, from, bytes); }
EXPORT int cuMemcpyDtoH_v2(void* to, const void* from, size_t bytes) { return copy(to, from, bytes); }
EXPORT int cuMemcpyDtoD_v2(void* to, const void* from, size_t bytes) { return copy(to, from, bytes); }
EXPORT int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
EXPORT int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
EXPORT int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void*) { return copy(to, from, bytes); }
EXPORT int cuMemsetD8_v2(void* to, unsigned char x, size_t n) {
    WAITS;
    std::lock_guard<std::mutex> guard(lock);
    return memset(to, x, n), SUCCESS;
}
EXPORT int cuMemsetD8Async(void* to, unsigned char x, size_t n, void*) {
    return enqueue([=] {
        std::lock_guard<std::mutex> guard(lock);
        memset(to, x, n);
    });
}
EXPORT int cuMemsetD32_v2(uint32_t* to, uint32_t x, size_t n) {
    WAITS;
    std::lock_guard<std::mutex> guard(lock);
    return std::fill(to, to + n, x), SUCCESS;
}
EXPORT int cuMemsetD32Async(uint32_t* to, uint32_t x, size_t n, void*) {
    return enqueue([=] {
        std::lock_guard<std::mutex> guard(lock);
        std::fill(to, to + n, x);
    });
}

EXPORT int cuEventCreate(void** event, unsigned) { return *event = new std::chrono::steady_clock::time_point, SUCCESS; }
EXPORT int cuEventRecord(void* event, void*) {
    *static_cast<std::chrono::steady_clock::time_point*>(event) = std::chrono::steady_clock::now();
    return SUCCESS;
}
EXPORT int cuEventSynchronize(void*) {
    WAITS;
    return SUCCESS;
}
EXPORT int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
    auto at = [](void* e) { return *static_cast<std::chrono::steady_clock::time_point*>(e); };
    *milliseconds = std::chrono::duration<float, std::milli>(at(end) - at(start)).count();
    return SUCCESS;
}
EXPORT int cuEventDestroy_v2(void* event) {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
    return SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char** text) {
    *text = error == SUCCESS ? "no error" : error == OUT_OF_MEMORY ? "out of memory" : error == NOT_FOUND ? "not found"
            : error == CAPTURE_UNSUPPORTED || error == CAPTURE_INVALIDATED ? "not allowed in a capture" : "invalid value";
    return SUCCESS;
}
EXPORT int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
