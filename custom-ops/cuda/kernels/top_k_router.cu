// TopKRouter: computes gates from scores. A group of lanes processes a token, so a warp processes 1, 2 or 4 tokens
// independently.
#include "params.h"
#include "device.cuh"

namespace {

enum Kind { two_stage, probabilities, renormalized, query_norms };

// Token `token` on `lanes` lanes; `lane` is the caller's index. Lane i processes columns i, i + lanes, ...
template <class T, int lanes> struct Route {
    const RouterParams& p;
    const int64_t token;
    const int lane;
    float* scores; // [columns]
    float* gates;  // [columns]

    static MOH_DEVICE float sum(float x) {
        for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
        return x;
    }
    static MOH_DEVICE float max(float x) {
        for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
        return x;
    }

    MOH_DEVICE bool is_shared(int head) const {
        return head < MOH_ROUTER_SHARED && (p.shared[head / 32] >> (head % 32) & 1);
    }
    // Number of shared heads below `head`.
    MOH_DEVICE int shared_before(int head) const {
        int count = 0, word = 0;
        for (; word < MOH_ROUTER_SHARED / 32 && word < head / 32; word++) count += __popc(p.shared[word]);
        return word == head / 32 && word < MOH_ROUTER_SHARED / 32 ? count + __popc(p.shared[word] & ((1u << head % 32) - 1))
                                                                  : count;
    }

    MOH_DEVICE void load() const {
        const T* row = static_cast<const T*>(p.scores) + token * p.width;
        if (p.kind != query_norms) {
            for (int c = lane; c < p.columns; c += lanes) scores[c] = to_float(row[c]);
            return;
        }
        if (p.top_k == 0) return; // no scores are needed, and there is no memory for them
        const int dim = p.width / p.heads;
        for (int head = 0, c = 0; head < p.heads; head++) {
            if (is_shared(head)) continue;
            float squares = 0.0f;
            for (int d = lane; d < dim; d += lanes) {
                float x = to_float(row[head * dim + d]);
                squares = fmaf(x, x, squares);
            }
            squares = sum(squares);
            if (lane == 0) scores[c] = squares;
            c++;
        }
    }

    // The score for selection: NaN counts as -inf.
    static MOH_DEVICE float key(float score) { return score == score ? score : -INFINITY; }

    // Sets the gates of the first `routed` columns to 1 if fewer than top_k of them precede the column, else to 0.
    // Ties go to the lower column.
    MOH_DEVICE void select() const {
        for (int c = lane; c < p.routed; c += lanes) {
            const float own = key(scores[c]);
            int before = 0;
            for (int other = 0; other < p.routed; other++) {
                const float score = key(scores[other]);
                before += score > own || (score == own && other < c);
            }
            gates[c] = before < p.top_k ? 1.0f : 0.0f;
        }
    }

    // Sets the gates of columns begin to end to factor * softmax over them (over_all), or over those whose gates are
    // not 0; gates of 0 stay 0.
    MOH_DEVICE void softmax(int begin, int end, float factor, bool over_all) const {
        float largest = -INFINITY, total = 0.0f;
        for (int c = begin + lane; c < end; c += lanes)
            if (over_all || gates[c] != 0.0f) largest = fmaxf(largest, scores[c]);
        largest = max(largest);
        for (int c = begin + lane; c < end; c += lanes)
            if (over_all || gates[c] != 0.0f) total += power(scores[c], largest);
        total = sum(total);
        for (int c = begin + lane; c < end; c += lanes)
            if (gates[c] != 0.0f) gates[c] = factor * (power(scores[c], largest) / total);
    }
    static MOH_DEVICE float power(float score, float largest) { return exp2_approx((score - largest) * 1.44269504f); }

    MOH_DEVICE void run(bool valid) const {
        load();
        __syncwarp();
        select();
        for (int c = p.routed + lane; c < p.columns; c += lanes) gates[c] = 1.0f;
        // The sum of each part's gates.
        float of_shared = float(p.num_shared), of_routed = p.kind == two_stage ? float(p.top_k) : 1.0f;
        const int shared = p.routed + p.balance;
        if (p.balance > 0) {
            const float first = scores[p.routed], second = scores[p.routed + 1], largest = fmaxf(first, second);
            const float a = power(first, largest), b = power(second, largest);
            of_shared *= 2.0f * (a / (a + b));
            of_routed *= 2.0f * (b / (a + b));
        }
        if (p.kind != query_norms) softmax(0, p.routed, of_routed, p.kind == probabilities);
        softmax(shared, p.columns, of_shared, true);
        __syncwarp();
        if (!valid) return;
        for (int head = lane; head < p.heads; head += lanes) {
            const int before = shared_before(head);
            float gate;
            if (!is_shared(head))
                gate = p.top_k > 0 ? gates[head - before] : 0.0f;
            else if (p.kind == query_norms)
                gate = 1.0f;
            else // a single shared head has no score; its softmax is 1
                gate = shared < p.columns ? gates[shared + before] : of_shared;
            p.gates[token * p.heads + head] = gate;
        }
    }
};

template <class T, int lanes> MOH_DEVICE void route(const RouterParams& p) {
    const int group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    const int64_t token = int64_t(blockIdx.x) * groups + group;
    const bool valid = token < p.tokens;
    float* scores = reinterpret_cast<float*>(shared_memory()) + 2 * group * p.columns;
    // Lanes after the last token repeat it, so that warps stay whole.
    Route<T, lanes>{p, valid ? token : p.tokens - 1, int(threadIdx.x) % lanes, scores, scores + p.columns}.run(valid);
}

} // namespace

// moh_router_<type>_<lanes per token>
#define MOH_ROUTER(type, lanes)                                                                                        \
    MOH_KERNEL(moh_router_##type##_##lanes, RouterParams, 128, 1) { route<type, lanes>(p); }
MOH_ROUTER(float, 8)
MOH_ROUTER(float, 16)
MOH_ROUTER(float, 32)
MOH_ROUTER(f16, 32)
MOH_ROUTER(bf16, 32)
