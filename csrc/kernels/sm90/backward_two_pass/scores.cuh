// Scores of the two-pass backward: softcap, bias, slopes, mask and dropout, any of them together.
//
//   s = cap * tanh(scale * q k^T / cap) + bias - slope |i + offset - j|     natural units with one of these, else q k^T
//   dS = (keep o dP - (1 - p) delta) o P (1 - tanh^2)                       1 / (1 - p) as in dropout.cuh
//
// A slot is a tile of queries by keys of the bias and of the mask, which the three warps beside the producer copy
// (scores.cuh) in the order in which consumers read. Called by keys.cuh and queries.cuh. Invariant: as in
// scores.cuh.
#pragma once

#include "kernels/sm90/backward_two_pass/parts.cuh"

namespace flash_ext::sm90 {

template <bool kFirst, class A, class B>
__device__ __forceinline__ auto& chosen(A& first, B& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// ---- loading --------------------------------------------------------------------------------------------------------

// What the three warps do. for_slots(fn): fn(head, first query, first key) for every slot.
template <int kQueries, int kKeys, class Slots>
__device__ __forceinline__ void load_slots(const ScoreParams& scores, const Ring<0>& ring, const TwoPassWork& work,
                                           int len_q, int len_k, const Slots& for_slots) {
  if (scores.stage_bytes == 0) return;
  ScoreState place(scores.stages);
  for_slots([&](int head, int first_query, int first_key) {
    barrier_wait(ring.empty(place.stage), place.phase ^ 1);
    const uint32_t slot = ring.tile(0) + place.stage * scores.stage_bytes;
    if (scores.bias.data != nullptr) {
      const char* const from = scores.bias.of(head, work.b0, work.b1);
      if (scores.bias_is_float) {
        copy_scores<kQueries, kKeys, 4>(slot, scores.bias, from, first_query, first_key, len_q, len_k);
      } else {
        copy_scores<kQueries, kKeys, 2>(slot, scores.bias, from, first_query, first_key, len_q, len_k);
      }
    }
    if (scores.mask.data != nullptr) {
      copy_scores<kQueries, kKeys, 1>(slot + scores.mask_at, scores.mask, scores.mask.of(head, work.b0, work.b1),
                                      first_query, first_key, len_q, len_k);
    }
    barrier_arrive_copied(ring.full(place.stage));
    barrier_arrive(ring.full(place.stage));
    place.advance();
  });
  cp_async_wait_all();
}

// The first slot; without scores there is no such ring.
__device__ __forceinline__ ScoreState keys_slot(const ScoredTwoPassParams& params) {
  return ScoreState(params.keys_scores.stages);
}
__device__ __forceinline__ ScoreState keys_slot(const TwoPassParams&) { return ScoreState(0); }
__device__ __forceinline__ ScoreState queries_slot(const ScoredTwoPassParams& params) {
  return ScoreState(params.queries_scores.stages);
}
__device__ __forceinline__ ScoreState queries_slot(const TwoPassParams&) { return ScoreState(0); }

// ---- use ------------------------------------------------------------------------------------------------------------

// Which pairs the mask of a slot keeps, 16 rows a warp from row `warp_row` of S or, kTransposed, of S^T on, of kCols
// columns.
template <int kCols, int kKeys, bool kTransposed>
__device__ __forceinline__ KeptBits<1> kept_of_slot(const ScoreParams& scores, uint32_t slot, int warp_row) {
  const int lane = threadIdx.x % 32, row = warp_row + lane / 4, col = lane % 4 * 2;
  const int pitch = scores.mask.row == 0 ? 0 : score_pitch(kKeys, 1);  // of queries
  const uint32_t mask = slot + scores.mask_at + (kTransposed ? col * pitch + row : row * pitch + col);
  KeptBits<1> kept = {};
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t first, second;
      if constexpr (kTransposed) {
        first = load_shared_byte(mask + 8 * n * pitch + 8 * half);
        second = load_shared_byte(mask + (8 * n + 1) * pitch + 8 * half);
      } else {
        const uint32_t bytes = load_shared_16(mask + 8 * half * pitch + 8 * n);
        first = bytes & 0xFF;
        second = bytes >> 8;
      }
      kept.word[0] |= ((first != 0) | (second != 0) << 1) << (8 * (n % 4) + 4 * (n / 4) + 2 * half);
    }
  }
  return kept;
}

// 1 - tanh^2 of capped scores, packed; in fp16 2^10 times, as P, because its normal numbers end at 2^-14.
template <class T>
constexpr float kSlopeUnit = std::is_same_v<T, __half> ? 1024.f : 1.f;

// slope(i): that of number i.
template <class T, int kPairs, class Slope>
__device__ __forceinline__ void pack_slopes(uint32_t (&slopes)[kPairs], const Slope& slope) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    slopes[i] = pack(slope(2 * i) * kSlopeUnit<T>, slope(2 * i + 1) * kSlopeUnit<T>, T());
  }
}

// P (1 - tanh^2) of a pair, packed; P where there is no softcap, and then `slopes` is not read.
template <class T>
__device__ __forceinline__ uint32_t sloped(float p_x, float p_y, const uint32_t& slopes, const SoftcapParams& softcap) {
  if (softcap.cap != 0.f) {
    float x, y;
    unpack(slopes, x, y, T());
    p_x *= x * (1.f / kSlopeUnit<T>);
    p_y *= y * (1.f / kSlopeUnit<T>);
  }
  return pack(p_x, p_y, T());
}

// A number of dP where dropout drops number kNumber of a pair: 0, of an infinity NaN. dropped: bits of the pair.
template <int kNumber>
__device__ __forceinline__ float without(float dp, uint32_t dropped) {
  return dropped & (kNumber == 0 ? 0x8000U : 0x80000000U) ? dp * 0.f : dp;
}

// P of S^T, packed, and what dS is made of: P (1 - tanh^2). slopes: with scores 1 - tanh^2 before, where there is a
// softcap. lse: where the queries' numbers lie.
template <class Traits, int kCount>
__device__ __forceinline__ void make_p(uint32_t (&p)[kCount / 2], uint32_t (&slopes)[kCount / 2], float (&s)[kCount],
                                       const typename Traits::Params& params, uint32_t lse,
                                       const SoftcapParams& softcap) {
  using T = typename Traits::T;
  probabilities<Traits>(p, s, params, lse, [&](float x, float y, float s_x, float s_y, int pair) {
    if constexpr (Traits::kScored) {
      slopes[pair] = sloped<T>(x, y, slopes[pair], softcap);
    } else if constexpr (Traits::kSoftcap) {
      slopes[pair] = pack_sloped<T>(x, y, s_x, s_y, softcap);
    } else {
      slopes[pair] = p[pair];
    }
  });
}

// Of hidden pairs P becomes 0 and what dS is made of -0, by which dS knows them.
template <class Kept, int kCount>
__device__ __forceinline__ void hide(uint32_t (&p)[kCount], uint32_t (&for_ds)[kCount], const Kept& kept) {
  with_kept(p, kept, [](uint32_t& x, uint32_t keeps) { x &= keeps; });
  mark_hidden(for_ds, kept);
}

// dS^T of what it is made of and dP^T; kMarks: 0 where hide() has marked it. delta: where the queries' numbers lie;
// dropped: see transposed_bits.
template <class Traits, int kCount>
__device__ __forceinline__ void make_ds(uint32_t (&ds)[kCount / 2], float (&dp)[kCount], uint32_t delta,
                                        [[maybe_unused]] uint32_t dropped, float ds_scale) {
  using T = typename Traits::T;
  with_queries(dp, delta, [&](float x, float y, float2 of_queries, int i) {
    const uint32_t from = ds[i / 2];
    float p_x, p_y;
    unpack(from, p_x, p_y, T());
    if constexpr (Traits::kScored) {
      x = without<0>(x, dropped << (i / 2));
      y = without<1>(y, dropped << (i / 2));
    }
    x -= of_queries.x;
    y -= of_queries.y;
    if constexpr (Traits::kScaled) {
      x *= ds_scale * (1.f / 1024.f);
      y *= ds_scale * (1.f / 1024.f);
    }
    ds[i / 2] = pack(p_x * x, p_y * y, T());
    if constexpr (Traits::kMarks) ds[i / 2] &= ~spread_high_bits(from);
  });
}

// Of dV.
template <class Traits>
__device__ __forceinline__ float value_scale(const typename Traits::Params& params) {
  return (Traits::kScaled ? 1.f / 1024.f : 1.f) * dropout_of(params).scale;
}

// The next slot, applied to S or S^T. keep: as of cap_or_call, called where there is a softcap.
template <class Traits, int kKeys, bool kTransposed, int kCount, class Keep>
__device__ __forceinline__ void take_slot(float (&s)[kCount], KeptBits<1>& kept, const ScoreParams& scores,
                                          const Ring<0>& ring, ScoreState& place, int warp_row, float slope,
                                          int distance, const Keep& keep) {
  const uint32_t slot = ring.tile(0) + place.stage * scores.stage_bytes;
  if (scores.stage_bytes > 0) barrier_wait(ring.full(place.stage), place.phase);
  add_scores<typename Traits::T, kKeys, kTransposed, false, typename Traits::Function>(s, scores, slot, warp_row, slope,
                                                                                       distance, keep);
  if (scores.mask.data != nullptr) kept = kept_of_slot<2 * kCount, kKeys, kTransposed>(scores, slot, warp_row);
  if (scores.stage_bytes == 0) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(place.stage));
  place.advance();
}

}  // namespace flash_ext::sm90
