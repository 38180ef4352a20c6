// RoutedAttention for few query rows per KV head, as in decoding; limited by the bandwidth of reading keys and values.
//
// There is no plan: a warp finds the selected rows of its list with one ballot, which limits q_len * group to 32.
// Block (l, s) processes part s of the keys of list l = (batch, KV head). Its four warps take blocks of keys
// round-robin, each with its own pipeline of copies and its own running softmax, and merge their results at the end.
// KV heads that no selected head needs are not read. With one part the block writes the output, otherwise
// moh_decode_combine_* does.
//
// In a cache, only the GPU knows how many keys a row has. They are divided among the parts that the cache as a whole would
// need; blocks of parts that remain without keys end at once.

// moh: spill-limit 128

#include "base_two.cuh"
#include "device.cuh"
#include "key_range.cuh"
#include "mma_attention.cuh"
#include "params.h"

namespace {

constexpr int threads = 128, warps = 4;
constexpr unsigned full = 0xffffffffu;

// The rows of a list: entries token * group + head within the group.
struct Rows {
    int group, total, batch, kv_head;
    unsigned selected; // bit e: entry e
    KeyRange keys;

    MOH_DEVICE Rows(const AttentionParams& p, int list) : batch(list / p.kv_num_heads), keys(p, list / p.kv_num_heads) {
        group = p.num_heads / p.kv_num_heads;
        total = p.q_len * group;
        kv_head = list % p.kv_num_heads;
        int lane = threadIdx.x % 32;
        selected = __ballot_sync(full, lane < total && __ldg(p.gates + block(p, min(lane, total - 1))) != 0.0f);
    }
    MOH_DEVICE int count() const { return __popc(selected); }
    // Index of an entry's (token, head) pair in the query, the gates and the output.
    MOH_DEVICE int64_t block(const AttentionParams& p, int entry) const {
        return (int64_t(batch) * p.q_len + entry / group) * p.num_heads + kv_head * group + entry % group;
    }
    // The entry of row `row`, which must exist.
    MOH_DEVICE int entry(int row) const {
        unsigned rest = selected;
        for (int i = 0; i < row; i++) rest &= rest - 1;
        return __ffs(rest) - 1;
    }
    // Number of keys visible to an entry.
    MOH_DEVICE int sees(int entry) const { return keys.sees(entry / group); }
    // First key of this batch entry and KV head, in keys or values with these strides.
    template <class T> MOH_DEVICE const T* first_of(const void* tensor, const int64_t (&strides)[3]) const {
        return static_cast<const T*>(tensor) + batch * strides[0] + kv_head * strides[1] + keys.first * strides[2];
    }
    // Keys per part; 0 if there are none.
    MOH_DEVICE int keys_per_part(const AttentionParams& p) const {
        if (p.first == nullptr) return p.keys_per_split;
        int each = (keys.count + p.splits - 1) / p.splits;
        return (each + p.keys_per_split - 1) / p.keys_per_split * p.keys_per_split;
    }
};

// The keys of this block's part.
struct Part {
    int start, end;
    MOH_DEVICE Part(const AttentionParams& p, const Rows& rows) {
        const int each = rows.keys_per_part(p);
        start = int(blockIdx.y) * each;
        end = min(rows.keys.count, start + each);
    }
    // Whether the block has nothing to write, either.
    MOH_DEVICE bool is_unused(const AttentionParams& p) const { return p.splits > 1 && start >= end; }
};

template <class T> MOH_DEVICE void write_zeros_of(const AttentionParams& p, const Rows& rows) {
    for (int entry = 0; entry < rows.total; entry++) {
        if (rows.selected >> entry & 1) continue;
        T* output = static_cast<T*>(p.output) + rows.block(p, entry) * p.value_dim;
        for (int d = threadIdx.x; d < p.value_dim; d += threads) output[d] = from_float<T>(0.0f);
    }
}

// Merges the warps' results in shared memory: maximum[w][row], sum[w][row] and out[w][row][column], rows `pitch`
// floats apart. Writes the output, or this part's mean and its weight, sum * 2^maximum: a
// logarithm of the product would lose the sum beside a large maximum.
template <class T>
MOH_DEVICE void merge(const AttentionParams& p, const Rows& rows, const float* maximum, const float* sum, const float* out,
                      int row_count, int pitch) {
    int list = blockIdx.x, part = blockIdx.y, lists = p.batch * p.kv_num_heads;
    for (int i = threadIdx.x; i < rows.count() * p.value_dim; i += threads) {
        int row = i / p.value_dim, d = i % p.value_dim;
        float largest = -INFINITY, total = 0.0f, x = 0.0f;
        for (int w = 0; w < warps; w++) largest = fmaxf(largest, maximum[w * row_count + row]);
        float base = largest == -INFINITY ? 0.0f : largest;
        for (int w = 0; w < warps; w++) {
            float weight = exp2_approx(maximum[w * row_count + row] - base);
            float own = sum[w * row_count + row];
            if (own == 0.0f) continue; // saw no key: adds nothing, even if values are NaN
            total = fmaf(weight, own, total);
            x = fmaf(weight, out[(w * row_count + row) * pitch + d], x);
        }
        float mean = total == 0.0f ? 0.0f : x / total;
        if (p.splits == 1) {
            int64_t to = rows.block(p, rows.entry(row));
            float gated = total == 0.0f ? 0.0f : __ldg(p.gates + to) * mean;
            static_cast<T*>(p.output)[to * p.value_dim + d] = from_float<T>(gated);
        } else {
            int64_t at = (int64_t(part) * lists + list) * rows.total + row;
            p.partial[at * p.value_dim + d] = mean;
            if (d == 0) *reinterpret_cast<float2*>(p.partial_weight + 2 * at) = make_float2(total == 0.0f ? -INFINITY : largest, total);
        }
    }
}

// ---------------------------------------------------------------------------------------------- tensor cores, 16 bits

template <int D> struct Instance {
    static constexpr int keys = D <= 96 ? 32 : 16; // keys per block
    static constexpr int row_bytes = HeadLayout<D>::row_bytes;
    static constexpr int stage_bytes = 2 * keys * row_bytes; // keys, then values
};

// Waits until at most `pending`, up to 2, of this thread's groups are outstanding.
MOH_DEVICE void wait_until(int pending) {
    if (pending == 2)
        cp_async_wait<2>();
    else if (pending == 1)
        cp_async_wait<1>();
    else
        cp_async_wait<0>();
}

template <class T, int D, int M_TILES> MOH_DEVICE void decode(const AttentionParams& p) {
    using I = Instance<D>;
    constexpr int row_count = 16 * M_TILES, units = HeadLayout<D>::units;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    start_next_kernel();
    wait_for_previous_kernel();
    unsigned char* shared_query = shared_memory();
    unsigned char* stages = shared_query + row_count * I::row_bytes + warp * p.stages * I::stage_bytes;
    constexpr int pitch = HeadLayout<D>::value_tiles * 8 + 4; // of the results
    expect_shared_memory(max(row_count * I::row_bytes + warps * p.stages * I::stage_bytes, warps * row_count * (2 + pitch) * 4));
    Rows rows(p, blockIdx.x);
    if (p.splits == 1) write_zeros_of<T>(p, rows);
    const Part keys(p, rows);
    int count = rows.count();
    if (count == 0 || keys.is_unused(p)) return;

    const uint16_t* query = static_cast<const uint16_t*>(p.query);
    for (int i = threadIdx.x; i < row_count * units; i += threads) {
        int row = i / units, unit = i % units;
        bool valid = row < count && unit * 8 < p.head_dim;
        const uint16_t* from = valid ? query + rows.block(p, rows.entry(row)) * p.head_dim + unit * 8 : query;
        cp_async_16(shared_query + row * I::row_bytes + unit * 16, from, valid);
    }
    cp_async_commit();

    const int start = keys.start, end = keys.end;
    const uint16_t* key = rows.first_of<uint16_t>(p.key, p.key_strides);
    const uint16_t* value = rows.first_of<uint16_t>(p.value, p.value_strides);
    // First key of this warp's block n.
    auto first_key = [&](int n) { return start + (n * warps + warp) * I::keys; };
    int filling = 0; // stage of the next load
    auto load = [&](int n) {
        if (first_key(n) < end) {
            unsigned char* stage = stages + filling * I::stage_bytes;
            load_rows<D, I::keys, 32>(stage, key, int(p.key_strides[2]), first_key(n), end, p.head_dim, lane);
            load_rows<D, I::keys, 32>(stage + I::stage_bytes / 2, value, int(p.value_strides[2]), first_key(n), end, p.value_dim, lane);
        }
        cp_async_commit(); // even if empty, so that groups can be counted
        filling = filling + 1 == p.stages ? 0 : filling + 1;
    };
    for (int n = 0; n < p.stages - 1; n++) load(n);

    WarpAttention<T, D, M_TILES, I::keys> state;
    state.clear();
    BiasRows bias{};
    bias.stride = p.bias_strides[3];
    int fewest = end;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = m * 16 + h * 8 + lane / 4, entry = row < count ? rows.entry(row) : 0;
            state.limit[m][h] = row < count ? min(end, rows.sees(entry)) : 0;
            if (row < count && p.bias != nullptr) {
                int64_t offset = rows.batch * p.bias_strides[0] +
                                 (rows.kv_head * rows.group + entry % rows.group) * p.bias_strides[1] +
                                 entry / rows.group * p.bias_strides[2];
                bias.row[m][h] = static_cast<const uint16_t*>(p.bias) + offset;
            }
        }
    fewest = min(end, rows.sees(rows.entry(0)));

    wait_until(p.stages - 1); // the query
    __syncthreads();
    state.load_query(shared_query);
#pragma unroll 1
    for (int n = 0; first_key(n) < end; n++) {
        load(n + p.stages - 1);
        wait_until(p.stages - 1);
        __syncwarp();
        // Block n's stage is filled next, after its use.
        const unsigned char* stage = stages + filling * I::stage_bytes;
        int first = first_key(n);
        bool masked = first + I::keys > fewest;
        if (p.bias != nullptr || p.scale <= 0.0f)
            state.template block<true>(shared_query, stage, stage + I::stage_bytes / 2, first, masked, p.scale * log2_e, bias);
        else
            state.template block<false>(shared_query, stage, stage + I::stage_bytes / 2, first, masked, p.scale * log2_e, bias);
        __syncwarp(); // the next copies overwrite the stage
    }
    state.finish();

    // The results reuse the shared memory of the queries and blocks of all warps.
    cp_async_wait<0>();
    __syncthreads();
    float* maximum = reinterpret_cast<float*>(shared_memory());
    float* sum = maximum + warps * row_count;
    float* out = sum + warps * row_count;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = warp * row_count + m * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0) {
                maximum[row] = state.maximum[m][h];
                sum[row] = state.sum[m][h];
            }
#pragma unroll
            for (int n = 0; n < HeadLayout<D>::value_tiles; n++)
                *reinterpret_cast<float2*>(out + row * pitch + n * 8 + lane % 4 * 2) =
                    make_float2(state.out[m][n][2 * h], state.out[m][n][2 * h + 1]);
        }
    __syncthreads();
    merge<T>(p, rows, maximum, sum, out, row_count, pitch);
}

// ------------------------------------------------------------------------------------------- plain float32 arithmetic

// Lane i has columns i, i + 32, ...: COLUMNS of them. Rows are processed one after the other, KEYS keys per warp at a
// time.
template <class T, int COLUMNS, int KEYS> MOH_DEVICE void decode_simt(const AttentionParams& p) {
    start_next_kernel();
    wait_for_previous_kernel();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Rows rows(p, blockIdx.x);
    if (p.splits == 1) write_zeros_of<T>(p, rows);
    const Part keys(p, rows);
    int count = rows.count();
    if (count == 0 || keys.is_unused(p)) return;
    const int start = keys.start, end = keys.end;
    const T* key = rows.first_of<T>(p.key, p.key_strides);
    const T* value = rows.first_of<T>(p.value, p.value_strides);
    int row_count = rows.total, pitch = p.value_dim;
    float* maxima = reinterpret_cast<float*>(shared_memory());
    float* sums = maxima + warps * row_count;
    float* outs = sums + warps * row_count;
    expect_shared_memory(size_t(warps * row_count * (2 + pitch)) * 4);
    float scale = p.scale * log2_e;

    for (int row = 0; row < count; row++) {
        int entry = rows.entry(row), limit = min(end, rows.sees(entry));
        const T* own = static_cast<const T*>(p.query) + rows.block(p, entry) * p.head_dim;
        const T* bias = nullptr;
        if (p.bias != nullptr)
            bias = static_cast<const T*>(p.bias) + rows.batch * p.bias_strides[0] +
                   (rows.kv_head * rows.group + entry % rows.group) * p.bias_strides[1] +
                   entry / rows.group * p.bias_strides[2];
        float query[COLUMNS], out[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            query[c] = c * 32 + lane < p.head_dim ? to_float(own[c * 32 + lane]) : 0.0f;
            out[c] = 0.0f;
        }
        float maximum = -INFINITY, sum = 0.0f;
        for (int first = start + warp * KEYS; first < limit; first += warps * KEYS) {
            float score[KEYS];
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                const T* from = key + min(first + j, limit - 1) * p.key_strides[2];
                score[j] = 0.0f;
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if (c * 32 + lane < p.head_dim) score[j] = fmaf(query[c], to_float(from[c * 32 + lane]), score[j]);
            }
            float now = maximum;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
#pragma unroll
                for (int step = 16; step > 0; step /= 2) score[j] += __shfl_xor_sync(full, score[j], step);
                score[j] *= scale;
                if (first + j >= limit)
                    score[j] = -INFINITY;
                else if (bias != nullptr)
                    score[j] += bias_in_base_two(bias[(first + j) * p.bias_strides[3]]);
                now = fmaxf(now, score[j]);
            }
            float base = now == -INFINITY ? 0.0f : now, factor = exp2_approx(maximum - base);
            maximum = now;
            sum *= factor;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) out[c] *= factor;
#pragma unroll
            for (int j = 0; j < KEYS; j++) {
                if (first + j >= limit) continue;
                const T* from = value + (first + j) * p.value_strides[2];
                float weight = exp2_approx(score[j] - base);
                sum += weight;
#pragma unroll
                for (int c = 0; c < COLUMNS; c++)
                    if (c * 32 + lane < p.value_dim) out[c] = fmaf(weight, to_float(from[c * 32 + lane]), out[c]);
            }
        }
        int at = warp * row_count + row;
        if (lane == 0) {
            maxima[at] = maximum;
            sums[at] = sum;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c * 32 + lane < p.value_dim) outs[at * pitch + c * 32 + lane] = out[c];
    }
    __syncthreads();
    merge<T>(p, rows, maxima, sums, outs, row_count, pitch);
}

// ------------------------------------------------------------------------------------------------------------ parts

// One warp per entry of every list: the weighted mean of the parts' means.
template <class T> MOH_DEVICE void combine(const AttentionParams& p) {
    wait_for_previous_kernel();
    int lane = threadIdx.x % 32, lists = p.batch * p.kv_num_heads;
    int total = p.q_len * (p.num_heads / p.kv_num_heads);
    int64_t number = int64_t(blockIdx.x) * warps + threadIdx.x / 32;
    if (number >= int64_t(lists) * total) return;
    int list = int(number / total), entry = int(number % total);
    Rows rows(p, list);
    int64_t to = rows.block(p, entry);
    T* output = static_cast<T*>(p.output) + to * p.value_dim;
    if (!(rows.selected >> entry & 1)) {
        for (int d = lane; d < p.value_dim; d += 32) output[d] = from_float<T>(0.0f);
        return;
    }
    int row = __popc(rows.selected & ((1u << entry) - 1));
    const int each = rows.keys_per_part(p), parts = each == 0 ? 0 : (rows.keys.count + each - 1) / each;
    auto at = [&](int part) { return (int64_t(part) * lists + list) * total + row; };
    float largest = -INFINITY, weight = 0.0f;
    for (int part = 0; part < parts; part++) largest = fmaxf(largest, p.partial_weight[2 * at(part)]);
    float base = largest == -INFINITY ? 0.0f : largest;
    auto weight_of = [&](int part) {
        const float2 own = *reinterpret_cast<const float2*>(p.partial_weight + 2 * at(part)); // maximum, sum
        return exp2_approx(own.x - base) * own.y;
    };
    for (int part = 0; part < parts; part++) weight += weight_of(part);
    float factor = weight == 0.0f ? 0.0f : __ldg(p.gates + to) / weight;
    for (int d = lane; d < p.value_dim; d += 32) {
        float x = 0.0f;
        for (int part = 0; part < parts; part++)
            x = fmaf(weight_of(part), p.partial[at(part) * p.value_dim + d], x);
        output[d] = from_float<T>(x * factor);
    }
}

} // namespace

// Grid: (batch * kv_num_heads, splits). Shared memory: the larger of (16 or 32 query rows with four warps' stages) and
// (four warps' results); 1 to 3 stages. _m16 is for lists of up to 16 entries, _m32 for up to 32.
#define INSTANCE(type, width)                                                                                          \
    MOH_KERNEL(moh_decode_##type##_d##width##_m16, AttentionParams, 128, 1) { decode<type, width, 1>(p); }             \
    MOH_KERNEL(moh_decode_##type##_d##width##_m32, AttentionParams, 128, 1) { decode<type, width, 2>(p); }

#define INSTANCES(type)                                                                                                \
    INSTANCE(type, 32)                                                                                                 \
    INSTANCE(type, 64)                                                                                                 \
    INSTANCE(type, 72)                                                                                                 \
    INSTANCE(type, 96)                                                                                                 \
    INSTANCE(type, 128)                                                                                                \
    MOH_KERNEL(moh_decode_##type##_d256_m16, AttentionParams, 128, 1) { decode<type, 256, 1>(p); }

INSTANCES(f16)
INSTANCES(bf16)

// Grid: the same. Shared memory: four warps' results.
#define SIMT(type, T)                                                                                                  \
    MOH_KERNEL(moh_decode_simt_##type##_d128, AttentionParams, 128, 1) { decode_simt<T, 4, 8>(p); }                    \
    MOH_KERNEL(moh_decode_simt_##type##_d256, AttentionParams, 128, 1) { decode_simt<T, 8, 4>(p); }                    \
    MOH_KERNEL(moh_decode_simt_##type##_d1024, AttentionParams, 128, 1) { decode_simt<T, 32, 1>(p); }                  \
    /* Grid: a warp for every entry of every list. */                                                                  \
    MOH_KERNEL(moh_decode_combine_##type, AttentionParams, 128, 1) { combine<T>(p); }

SIMT(f32, float)
SIMT(f16, f16)
SIMT(bf16, bf16)
