// A replacement for libcuda.so: the driver functions that the launchers and tests use, on host memory and the emulator.
//
// Launches, copies and memsets are queued: see streams.h. What is synchronous follows "API synchronization behavior" of
// the CUDA driver API, where it leaves a choice the one that is worse for the program. All host memory is pageable.
//
// An allocation (rounded up to 16 bytes) ends at an inaccessible page and is filled with NaN. While a thread captures
// a stream, waiting, allocating, synchronous copies and loading are errors, as in a real capture.
//
// MOH_EMULATOR_CAPABILITY, such as 86, selects the GPU; MOH_EMULATOR_MULTIPROCESSORS is their number.

#include "streams.h"

#include <chrono>
#include <cstdlib>
#include <mutex>

#include <sys/mman.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace simt;

namespace {
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_IMPLICIT = 906
};
constexpr size_t page = 4096;

// A GPU's compute capability and shared memory in bytes (CUDA programming guide, "Technical specifications").
struct Gpu {
    int capability;
    size_t per_block, per_multiprocessor;
};
constexpr Gpu gpus[] = {
    {75, 64 << 10, 64 << 10}, // too old for the kernels
    {80, 163 << 10, 164 << 10}, {86, 99 << 10, 100 << 10},   {89, 99 << 10, 100 << 10},
    {90, 227 << 10, 228 << 10}, {100, 227 << 10, 228 << 10}, {120, 99 << 10, 100 << 10},
};
constexpr size_t shared_without_attribute = 48 << 10;

int number_of(const char* variable, int otherwise) {
    const char* value = getenv(variable);
    return value && *value ? atoi(value) : otherwise;
}
const Gpu& gpu() {
    static const Gpu& selected = []() -> const Gpu& {
        const int capability = number_of("MOH_EMULATOR_CAPABILITY", 90);
        for (const Gpu& gpu : gpus)
            if (gpu.capability == capability) return gpu;
        fail("MOH_EMULATOR_CAPABILITY: expected 75, 80, 86, 89, 90, 100 or 120, found %d", capability);
    }();
    return selected;
}

struct Allocation {
    void* base;
    size_t bytes;
};
std::map<uintptr_t, Allocation> allocations;
std::map<const Kernel*, size_t> allowed_shared; // by cuFuncSetAttribute
std::recursive_mutex lock;                      // held by every function; kernels run on the thread that waits
int context, module;
thread_local Stream* capturing = nullptr; // by this thread

int forbidden(Stream* stream, int error) {
    stream->capture->valid = false;
    return error;
}

// Adds an operation to the stream, or to its graph during a capture.
int enqueue(const void* handle, Work work) {
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->nodes.push_back(std::move(work));
    } else {
        Stream* captured = stream == &default_stream() ? captured_blocking_stream() : nullptr;
        if (captured) return forbidden(captured, CAPTURE_IMPLICIT);
        add(*stream, std::move(work));
    }
    return SUCCESS;
}
} // namespace

#define LOCK const std::lock_guard<std::recursive_mutex> guard(lock)
// Returns an error during a capture by this thread.
#define WAITS                                                                                                          \
    LOCK;                                                                                                              \
    if (capturing) return forbidden(capturing, CAPTURE_UNSUPPORTED)
#define STREAM(stream, handle)                                                                                         \
    LOCK;                                                                                                              \
    Stream* stream = find_stream(handle);                                                                              \
    if (!stream) return INVALID_HANDLE

typedef uintptr_t Pointer;

EXPORT int cuInit(unsigned) { return SUCCESS; }
EXPORT int cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
EXPORT int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
EXPORT int cuDeviceGet(int* device, int ordinal) { return ordinal ? INVALID_VALUE : (*device = 0, SUCCESS); }
EXPORT int cuDeviceGetName(char* name, int length, int) {
    strncpy(name, "SIMT emulator", size_t(length));
    return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) { // CUdevice_attribute
    case 1: *value = 1024; return SUCCESS;                                                // MAX_THREADS_PER_BLOCK
    case 10: *value = 32; return SUCCESS;                                                 // WARP_SIZE
    case 16: *value = number_of("MOH_EMULATOR_MULTIPROCESSORS", 4); return SUCCESS;       // MULTIPROCESSOR_COUNT
    case 38: *value = 1 << 20; return SUCCESS;                                            // L2_CACHE_SIZE
    case 75: *value = gpu().capability / 10; return SUCCESS;                              // COMPUTE_CAPABILITY_MAJOR
    case 76: *value = gpu().capability % 10; return SUCCESS;                              // COMPUTE_CAPABILITY_MINOR
    case 81: *value = int(gpu().per_multiprocessor); return SUCCESS; // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    case 97: *value = int(gpu().per_block); return SUCCESS;          // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
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
    return finish_all(), SUCCESS;
}

EXPORT int cuStreamCreate(void** stream, unsigned flags) {
    const unsigned non_blocking = 1;
    if (flags > non_blocking) return INVALID_VALUE;
    LOCK;
    return *stream = create_stream(flags != non_blocking), SUCCESS;
}
EXPORT int cuStreamDestroy_v2(void* handle) {
    WAITS;
    finish_all();
    return destroy_stream(handle) ? SUCCESS : INVALID_HANDLE;
}
EXPORT int cuStreamGetCtx(void* handle, void** c) {
    STREAM(stream, handle);
    return *c = &context, SUCCESS;
}
EXPORT int cuStreamSynchronize(void* handle) {
    STREAM(stream, handle);
    if (stream->capture) return forbidden(stream, CAPTURE_UNSUPPORTED);
    return finish(stream->last, stream->random), SUCCESS;
}
EXPORT int cuStreamIsCapturing(void* handle, int* status) {
    STREAM(stream, handle);
    return *status = stream->capture ? 1 : 0, SUCCESS;
}
// Only in the mode thread-local, which is the one that hosts with several threads use.
EXPORT int cuStreamBeginCapture_v2(void* handle, int mode) {
    const int thread_local_mode = 1;
    STREAM(stream, handle);
    if (stream->capture || capturing || stream == &default_stream()) return INVALID_VALUE;
    if (mode != thread_local_mode) return NOT_SUPPORTED;
    stream->capture = new Graph;
    return capturing = stream, SUCCESS;
}
EXPORT int cuStreamEndCapture(void* handle, void** graph) {
    STREAM(stream, handle);
    if (!stream->capture || capturing != stream) return INVALID_VALUE;
    const bool valid = stream->capture->valid;
    *graph = valid ? stream->capture : nullptr;
    stream->capture = nullptr;
    capturing = nullptr;
    return valid ? SUCCESS : CAPTURE_INVALIDATED;
}
EXPORT int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) { return *executable = graph, SUCCESS; }
EXPORT int cuGraphLaunch(void* executable, void* handle) {
    LOCK;
    return enqueue(handle, [=] {
        for (const Work& node : static_cast<Graph*>(executable)->nodes) node();
    });
}

// Every image maps to the kernels that are linked into this library.
EXPORT int cuModuleLoadData(void** m, const void* image) {
    WAITS;
    return image ? (*m = &module, SUCCESS) : INVALID_VALUE;
}
EXPORT int cuModuleUnload(void*) { return SUCCESS; }
// A module for sm_90a does not load on other GPUs; here the error comes with its first kernel.
EXPORT int cuModuleGetFunction(const void** function, void*, const char* name) {
    if (strstr(name, "_sm90") && gpu().capability != 90) return NO_BINARY_FOR_GPU;
    *function = find(name);
    return *function ? SUCCESS : NOT_FOUND;
}
EXPORT int cuFuncSetAttribute(const void* function, int attribute, int value) {
    const int max_dynamic_shared_bytes = 8;
    LOCK;
    if (attribute != max_dynamic_shared_bytes) return NOT_SUPPORTED;
    if (value < 0 || size_t(value) > gpu().per_block) return INVALID_VALUE;
    allowed_shared[static_cast<const Kernel*>(function)] = size_t(value);
    return SUCCESS;
}

namespace {
// Makes all allocations inaccessible, or accessible again.
void hide(bool hidden) {
    for (const auto& [start, allocation] : allocations)
        mprotect(static_cast<char*>(allocation.base) + page, allocation.bytes - 2 * page, hidden ? PROT_NONE : PROT_READ | PROT_WRITE);
}

int launch_on(void* handle, const void* function, Index grid, Index block, unsigned shared_bytes, void** params, void (*hide)(bool)) {
    STREAM(stream, handle);
    if (!function || !grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 || block.y != 1 ||
        block.z != 1)
        return INVALID_VALUE;
    const auto& kernel = *static_cast<const Kernel*>(function);
    const auto allowed = allowed_shared.find(&kernel);
    if (shared_bytes > (allowed == allowed_shared.end() ? shared_without_attribute : allowed->second)) return INVALID_VALUE;
    const auto bytes = static_cast<const unsigned char*>(params[0]);
    std::vector<unsigned char> copy(bytes, bytes + kernel.params_size);
    return enqueue(handle, [=, &kernel] {
        // Counted for each stream, so that a thread with its own stream sees the same order in every run.
        const unsigned number = stream->launches[&kernel]++;
        launch(kernel, grid, block.x, shared_bytes, copy.data(), {number % 2 == 1, stream->random.bits()}, hide);
    });
}

// CUlaunchConfig, with attributes whose value is an integer.
struct LaunchAttribute {
    int id, padding, value, unused[15];
};
struct LaunchConfig {
    Index grid, block;
    unsigned shared_bytes;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned count;
};
constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
} // namespace

EXPORT int cuLaunchKernel(const void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                          unsigned threads_z, unsigned shared_bytes, void* handle, void** params, void**) {
    return launch_on(handle, function, {x, y, z}, {threads, threads_y, threads_z}, shared_bytes, params, nullptr);
}
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, const void* function, void** params, void**) {
    bool early = false;
    for (unsigned i = 0; i < config->count; i++) {
        if (config->attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION) return NOT_SUPPORTED;
        early = config->attributes[i].value != 0;
    }
    return launch_on(config->stream, function, config->grid, config->block, config->shared_bytes, params, early ? hide : nullptr);
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
    allocations[*pointer] = {base, pages + 2 * page};
    return SUCCESS;
}
EXPORT int cuMemFree_v2(Pointer pointer) {
    WAITS;
    auto found = allocations.find(pointer);
    if (found == allocations.end()) return INVALID_VALUE;
    finish_all();
    munmap(found->second.base, found->second.bytes);
    allocations.erase(found);
    return SUCCESS;
}

namespace {
// An operation of the default stream; the function returns before it is done.
int queue_default(Work work) {
    WAITS;
    return enqueue(nullptr, std::move(work));
}
int run_default(Work work) {
    WAITS;
    const int error = enqueue(nullptr, std::move(work));
    if (error == SUCCESS) finish(default_stream().last, default_stream().random);
    return error;
}
} // namespace
int simt::queue(const void* stream, Work work) {
    LOCK;
    return enqueue(stream, std::move(work));
}
// Returns once the rest of the copy is staged.
EXPORT int cuMemcpyHtoD_v2(char* to, const char* from, size_t bytes) {
    const size_t staging = 64 << 10, direct = bytes > staging ? bytes - staging : 0;
    if (direct)
        if (int error = run_default([=] { memcpy(to, from, direct); })) return error;
    std::vector<char> rest(from + direct, from + bytes);
    return queue_default([=] { memcpy(to + direct, rest.data(), rest.size()); });
}
EXPORT int cuMemcpyDtoH_v2(void* to, const void* from, size_t n) { return run_default([=] { memcpy(to, from, n); }); }
EXPORT int cuMemcpyDtoD_v2(void* to, const void* from, size_t n) { return queue_default([=] { memmove(to, from, n); }); }
EXPORT int cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t n, void* s) { return queue(s, [=] { memcpy(to, from, n); }); }
EXPORT int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t n, void* s) { return queue(s, [=] { memcpy(to, from, n); }); }
EXPORT int cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t n, void* s) { return queue(s, [=] { memmove(to, from, n); }); }
EXPORT int cuMemsetD8_v2(void* to, unsigned char x, size_t n) { return queue_default([=] { memset(to, x, n); }); }
EXPORT int cuMemsetD8Async(void* to, unsigned char x, size_t n, void* s) { return queue(s, [=] { memset(to, x, n); }); }

namespace {
struct Event {
    Handle recorded;
    std::shared_ptr<std::chrono::steady_clock::time_point> time = std::make_shared<std::chrono::steady_clock::time_point>();
};
} // namespace
EXPORT int cuEventCreate(Event** event, unsigned) { return *event = new Event, SUCCESS; }
EXPORT int cuEventRecord(Event* event, void* handle) {
    STREAM(stream, handle);
    if (stream->capture) return forbidden(stream, NOT_SUPPORTED);
    const int error = enqueue(handle, [time = event->time] { *time = std::chrono::steady_clock::now(); });
    if (error == SUCCESS) event->recorded = stream->last;
    return error;
}
EXPORT int cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    STREAM(stream, handle);
    if (stream->capture) return forbidden(stream, NOT_SUPPORTED);
    add(*stream, [] {}, event->recorded);
    return SUCCESS;
}
EXPORT int cuEventSynchronize(Event* event) {
    WAITS;
    return finish(event->recorded, default_stream().random), SUCCESS;
}
EXPORT int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
    LOCK;
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    if (!start->recorded->done || !end->recorded->done) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
    return SUCCESS;
}
EXPORT int cuEventDestroy_v2(Event* event) {
    LOCK;
    return delete event, SUCCESS;
}

EXPORT int cuGetErrorName(int error, const char** text) {
    switch (error) {
    case SUCCESS: *text = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_BINARY_FOR_GPU: *text = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    case INVALID_HANDLE: *text = "CUDA_ERROR_INVALID_HANDLE"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    case NOT_READY: *text = "CUDA_ERROR_NOT_READY"; break;
    case NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; break;
    case CAPTURE_UNSUPPORTED: *text = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
    case CAPTURE_INVALIDATED: *text = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"; break;
    case CAPTURE_IMPLICIT: *text = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
