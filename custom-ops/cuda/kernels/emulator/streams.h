// Streams of the emulated GPU. Nothing runs when it is enqueued, only when the host waits for something, in an order
// that CUDA allows but that a program may not expect.
//
// An operation follows those before it in its stream. Operations of the default stream follow all earlier ones of
// blocking streams, and the reverse; other streams are independent (CUDA driver API, "Stream synchronization
// behavior"). A wait runs either only what it needs, so that all other operations are late, or first everything else
// that may run, so that they are early. Which, and the order of independent operations, is drawn from MOH_SEED.
#pragma once

#include "simt.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace simt {

using Work = std::function<void()>;

struct Operation {
    Work work;
    std::vector<std::shared_ptr<Operation>> after;
    bool done = false;
};
using Handle = std::shared_ptr<Operation>;

// A random sequence, the same in every run with the same MOH_SEED.
struct Random {
    uint64_t state;
    Random();
    uint64_t bits();
};

struct Graph {
    std::vector<Work> nodes;
    bool valid = true;
};

struct Stream {
    bool blocking;
    Handle last{};
    Graph* capture = nullptr;
    std::map<const Kernel*, unsigned> launches{};
    Random random{};
};

// The legacy default stream, or the one that `handle` stands for; null if there is none.
Stream& default_stream();
Stream* find_stream(const void* handle);
Stream* create_stream(bool blocking);
bool destroy_stream(const void* handle);
// A blocking stream that is being captured, during which the default stream may not be used; null if there is none.
Stream* captured_blocking_stream();

// Adds an operation to the stream; it also follows `other`, if that is not null.
Handle add(Stream& stream, Work work, const Handle& other = nullptr);
// Adds an operation of another library to the stream, or to its graph during a capture; returns the driver's error.
int queue(const void* stream, Work work);
// Returns when the operation, or everything on the GPU, is done.
void finish(const Handle& operation, Random& random);
void finish_all();

} // namespace simt
