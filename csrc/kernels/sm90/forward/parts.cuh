// What the forward kernel is made of beside its two roles: its traits, the turns of the warpgroups, and the products.
// Called by kernel.cuh only.
#pragma once

#include <type_traits>

#include "gpu/wgmma.cuh"
#include "kernels/sm90/forward/work.cuh"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/scores.cuh"

namespace flash_ext::sm90 {

template <class T_, int kHeadDim_, ForwardShape kShape_>
struct ForwardTraits {
  using T = T_;
  static constexpr ForwardShape kShape = kShape_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShape.block_m(), kBlockN = kShape.block_n;
  static constexpr int kPanels = panels(kHeadDim), kConsumers = kShape.consumers;
  static constexpr ForwardSmem kSmem = forward_smem(kShape, kHeadDim);
  static constexpr int kQBytes = tile_bytes(64, kHeadDim), kKvBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kQTiles = kShape.q_stages * kConsumers;
  static constexpr bool kStaged = kShape.q_stages > 1;  // out goes through Q's stage
  static constexpr bool kScored = kShape.scored;
  static constexpr bool kHasLimit = !kScored || kHeadDim <= 128;  // NOTE: else 4 to 8 bytes were spilled
  using Params = std::conditional_t<kScored, ScoredParams, ForwardParams>;
  using QPlace = RingPlace<kShape.q_stages>;
  using KvPlace = RingPlace<kShape.stages>;
  using WorkPlace = RingPlace<kWorks>;

  // Q: a tile a consumer and stage, at stage * consumers + consumer.
  struct Rings {
    Ring<kQBytes> q;
    Ring<kKvBytes> k, v;
    Ring<sizeof(Work)> works;
    Ring<0> scores;  // its stages' size is a parameter
  };
  static __device__ __forceinline__ Rings rings(uint32_t base) {
    const uint32_t q = base + kSmem.barriers, k = q + kQTiles * 16, v = k + kShape.stages * 16;
    const uint32_t works = v + kShape.stages * 16;
    return {{base, q},
            {base + kSmem.k, k},
            {base + kSmem.v, v},
            {base + kSmem.works, works},
            {base + kSmem.scores, works + kWorks * 16}};
  }
};

// Named barriers: 1 + w is the turn of consumer warpgroup w, 1 + consumers + w is its own.
constexpr int kTurnBarrier = 1;

template <class Traits>
__device__ __forceinline__ void take_turn(int consumer) {
  if constexpr (Traits::kShape.schedule == Schedule::kPingPong) named_barrier_sync(kTurnBarrier + consumer, 256);
}
// Lets the next warpgroup go.
template <class Traits>
__device__ __forceinline__ void pass_turn(int consumer) {
  if constexpr (Traits::kShape.schedule == Schedule::kPingPong) {
    named_barrier_arrive(kTurnBarrier + (consumer + 1 == Traits::kConsumers ? 0 : consumer + 1), 256);
  }
}

// S = Q K^T, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_s(float (&s_acc)[Traits::kBlockN / 2], uint32_t q_tile, uint32_t k_tile) {
  const uint64_t q_desc = k_major(q_tile), k_desc = k_major(k_tile);
#pragma unroll
  for (int k = 0; k < Traits::kHeadDim / 16; ++k) {
    Wgmma<typename Traits::T, Traits::kBlockN>::ss(s_acc, q_desc + k_major_step(64, k),
                                                   k_desc + k_major_step(Traits::kBlockN, k), k > 0);
  }
  wgmma_commit();
}

// O += P V, not waited for.
template <class Traits>
__device__ __forceinline__ void issue_o(float (&o_acc)[Traits::kHeadDim / 2],
                                        const uint32_t (&p_frag)[Traits::kBlockN / 4], uint32_t v_tile) {
  const uint64_t v_desc = mn_major(v_tile, Traits::kBlockN);
#pragma unroll
  for (int k = 0; k < Traits::kBlockN / 16; ++k) {
    Wgmma<typename Traits::T, Traits::kHeadDim>::rs(o_acc, p_frag + 4 * k, v_desc + mn_major_step(k), 1);
  }
  wgmma_commit();
}

}  // namespace flash_ext::sm90
