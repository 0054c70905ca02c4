// The second pass: dQ of a tile of queries, see parts.cuh. Called by run.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/scores.cuh"

namespace flash_ext::sm90 {

template <class Traits>
__device__ __forceinline__ void produce_for_queries(const typename Traits::Params& params,
                                                    const typename Traits::Queries& tiles) {
  constexpr int kBlock = Traits::kBlock;
  const TwoPassWork work = TwoPassWork::of_queries<Traits>(params);
  const int head_k = work.head / params.group_size;
  typename Traits::Place k;
  typename Traits::VPlace v;
  const auto load_rows = [&]<int kPanels>(std::integral_constant<int, kPanels>, uint32_t first, uint32_t barrier,
                                          const TensorMap& map) {
    constexpr int kParts = Traits::kQueryRows / kBlock, kBytes = kPanels * panel_size(kBlock);
    barrier_expect(barrier, kParts * kBytes);
    for (int i = 0; i < kParts; ++i) {
      load_boxes<kBlock, Traits::kQueryBox, kPanels>(first + i * kBytes, barrier, map,
                                                     work.box(map.steps, work.head, work.first_row + i * kBlock));
    }
  };
  const auto load = [&]<int kBytes>(const Ring<kBytes>& ring, auto& place, const TensorMap& map, int n) {
    constexpr int kPanels = kBytes / panel_size(Traits::kWalkedKeys);
    barrier_wait(ring.empty(place.stage), place.phase ^ 1);
    barrier_expect(ring.full(place.stage), kBytes);
    load_boxes<Traits::kWalkedKeys, Traits::kKeyBox, kPanels>(ring.tile(place.stage), ring.full(place.stage), map,
                                                              work.box(map.steps, head_k, n * Traits::kWalkedKeys));
    place.advance();
  };
  load_rows(std::integral_constant<int, Traits::kPanels>(), tiles.q(0), tiles.q_full(), params.q);
  if (work.last > work.first) load(tiles.k(), k, params.k, work.first);
  load_rows(std::integral_constant<int, Traits::kValuePanels>(), tiles.d_out(0), tiles.d_out_full(), params.d_out);
  for (int n = work.first; n < work.last; ++n) {
    load(tiles.v(), v, params.v, n);
    if (n + 1 < work.last) load(tiles.k(), k, params.k, n + 1);
  }
}

// The three warps beside the producer: of each tile of keys a slot of the first consumer, then one of the second; with
// kHalves one that both read.
template <class Traits>
__device__ __forceinline__ void load_scores_of_queries(const typename Traits::Params& params,
                                                       const typename Traits::Queries& tiles) {
  constexpr int kBlock = Traits::kBlock, kKeys = Traits::kWalkedKeys, kParts = Traits::kQueryRows / kBlock;
  const TwoPassWork work = TwoPassWork::of_queries<Traits>(params);
  load_slots<kBlock, kKeys>(params.queries_scores, tiles.scores(), work, params.len_q, params.band.len_k,
                            [&](const auto& fn) {
#pragma unroll 1
                              for (int n = work.first; n < work.last; ++n) {
#pragma unroll 1
                                for (int part = 0; part < kParts; ++part) {
                                  fn(work.head, work.first_row + part * kBlock, n * kKeys);
                                }
                              }
                            });
}

// A consumer warp's 16 queries, and how S and dP of a tile of keys become dS. S, dP and dQ are handed on.
template <class Traits>
struct QueryRows {
  using T = typename Traits::T;
  static constexpr int kBlock = Traits::kBlock, kKeys = Traits::kWalkedKeys;
  using Scores = float[kKeys / 2];     // S, dP
  using Packed = uint32_t[kKeys / 4];  // P, dS

  const typename Traits::Params& params;
  const typename Traits::Queries& tiles;
  const int consumer, lane, warp_row;
  const TwoPassWork work;
  const int first_query, row;  // of the warpgroup, this thread's
  const float* const stats;    // of this thread's first query. Queries are padded to whole tiles of 128 there.
  const float minus_lse[2], delta[2];
  const bool needs_renorm;  // all rows of its tile
  const float ds_scale;     // with 2^10 P, as -lse log2(e) has it
  const bool drops;
  const DropoutDraws draws;
  ScoreState slot;
  const float slope;

  __device__ __forceinline__ QueryRows(const typename Traits::Params& params_, const typename Traits::Queries& tiles_,
                                       int consumer_)
      : params(params_),
        tiles(tiles_),
        consumer(consumer_),
        lane(threadIdx.x % 32),
        warp_row(threadIdx.x / 32 % 4 * 16),
        work(TwoPassWork::of_queries<Traits>(params_)),
        first_query(work.first_row + (Traits::kHalves ? 0 : consumer_ * kBlock)),
        row(first_query + warp_row + lane / 4),
        stats(params_.stats +
              ((int64_t{work.b} * params_.heads_q + work.head) * params_.padded + first_query) * kQueryStats +
              row % kBlock),
        minus_lse{stat(kLseStat, 0), stat(kLseStat, 1)},
        delta{stat(kDeltaStat, 0), stat(kDeltaStat, 1)},
        needs_renorm(stat(kRenormStat, 0) != kNoRenorm),
        ds_scale(Traits::kScaled ? params_.ds_scale(work.b, work.head, 1) : 1.f),
        drops(dropout_of(params_).rng_state != nullptr),
        draws(dropout_of(params_)),
        slot(queries_slot(params_)),
        slope(slope_of_head(params_, work)) {}

  static __device__ __forceinline__ float slope_of_head(const ScoredTwoPassParams& params, const TwoPassWork& work) {
    return params.queries_scores.alibi.of(work.head, work.b0, work.b1);
  }
  static __device__ __forceinline__ float slope_of_head(const TwoPassParams&, const TwoPassWork&) { return 0.f; }
  __device__ __forceinline__ float stat(QueryStat which, int half) const { return stats[which * kBlock + half * 8]; }

  __device__ __forceinline__ void subtract_renorm_rows(Scores& s) const {
    if (!needs_renorm) return;
    const float renorm[2] = {stat(kRenormStat, 0), stat(kRenormStat, 1)};
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      s[i] = fminf(fmaf(s[i], params.natural, renorm[i / 2 % 2]), 0.f) * params.inverse_scale;
    }
  }
  __device__ __forceinline__ float p_of(const Scores& s, int i) const {
    return exp2_fast(fmaf(s[i], params.to_log2, minus_lse[i / 2 % 2]));
  }
  __device__ __forceinline__ float scaled(float x) const {
    return Traits::kScaled ? x * (ds_scale * (1.f / 1024.f)) : x;
  }

  // With scores, of the keys of tile n: P of S, times 1 - tanh^2 where there is a softcap.
  __device__ __forceinline__ void make_p(Packed& p, KeptBits<1>& kept, Scores& s, int n) {
    const ScoreParams& scores = params.queries_scores;
    if (!Traits::kHalves && consumer == 1) skip_scores(scores, tiles.scores(), slot);
    take_slot<Traits, kKeys, false>(s, kept, scores, tiles.scores(), slot, warp_row, slope,
                                    row + scores.alibi.offset - (n * kKeys + lane % 4 * 2),
                                    [&](const auto& slope_at) { pack_slopes<T>(p, slope_at); });
    if (!Traits::kHalves && consumer == 0) skip_scores(scores, tiles.scores(), slot);
    subtract_renorm_rows(s);
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) {
      p[i / 2] = sloped<T>(p_of(s, i), p_of(s, i + 1), p[i / 2], scores.softcap);
    }
  }

  // With scores: dS = P o (dP - delta) of that P.
  __device__ __forceinline__ void make_ds(Packed& ds, const Packed& p, const KeptBits<1>& kept, const Scores& dp,
                                          int n) const {
    const auto of_pair = [&](int pair, uint32_t dropped) {
      const int i = 2 * pair, half = pair % 2;
      float x, y;
      unpack(p[pair], x, y, T());
      x *= scaled(without<0>(dp[i], dropped) - delta[half]);
      y *= scaled(without<1>(dp[i + 1], dropped) - delta[half]);
      ds[pair] = minus_lse[half] == kMinusInf ? 0 : pack(x, y, T());  // a row without keys, beside a NaN
    };
    if (drops) {
      draws.template with_dropped<kKeys>(dropout_of(params).place.of_batch(work.b).at(
                                             work.b * params.heads_q + work.head, first_query + warp_row, n * kKeys),
                                         of_pair);
    } else {
#pragma unroll
      for (int pair = 0; pair < kKeys / 4; ++pair) of_pair(pair, 0);
    }
    if (params.queries_scores.mask.data != nullptr) clear_hidden(ds, kept);
  }

  // Without: dS = P o (dP - delta), P = e^(S - lse) in float, times 1 - tanh^2 with a softcap.
  __device__ __forceinline__ void make_ds(Packed& ds, Scores& s, const Scores& dp) const {
    if constexpr (Traits::kSoftcap) {
      cap_scores<T, false>(s, params.softcap);
    } else {
      subtract_renorm_rows(s);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) {
      float of_pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float p = p_of(s, i + j);
        if constexpr (Traits::kSoftcap) p *= slope_of(s[i + j], params.softcap);
        of_pair[j] = p * scaled(dp[i + j] - delta[i / 2 % 2]);
      }
      ds[i / 2] = pack(of_pair[0], of_pair[1], T());
    }
  }
};

// dQ of 64 queries. What a tile of keys goes through, in both consumer warpgroups, each with its queries:
//
//   there at the start           S, and dP but with kLateDp
//                                P = e^(S - lse), with scores from their slot, which each warp hands back
//   kLateDp: wait for V, issue   dP = dO V^T, in the registers of S; wait; each warp arrives at V's empty barrier
//                                dS = P o (dP - delta)
//   (turns) wait                 for this warpgroup's turn
//   issue                        dQ += dS K
//   wait for the next K, issue   its S and, when its V is there, dP (not kLateDp); the other's turn
//   wait dQ                      each warp arrives at K's empty barrier
//   wait S and dP                each warp arrives at V's empty barrier (not kLateDp)
//
// Shared memory: Q and dO of both warpgroups, K and V of each stage, slots of bias and mask (queries_smem); dQ leaves
// through Q.
template <class Traits>
__device__ __forceinline__ void consume_queries(const typename Traits::Params& params,
                                                const typename Traits::Queries& tiles, int consumer) {
  using T = typename Traits::T;
  using Rows = QueryRows<Traits>;
  constexpr int kBlock = Traits::kBlock, kKeys = Traits::kWalkedKeys;
  constexpr bool kLateDp = Traits::kShape.late_dp;
  Rows rows(params, tiles, consumer);
  const TwoPassWork& work = rows.work;
  const auto k_ring = tiles.k();
  const auto v_ring = tiles.v();
  const int part = Traits::kHalves ? 0 : consumer;  // of the tile of queries
  const int first_panel = Traits::kHalves ? consumer * panels(Traits::kCols) : 0;
  const uint64_t q_desc = k_major(tiles.q(part)), d_out_desc = k_major(tiles.d_out(part));
  float dq[Traits::kCols / 2] = {};
  constexpr int kOutSteps = Traits::kShape.out_steps;
  uint32_t d_out[std::max(4 * kOutSteps, 1)];
  typename Rows::Scores s;
  [[maybe_unused]] typename Rows::Scores own_dp;
  auto& dp = chosen<kLateDp>(s, own_dp);
  typename Traits::Place k;
  typename Traits::VPlace v;
  int n = work.first;

  const auto issue_dp = [&] {
    issue_next_scores<T, kBlock, kKeys, Traits::kValueDim, kOutSteps>(dp, d_out_desc, v_ring, v, d_out);
  };
  const auto issue = [&](const typename Traits::Place& at) {
    issue_next_scores<T, kBlock, kKeys, Traits::kHeadDim>(s, q_desc, k_ring, at);
    if (!kLateDp) issue_dp();
  };
  const auto release_v = [&] {
    warp_arrive(v_ring.empty(v.stage));
    v.advance();
  };
  const auto wait_scores = [&] {
    wgmma_wait<0>();
    fence_registers(s, dp, dq);
    if (!kLateDp) release_v();
  };
  // kLast: no tile of keys follows, whose S and dP would be computed.
  const auto step = [&]<bool kLast>(std::bool_constant<kLast>) {
    typename Rows::Packed ds;
    if constexpr (Traits::kScored) {
      typename Rows::Packed p;
      KeptBits<1> kept = {};
      rows.make_p(p, kept, s, n);
      if constexpr (kLateDp) {
        fence_registers(p, s);
        issue_dp();
        wgmma_wait<0>();
        fence_registers(dp);
        release_v();
      }
      rows.make_ds(ds, p, kept, dp, n);
    } else {
      rows.make_ds(ds, s, dp);
    }
    if (params.band.is_boundary(rows.first_query, kBlock, n * kKeys, kKeys)) {
      clear_hidden(ds, KeptColumns::of_queries(params.band, rows.row, n * kKeys));
    }
    begin_issue<Traits>(consumer);
    issue_gradient<T, kKeys, Traits::kCols>(dq, ds, k_ring, k.stage, first_panel);
    typename Traits::Place next = k;
    next.advance();
    if (!kLast) issue(next);
    if (!kLast || consumer == 0) end_issue<Traits>(consumer);
    wgmma_wait<kLast ? 0 : kLateDp ? 1 : 2>();
    fence_registers(dq, ds);
    warp_arrive(k_ring.empty(k.stage));
    if (!kLast) wait_scores();
    k = next;
    ++n;
  };
  barrier_wait(tiles.q_full(), 0);
  barrier_wait(tiles.d_out_full(), 0);
  if (work.last > work.first) {
    if constexpr (kOutSteps > 0) {
      load_fragments<kBlock, kOutSteps>(d_out, tiles.d_out(part), rows.warp_row);
      fence_registers(d_out);
    }
    if (consumer == 1) end_issue<Traits>(consumer);
    issue(k);
    wait_scores();
    for_tiles(work.last - work.first, step);
  }
  named_barrier_sync(kOwnBarrier + part, Traits::kHalves ? 256 : 128);  // all its warps have finished with Q
  store_rows<Traits, kBlock>(dq, params.scale / rows.ds_scale, tiles.q(part), rows.warp_row, params.dq,
                             work.box(params.dq.steps, work.head, rows.first_query + rows.warp_row), first_panel);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    queries_kernel(const __grid_constant__ typename Traits::Params params) {
  const typename Traits::Queries tiles{tile_base()};
  constexpr TwoPassShape kShape = Traits::kShape;
  if (threadIdx.x == 0) {
    barrier_init(tiles.q_full(), 1);
    barrier_init(tiles.d_out_full(), 1);
    init_ring(tiles.k(), Traits::kStages, 8);
    init_ring(tiles.v(), kShape.v_stages, 8);
    if constexpr (Traits::kScored) init_ring(tiles.scores(), kScoreStages, 8, 2 * kScoreLoaders);
    fence_barrier_init();
  }
  follow_previous_kernel();  // prepare's numbers
  const int warpgroup = enter_warpgroup<kShape.producer_registers(), kShape.consumer_registers()>();
  if (warpgroup == 0) {
    if (threadIdx.x < 32 && elect_one()) produce_for_queries<Traits>(params, tiles);
    if constexpr (Traits::kScored) {
      if (threadIdx.x >= 32) load_scores_of_queries<Traits>(params, tiles);
    }
  } else {
    const int consumer = warpgroup - 1;
    consume_queries<Traits>(params, tiles, consumer);
  }
}

}  // namespace flash_ext::sm90
