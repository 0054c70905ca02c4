// The first pass above head dim 128: a warpgroup has dV of a tile of keys, the other dK, see parts.cuh. Called by
// keys.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/scores.cuh"

namespace flash_ext::sm90 {

// One gradient of 64 keys: kValues: dV, and P^T for the other warpgroup; else dK. With scores P that a mask hides is -0
// there, and what dropout drops stands behind P, a word a thread: see DropoutDraws::transposed_bits.
template <class Traits, bool kValues>
__device__ __forceinline__ void consume_one_gradient(const typename Traits::Params& params,
                                                     const typename Traits::Keys& tiles) {
  using T = typename Traits::T;
  constexpr int kBlock = Traits::kBlock, kHeadDim = Traits::kHeadDim;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
  const TwoPassWork work = TwoPassWork::of_keys<kBlock, kBlock>(params);
  const int row = work.first_row + warp_row + lane / 4;
  const Ring<Traits::kTileBytes> q_ring = tiles.q(), d_out_ring = tiles.d_out();
  const Ring<Traits::kPBytes> p_ring = tiles.p();
  // This thread's 64 bytes of P^T, 16 at a time with the other lanes', and its word of what is dropped.
  const auto p_at = [&](int stage) { return p_ring.tile(stage) + threadIdx.x % 128 * 16; };
  const auto drops_at = [&](int stage) { return p_ring.tile(stage) + kBlock * kBlock * 2 + threadIdx.x % 128 * 4; };
  const auto& score_ring = kValues ? q_ring : d_out_ring;  // B of S^T or dP^T
  const auto& sum_ring = kValues ? d_out_ring : q_ring;    // B of dV or dK
  const uint64_t a_desc = k_major(kValues ? tiles.k() : tiles.v());
  float acc[kHeadDim / 2], s_acc[kBlock / 2];
#pragma unroll
  for (float& x : acc) x = 0.f;
  typename Traits::Place place;
  int m = work.first;
  [[maybe_unused]] int head = work.head * params.group_size;
  const bool drops = dropout_of(params).rng_state != nullptr;
  const DropoutDraws draws(dropout_of(params));
  [[maybe_unused]] ScorePlace slot = keys_slot(params);
  if constexpr (Traits::kScored && kValues) {
    if (drops) draws.store_keys(tiles.draw_keys(threadIdx.x / 32 % 4));
  }
  const float ds_scale =
      Traits::kScaled && !kValues ? params.ds_scale(work.b, work.head * params.group_size, params.group_size) : 1.f;

  [[maybe_unused]] bool far = false;  // of a tile of queries
  if constexpr (kValues && !Traits::kCaps && !Traits::kScored) {
    far = any_far<kBlock>(params.stats + (int64_t{work.b} * params.heads_q + head) * params.padded * kQueryStats,
                          params.group_size, params.padded / kBlock, work.first, work.last);
  }

  const auto issue_score = [&](const typename Traits::Place& at) {
    barrier_wait(score_ring.full(at.stage), at.phase);
    wgmma_fence();
    issue_scores<T, kBlock, kBlock, kHeadDim>(s_acc, a_desc, score_ring.tile(at.stage));
  };
  // kLast: no tile follows, whose scores would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    uint32_t frag[kBlock / 4];
    const auto clear = [&](uint32_t(&packed)[kBlock / 4]) {
      if (params.is_boundary(m * kBlock, kBlock, work.first_row, kBlock)) {
        clear_hidden(packed, KeptColumns::of_keys(params.band, params.len_q, row, m * kBlock));
      }
    };
    if constexpr (kValues && Traits::kScored) {
      const ScoreParams& scores = params.keys_scores;
      uint32_t for_ds[kBlock / 4];  // 1 - tanh^2 where there is a softcap, then times P
      KeptBits<1> kept = {};
      take_slot<T, kBlock, true>(s_acc, kept, scores, tiles.scores(), slot, warp_row,
                                 scores.alibi.of(head, work.b0, work.b1),
                                 row - (m * kBlock + lane % 4 * 2) - scores.alibi.offset,
                                 [&] { pack_slopes<T>(for_ds, s_acc, scores.softcap); });
      if (is_far_tile(tiles.far(place.stage))) {
        subtract_far(s_acc, tiles.far(place.stage), params.natural, params.inverse_scale);
        if (drops) keep_nan(acc, s_acc, tiles.far(place.stage));
      }
      make_p<Traits>(frag, for_ds, s_acc, params, tiles.lse(place.stage), scores.softcap);
      if (scores.mask.data != nullptr) hide(frag, for_ds, kept);
      uint32_t dropped = 0;
      if (drops) {
        const int bh = work.b * params.heads_q + head;
        dropped = draws.transposed_bits(tiles.draw_keys(threadIdx.x / 32 % 4), bh, m * (kBlock / 16),
                                        (work.first_row + warp_row) / 16);
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i) frag[i] &= ~spread_high_bits(dropped << i);
      }
      barrier_wait(p_ring.empty(place.stage), place.phase ^ 1);
      store_pairs(p_at(place.stage), for_ds);
      store_shared(drops_at(place.stage), dropped);
      __syncwarp();
      if (lane == 0) barrier_arrive(p_ring.full(place.stage));
      clear(frag);
    } else if constexpr (kValues) {
      if constexpr (Traits::kCaps) cap_scores<T, true>(s_acc, params.softcap);
      if (far && is_far_tile(tiles.far(place.stage))) {
        subtract_far(s_acc, tiles.far(place.stage), params.natural, params.inverse_scale);
      }
      uint32_t for_ds[kBlock / 4];  // P of dS: with a softcap P (1 - tanh^2)
      with_queries(s_acc, tiles.lse(place.stage), [&](float s_x, float s_y, float2 minus_lse, int i) {
        const float x = exp2_fast(fmaf(s_x, params.to_log2, minus_lse.x));
        const float y = exp2_fast(fmaf(s_y, params.to_log2, minus_lse.y));
        for_ds[i / 2] = frag[i / 2] = pack(x, y, T());
        if constexpr (Traits::kCaps) {
          for_ds[i / 2] = pack(x * slope_of(s_x, params.softcap), y * slope_of(s_y, params.softcap), T());
        }
      });
      barrier_wait(p_ring.empty(place.stage), place.phase ^ 1);
      store_pairs(p_at(place.stage), for_ds);
      __syncwarp();
      if (lane == 0) barrier_arrive(p_ring.full(place.stage));
      clear(frag);
    } else {
      barrier_wait(q_ring.full(place.stage), place.phase);  // and with Q its delta
      barrier_wait(p_ring.full(place.stage), place.phase);
      load_pairs(frag, p_at(place.stage));
      [[maybe_unused]] uint32_t dropped = 0;
      if constexpr (Traits::kScored) dropped = load_shared(drops_at(place.stage));
      make_ds<Traits>(frag, s_acc, tiles.delta(place.stage), dropped, ds_scale);
      clear(frag);
      if (Traits::kScored && is_far_tile(tiles.far(place.stage))) clear_emptied(frag, tiles.lse(place.stage));
      __syncwarp();
      if (lane == 0) barrier_arrive(p_ring.empty(place.stage));
    }
    if constexpr (kValues) barrier_wait(d_out_ring.full(place.stage), place.phase);
    issue_gradient<T, kBlock, kHeadDim>(acc, frag, sum_ring, place.stage);
    typename Traits::Place next = place;
    next.advance();
    if constexpr (!kLast) issue_score(next);
    wgmma_wait<kLast ? 0 : 1>();
    fence_registers(acc);
    fence_registers(frag);
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(q_ring.empty(place.stage));
      barrier_arrive(d_out_ring.empty(place.stage));
    }
    place = next;
    if (++m == work.last) {
      m = work.first;
      ++head;
    }
    if constexpr (!kLast) {
      wgmma_wait<0>();
      fence_registers(s_acc);
    }
  };

  const int total = (work.last - work.first) * params.group_size;
  barrier_wait(tiles.k_full(), 0);
  if (total > 0) {
    if constexpr (!kValues) barrier_wait(tiles.v_full(), 0);
    issue_score(place);
    wgmma_wait<0>();
    fence_registers(s_acc);
    for (int left = total; left > 1; --left) step(std::false_type());
    step(std::true_type());
  }
  // K is read by the first warpgroup alone, V by the second: each tile becomes its owner's staging.
  named_barrier_sync(kValues ? 1 : 2, 128);
  const TensorMap& map = kValues ? params.dv : params.dk;
  const float factor = kValues ? value_scale<Traits>(params) : params.scale / ds_scale;
  if (!(kValues ? params.wants_dv : params.wants_dk)) return;
  store_rows<Traits, kBlock>(acc, factor, kValues ? tiles.k() : tiles.v(), warp_row, map,
                             work.box(map.steps, work.head, work.first_row + warp_row));
}

}  // namespace flash_ext::sm90
