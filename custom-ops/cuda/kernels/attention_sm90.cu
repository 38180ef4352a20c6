// RoutedAttention for Hopper (sm_90a), f16 and bf16.
//
// A block is persistent: it processes tiles (rows of one list of the plan, which share a KV head). Warps are
// specialised:
// - warp 0 finds tiles and loads key and value blocks by TMA into a ring of slots, in the order of use: K0 K1 V0 K2
//   V1 ...; block 0 is the last one of the sequence, so that masked blocks come first;
// - gather warp w copies the query rows of consumer warpgroup w into swizzled shared memory, one unit (64 rows) ahead,
//   then the unit's bias, one block ahead; between units it writes zeros for blocks that are off;
// - consumer warpgroups process a unit each: S = Q K^T of block i + 1 and O += P V of block i run during the softmax
//   of block i + 1. P stays in registers: the accumulator fragment of S is the A fragment of the second product.
//
// There are two schedules. In step: unit w goes to warpgroup w, slots are freed as they are used, and the warpgroups
// issue their products in turn, so that the softmax of one overlaps with the products of another. Resident (keys and
// values of a tile fit the ring): tiles have many rows, and units go to the warpgroups round-robin across tiles, each
// at its own pace, so that no tensor core idles during a short tile.

#include "attention_sm90_consumer.cuh"
#include "attention_sm90_load.cuh"

namespace {

template <class C> MOH_DEVICE void attention(const AttentionSm90Params& p) {
    Shared<C>& shared = *reinterpret_cast<Shared<C>*>(shared_memory());
    expect_shared_memory(sizeof shared);
    const int warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kTileQueue; i++) {
            mbarrier_init(&shared.tile_full[i], 1);
            mbarrier_init(&shared.tile_empty[i], 5 * C::kWarpgroups); // 4 consumer warps and a gather warp each
        }
        for (int i = 0; i < C::kSlots; i++) {
            mbarrier_init(&shared.slot_full[i], 1);
            mbarrier_init(&shared.slot_empty[i], 4 * C::kWarpgroups);
        }
        for (int w = 0; w < C::kWarpgroups; w++)
            for (int i = 0; i < C::kQuerySlots; i++) {
                mbarrier_init(&shared.query_full[w][i], 32);
                mbarrier_init(&shared.query_empty[w][i], 4);
            }
        if constexpr (C::kBias)
            for (int w = 0; w < C::kWarpgroups; w++) {
                mbarrier_init(&shared.bias_full[w], 32);
                mbarrier_init(&shared.bias_empty[w], 4);
            }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp < 4) {
        registers_decrease<C::kProducerRegisters>();
        if (warp == 0) {
            produce(p, shared);
        } else if (warp <= C::kWarpgroups) {
            gather(p, shared, warp - 1);
        }
    } else {
        registers_increase<C::kConsumerRegisters>();
        Consumer<C> consumer{p, shared, warp / 4 - 1, warp % 4, lane};
        consumer.run();
    }
}

} // namespace

// Instances: name, type, maximum width, warpgroups, keys per block, slots, query slots, bias.
// src/routed_attention/hopper.rs repeats these numbers.
#define MOH_ATTENTION(name, T, head, warpgroups, keys, slots, query_slots, bias)                                       \
    MOH_KERNEL(name, AttentionSm90Params, 128 * (warpgroups + 1), 1) {                                                 \
        using C = Config<T, head, warpgroups, keys, slots, query_slots, bias>;                                         \
        static_assert(sizeof(Shared<C>) <= 232448, "shared memory of a block");                                        \
        attention<C>(p);                                                                                               \
    }
#define MOH_ATTENTION_PLAIN(head, ...)                                                                                 \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head, f16, head, __VA_ARGS__, false)                                       \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head, bf16, head, __VA_ARGS__, false)
#define MOH_ATTENTION_BIAS(head, ...)                                                                                  \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head##_bias, f16, head, __VA_ARGS__, true)                                 \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head##_bias, bf16, head, __VA_ARGS__, true)
// Longer blocks for long sequences.
#define MOH_ATTENTION_LONG(head, ...)                                                                                  \
    MOH_ATTENTION(moh_attention_sm90_f16_d##head##_long, f16, head, __VA_ARGS__, false)                                \
    MOH_ATTENTION(moh_attention_sm90_bf16_d##head##_long, bf16, head, __VA_ARGS__, false)
MOH_ATTENTION_PLAIN(64, 3, 128, 10, 2)
MOH_ATTENTION_BIAS(64, 2, 128, 9, 2) // with three warpgroups registers would spill
MOH_ATTENTION_PLAIN(80, 2, 128, 9, 2)
MOH_ATTENTION_BIAS(80, 2, 128, 7, 2)
MOH_ATTENTION_PLAIN(96, 2, 128, 7, 2)
MOH_ATTENTION_BIAS(96, 2, 128, 5, 2)
MOH_ATTENTION_PLAIN(128, 2, 128, 5, 2)
MOH_ATTENTION_LONG(128, 2, 160, 4, 2)
MOH_ATTENTION_BIAS(128, 2, 96, 5, 2)
MOH_ATTENTION_PLAIN(256, 2, 64, 5, 1)
