// What both forms of the first pass (keys.cuh, keys_split.cuh) share: where a consumer warp's 16 keys lie, how S^T of a
// tile of queries becomes P^T, and how a tile of queries ends.
//
// Called by those two. Invariant: fragments are [keys, queries]; sums of dK and dV and S^T are the caller's own and
// handed on.
#pragma once

#include "kernels/sm90/backward_two_pass/scores.cuh"

namespace flash_ext::sm90 {

template <class Traits>
struct KeyRows {
  using T = typename Traits::T;
  static constexpr int kQueries = Traits::kQueries, kKeys = Traits::kKeys;
  using Scores = float[kQueries / 2];     // S^T, dP^T
  using Packed = uint32_t[kQueries / 4];  // P^T, dS^T

  const typename Traits::Params& params;
  const typename Traits::Keys& tiles;
  const int lane, warp, warp_row;  // this warp of the tile, and its first key
  const TwoPassWork work;
  const int row;  // this thread's first key
  const Ring<Traits::kQBytes> q_ring;
  const Ring<Traits::kOutBytes> d_out_ring;
  typename Traits::Place place{};
  QueryPlace at;
  const bool drops;
  const DropoutDraws draws;
  ScoreState slot;

  __device__ __forceinline__ KeyRows(const typename Traits::Params& params_, const typename Traits::Keys& tiles_,
                                     int warp_)
      : params(params_),
        tiles(tiles_),
        lane(threadIdx.x % 32),
        warp(warp_),
        warp_row(warp_ * 16),
        work(TwoPassWork::of_keys<Traits>(params_)),
        row(work.first_row + warp_row + lane / 4),
        q_ring(tiles_.q()),
        d_out_ring(tiles_.d_out()),
        at{work.first, work.head * params_.group_size},
        drops(dropout_of(params_).rng_state != nullptr),
        draws(dropout_of(params_)),
        slot(keys_slot(params_)) {}

  // Tiles of queries, of all heads.
  __device__ __forceinline__ int total() const { return (work.last - work.first) * params.group_size; }
  // dS of fp16 is multiplied by it.
  __device__ __forceinline__ float ds_scale() const {
    return Traits::kScaled ? params.ds_scale(work.b, work.head * params.group_size, params.group_size) : 1.f;
  }
  __device__ __forceinline__ bool needs_renorm() const { return has_renorm(tiles.renorm(place.stage)); }

  // P^T of S^T, and what dS is made of. With scores, hidden pairs are 0 in P and marked in for_ds, `dropped` is what
  // dropout drops, which is 0 in P. may_renorm: false where it is known that no row is.
  template <int kCount>
  __device__ __forceinline__ void make_p(Packed& p, Packed& for_ds, [[maybe_unused]] uint32_t& dropped, Scores& s,
                                         [[maybe_unused]] float (&dv)[kCount], [[maybe_unused]] bool may_renorm) {
    if constexpr (Traits::kScored) {
      const ScoreParams& scores = params.keys_scores;
      KeptBits<1> kept = {};
      take_slot<Traits, kKeys, true>(s, kept, scores, tiles.scores(), slot, warp_row,
                                     scores.alibi.of(at.head, work.b0, work.b1),
                                     row - (at.m * kQueries + lane % 4 * 2) - scores.alibi.offset,
                                     [&](const auto& slope_at) { pack_slopes<T>(for_ds, slope_at); });
      if (needs_renorm()) {
        subtract_renorm(s, tiles.renorm(place.stage), params.natural, params.inverse_scale);
        if (drops) keep_nan(dv, s, tiles.renorm(place.stage));
      }
      sm90::make_p<Traits>(p, for_ds, s, params, tiles.lse(place.stage), scores.softcap);
      if (scores.mask.data != nullptr) hide(p, for_ds, kept);
      if (drops) {
        dropped = draws.transposed_bits<kQueries>(
            tiles.draw_keys(warp), dropout_of(params).place.of_batch(work.b).at(
                                       work.b * params.heads_q + at.head, at.m * kQueries, work.first_row + warp_row));
#pragma unroll
        for (int i = 0; i < kQueries / 4; ++i) p[i] &= ~spread_high_bits(dropped << i);
      }
    } else {
      if constexpr (Traits::kSoftcap) cap_scores<T, true>(s, params.softcap);
      if (may_renorm && needs_renorm()) {
        subtract_renorm(s, tiles.renorm(place.stage), params.natural, params.inverse_scale);
      }
      sm90::make_p<Traits>(p, for_ds, s, params, tiles.lse(place.stage), params.softcap);
    }
  }

  // Whether some pair of 64 keys and this tile of queries is hidden, and which are kept.
  __device__ __forceinline__ bool is_boundary(int first_key) const {
    return params.is_boundary(at.m * kQueries, kQueries, first_key, 64);
  }
  __device__ __forceinline__ KeptColumns kept() const {
    return KeptColumns::of_keys(params.band, params.len_q, row, at.m * kQueries);
  }

  // The next tile of queries. Products of this one have been waited for.
  __device__ __forceinline__ void advance(const typename Traits::Place& next) {
    release_queries(q_ring, d_out_ring, place);
    place = next;
    at.advance(work.first, work.last);
  }
};

}  // namespace flash_ext::sm90
