#include "streams.h"

#include <cstdlib>
#include <set>

namespace simt {
namespace {
std::vector<Handle> pending; // in the order in which they were added
std::set<Stream*> streams;   // without the default stream

bool is_ready(const Operation& operation) {
    return std::all_of(operation.after.begin(), operation.after.end(), [](const Handle& other) { return other->done; });
}

// Runs the operations in `needed`, and before them all others that may run if `early`.
void run(const std::set<const Operation*>& needed, bool early, Random& random) {
    for (;;) {
        std::vector<Handle> ready[2]; // others, needed
        for (const Handle& operation : pending)
            if (is_ready(*operation)) ready[needed.count(operation.get())].push_back(operation);
        const auto& next = ready[early && !ready[0].empty() ? 0 : 1];
        if (next.empty()) return;
        const Handle operation = next[random.bits() % next.size()];
        operation->work();
        operation->done = true;
        operation->after.clear(); // otherwise a stream's operations would never be freed
        pending.erase(std::find(pending.begin(), pending.end(), operation));
    }
}
} // namespace

Random::Random() {
    const char* seed = getenv("MOH_SEED");
    state = seed ? strtoull(seed, nullptr, 10) : 1;
}

// SplitMix64.
uint64_t Random::bits() {
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

Stream& default_stream() {
    static Stream stream{true};
    return stream;
}

Stream* find_stream(const void* handle) {
    const uintptr_t legacy = 1; // CU_STREAM_LEGACY
    if (handle == nullptr || uintptr_t(handle) == legacy) return &default_stream();
    const auto found = streams.find(static_cast<Stream*>(const_cast<void*>(handle)));
    return found == streams.end() ? nullptr : *found;
}

Stream* create_stream(bool blocking) {
    return *streams.insert(new Stream{blocking}).first;
}

// The stream's operations still run; its memory is kept for them.
bool destroy_stream(const void* handle) { return streams.erase(static_cast<Stream*>(const_cast<void*>(handle))) == 1; }

Stream* captured_blocking_stream() {
    const auto found = std::find_if(streams.begin(), streams.end(), [](Stream* s) { return s->blocking && s->capture; });
    return found == streams.end() ? nullptr : *found;
}

Handle add(Stream& stream, Work work, const Handle& other) {
    auto operation = std::make_shared<Operation>();
    operation->work = std::move(work);
    const auto follow = [&](const Handle& before) {
        if (before && !before->done) operation->after.push_back(before);
    };
    follow(stream.last);
    follow(other);
    if (&stream == &default_stream()) {
        for (const Stream* blocking : streams)
            if (blocking->blocking) follow(blocking->last);
    } else if (stream.blocking) {
        follow(default_stream().last);
    }
    stream.last = operation;
    pending.push_back(operation);
    return operation;
}

void finish(const Handle& operation, Random& random) {
    if (!operation || operation->done) return;
    std::set<const Operation*> needed;
    std::vector<const Operation*> open{operation.get()};
    while (!open.empty()) {
        const Operation* next = open.back();
        open.pop_back();
        if (next->done || !needed.insert(next).second) continue;
        for (const Handle& before : next->after) open.push_back(before.get());
    }
    run(needed, random.bits() % 2 == 0, random);
}

void finish_all() {
    std::set<const Operation*> all;
    for (const Handle& operation : pending) all.insert(operation.get());
    static Random random;
    run(all, false, random);
}

} // namespace simt
