// Bias, mask and dropout of the backward: the tiles of scores.cuh, read transposed.
//
//   s^T = q k^T + added / scale
//   s^T = (scale * q k^T + added - lse) / scale     in a tile of queries with one whose lse is far from 0
//   (rows.cuh)
//
//   added = bias - slope |i + offset - j|
//
// Three warps beside the producer bring a slot of 64 queries by 128 keys after the other, a tile of queries being one
// or two: the bias as it is, [query][key], the mask as bits, a word of 32 queries a key, and what dropout.cuh draws.
// What the mask hides is kept for mark_hidden (hidden.cuh).
// Called by kernel.cuh, parameters made by run_scores.cuh. Invariant: as in scores.cuh; consumers read slots in the
// order in which the loaders fill them.
#pragma once

#include "kernels/sm90/backward/parts.cuh"

namespace flash_ext::sm90 {

// ---- loading --------------------------------------------------------------------------------------------------------

// Eight rows of four bytes: bit 8 i + row of the result is whether byte i of words[row] is not 0.
__device__ __forceinline__ uint32_t nonzero_bits(const uint32_t* words) {
  constexpr uint32_t kLow = 0x7F7F7F7F;
  uint32_t bits = 0;
#pragma unroll
  for (int row = 0; row < 8; ++row) {
    bits |= (((words[row] & kLow) + kLow | words[row]) & ~kLow) >> (7 - row);
  }
  return bits;
}

// A warp: 32 queries and all keys of a slot, four keys a lane. from: of the head.
// NOTE: 16 loads on their way together is what registers permit.
__device__ __forceinline__ void load_mask(uint32_t target, const ScoreView& view, const char* from, int first_row,
                                          int first_col, int len_q, int len_k) {
  const int lane = threadIdx.x % 32, col = first_col + lane * 4;
  from += first_row * view.row + col * view.col;
  int present = len_q - first_row;  // rows
  uint32_t keys[4];                 // 32 queries of each
  const auto add = [&](uint32_t bits) {
#pragma unroll
    for (int i = 0; i < 4; ++i) keys[i] = __funnelshift_r(keys[i], bits >> 8 * i, 8);
  };
  if (view.col == 1 && ((reinterpret_cast<uint64_t>(from) | view.row) & 3) == 0 && len_k - col >= 4) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i, present -= 16) {
      uint32_t words[16];
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        words[row] = row < present ? *reinterpret_cast<const uint32_t*>(from) : 0;
        from += view.row;
      }
      add(nonzero_bits(words));
      add(nonzero_bits(words + 8));
    }
  } else if (view.col == 1 && col >= 4 && len_k - col >= 8) {  // out of two words, which lie inside the row
#pragma unroll 1
    for (int i = 0; i < 4; ++i, present -= 8) {
      uint32_t words[8], next[8];
      uint32_t low = static_cast<uint32_t>(reinterpret_cast<uint64_t>(from));
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        const uint32_t* const start =
            reinterpret_cast<const uint32_t*>(reinterpret_cast<uint64_t>(from) & ~uint64_t{3});
        words[row] = row < present ? start[0] : 0;
        next[row] = row < present ? start[1] : 0;
        from += view.row;
      }
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        words[row] = __funnelshift_r(words[row], next[row], low * 8);  // by its last five bits
        low += static_cast<uint32_t>(view.row);
      }
      add(nonzero_bits(words));
    }
  } else {  // byte by byte
    const int count = len_k - col;
#pragma unroll 1
    for (int i = 0; i < 4; ++i, present -= 8) {
      uint32_t words[8];
#pragma unroll
      for (int row = 0; row < 8; ++row) {
        words[row] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t byte = row < present && j < count ? reinterpret_cast<const uint8_t*>(from)[j * view.col] : 0;
          words[row] |= byte << 8 * j;
        }
        from += view.row;
      }
      add(nonzero_bits(words));
    }
  }
  store_shared(target + lane * 16, uint4{keys[0], keys[1], keys[2], keys[3]});
}

// A warp: the bias of a slot, or the one row that stands for all, of elements of kSize bytes. from: of the head.
// NOTE: rows.cpp refuses others than one row or rows of whole chunks.
template <int kCols, int kSize>
__device__ __forceinline__ void load_bias(uint32_t target, const ScoreView& view, const char* from, int first_row,
                                          int first_col, int len_q, int len_k) {
  constexpr int kPitch = score_pitch(kCols, kSize), kChunks = kCols * kSize / 16, kPerChunk = 16 / kSize;
  constexpr int kStep = 32 / kChunks;  // rows a pass
  const int lane = threadIdx.x % 32, col = first_col + lane % kChunks * kPerChunk;
  const int present = view.row == 0 ? 1 : kScoreRows;
  const int rows = view.row == 0 ? 1 : len_q - first_row, count = min(max(len_k - col, 0), kPerChunk);
  const char* source = from + (first_row + lane / kChunks) * view.row + col * view.col;
  target += lane / kChunks * kPitch + lane % kChunks * 16;
  if (!view.vectors) {
    if (lane < kChunks) gather_chunk<kSize>(target, source, view.col, count);
    return;
  }
#pragma unroll 4
  for (int row = lane / kChunks; row < present; row += kStep) {
    const bool inside = row < rows && count > 0;
    cp_async_16(target, inside ? source : from, inside ? count * kSize : 0);
    source += kStep * view.row;
    target += kStep * kPitch;
  }
}

// fn(tile of keys, number of a query head among those of the key head) for all that the block works on.
template <class Traits, class Fn>
__device__ __forceinline__ void for_heads(const typename Traits::Params& params, const typename Traits::Tiles& tiles,
                                          const Fn& fn) {
  if constexpr (Traits::kPacked) {
#pragma unroll 1
    for (int member = 0; member < params.group_size; ++member) fn(packed_work<Traits>(tiles), member);
  } else {
    for (uint32_t linear = blockIdx.x; linear < params.tiles; linear += gridDim.x) {
#pragma unroll 1
      for (int member = 0; member < params.group_size; ++member) {
        fn(key_work<Traits>(params, linear), member);
      }
    }
  }
}

// fn(slot's number, first query, first key, rows of `view` of the query head) for every `step`-th slot from number
// `first` on, in the order of the producer's tiles.
template <class Traits, class Fn>
__device__ __forceinline__ void for_slots(const typename Traits::Params& params, const typename Traits::Tiles& tiles,
                                          const ScoreView& view, int first, int step, const Fn& fn) {
  const Ring<0> ring = tiles.scores();
  ScoreState place(params.scores.stages);
  for_heads<Traits>(params, tiles, [&](const typename Traits::Work& work, int member) {
    const char* const from = view.of(work.head_k * params.group_size + member, work.b0, work.b1);
    const int last_row = work.last_m * Traits::kBlockM;
#pragma unroll 1
    for (int row = work.first_m * Traits::kBlockM; row < last_row; row += kScoreRows) {
      if (--first < 0) {
        first = step - 1;
        barrier_wait(ring.empty(place.stage), place.phase ^ 1);
        fn(place.stage, row, work.first_key, from);
        barrier_arrive(ring.full(place.stage));
      }
      place.advance();
    }
  });
}

// A slot is full when these threads have arrived: the bias' warp with its stores and with its copies, one of the
// mask's.
__device__ __forceinline__ int slot_arrivals(const ScoreParams& scores) {
  return max((scores.bias.data != nullptr ? 64 : 0) + (scores.mask.data != nullptr ? 32 : 0), 1);
}

// With dropout: the warps that bring neither bias nor mask.
__device__ __forceinline__ int drop_warps(const ScoreParams& scores) {
  return 3 - (scores.bias.data != nullptr) - (scores.mask.data != nullptr);
}

// A warp, one of `warps`: its share of what is dropped of each tile of queries.
template <class Traits>
__device__ __forceinline__ void draw_drops(const typename Traits::Params& params, const typename Traits::Tiles& tiles,
                                           int warp, int warps) {
  constexpr int kParts = Traits::kBlockN / 16;  // of the keys, which a warp of the consumers has
  const auto ring = tiles.drops();
  const DropoutDraws draws(params.scores.dropout);
  const uint32_t keys = tiles.drop_keys(warp);
  draws.store_keys(keys);
  typename Traits::Place place;
  for_heads<Traits>(params, tiles, [&](const typename Traits::Work& work, int member) {
    const DropoutBlock first = params.scores.dropout.place.of_batch(work.b1 * params.inner_batch + work.b0);
    for (int m = work.first_m; m < work.last_m; ++m) {
      barrier_wait(ring.empty(place.stage), place.phase ^ 1);
#pragma unroll 1
      for (int i = warp; i < kParts * (Traits::kBlockM / kScoreRows); i += warps) {
        const int row = m * Traits::kBlockM + i / kParts * kScoreRows, key = work.first_key + i % kParts * 16;
        const uint32_t bits = draws.transposed_bits(keys, first.at(work.row + member, row, key));
        store_shared1(ring.tile(place.stage) + (i * 32 + threadIdx.x % 32) * 4, __uint_as_float(bits));
      }
      barrier_arrive(ring.full(place.stage));
      place.advance();
    }
  });
}

// What the three warps do: the first brings the bias; those that are left take turns with the mask, or with dropout
// one brings the mask and the others draw.
// NOTE: no more take turns than there are slots. Else one that comes back to a slot before its last use but one has
// been read sees the parity that it waits for, and goes on at once.
template <class Traits>
__device__ __forceinline__ void load_backward_scores(const typename Traits::Params& params,
                                                     const typename Traits::Tiles& tiles) {
  constexpr int kBlockN = Traits::kBlockN;
  const ScoreParams& scores = params.scores;
  int len_q = params.len_q, len_k = params.band.len_k;
  if constexpr (Traits::kPacked) {
    const SequenceEdges edges = packed_edges(tiles.packed_work());
    len_q = edges.len_q;
    len_k = edges.band.len_k;
  }
  const int bias_warps = scores.bias.data != nullptr;
  const int mask_warps = scores.mask.data == nullptr ? 0 : Traits::kDropout ? 1 : min(3 - bias_warps, scores.stages);
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1 - bias_warps;  // of those with the mask
  const auto slot = [&](int stage) { return tiles.scores().tile(0) + stage * scores.stage_bytes; };
  if (warp < 0) {
    for_slots<Traits>(params, tiles, scores.bias, 0, 1, [&](int stage, int row, int first_key, const char* from) {
      if (scores.bias_is_float) {
        load_bias<kBlockN, 4>(slot(stage), scores.bias, from, row, first_key, len_q, len_k);
      } else {
        load_bias<kBlockN, 2>(slot(stage), scores.bias, from, row, first_key, len_q, len_k);
      }
      barrier_arrive_copied(tiles.scores().full(stage));
    });
    cp_async_wait_all();
  } else if (warp < mask_warps) {
    for_slots<Traits>(params, tiles, scores.mask, warp, mask_warps,
                      [&](int stage, int row, int first_key, const char* from) {
#pragma unroll 1
                        for (int half = 0; half < 2; ++half) {
                          load_mask(slot(stage) + scores.mask_at + half * (kMaskBytes / 2), scores.mask, from,
                                    row + half * 32, first_key, len_q, len_k);
                        }
                      });
  } else if constexpr (Traits::kDropout) {
    draw_drops<Traits>(params, tiles, warp - mask_warps, drop_warps(scores));
  }
}

// ---- use ------------------------------------------------------------------------------------------------------------

// Part kSlot of S^T, 64 queries, from its slot; 16 keys a warp from key `warp_key` of the tile on. kRenorm: in natural
// units. kept: what the mask keeps, where there is one.
template <class T, int kKeys, bool kRenorm, int kSlot, int kCount, class Kept>
__device__ __forceinline__ void apply_slot(float (&s)[kCount], Kept& kept, const ScoredBackwardParams& params,
                                           uint32_t slot, int warp_key) {
  const ScoreParams& scores = params.scores;
  const int lane = threadIdx.x % 32;
  constexpr int kFirst = kSlot * 32, kTiles = kScoreRows / 8;  // of 8 queries, four numbers each
  if (scores.bias.data != nullptr) {
    with_bias<T, kKeys, true, kFirst>(s, scores, slot, warp_key, [&](float& x, float bias) {
      x = kRenorm ? fmaf(x, scores.scale, bias) : fmaf(bias, params.inverse_scale, x);
    });
  } else if constexpr (kRenorm) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) s[kFirst + i] *= scores.scale;
  }
  if (scores.mask.data != nullptr) {
    const uint32_t from = slot + scores.mask_at + (warp_key + lane / 4) * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 32 queries
#pragma unroll
      for (int row = 0; row < 2; ++row) {  // this thread's keys, 8 apart
        kept.add(2 * kSlot + half, row, load_shared_int(from + half * (kMaskBytes / 2) + row * 32) >> lane % 4 * 2);
      }
    }
  }
}

template <class Traits>
using KeptOfMask = KeptBits<Traits::kBlockM / kScoreRows>;

template <class Traits, bool kRenorm>
__device__ __forceinline__ void apply_backward_scores(float (&s)[Traits::kBlockM / 2], KeptOfMask<Traits>& kept,
                                                      const ScoredBackwardParams& params,
                                                      const typename Traits::Tiles& tiles, ScoreState& place,
                                                      int warp_key, float slope, int distance) {
  if (params.scores.alibi.slopes != nullptr) {
    add_alibi(s, -slope * params.inverse_scale, distance);
  }
  const Ring<0> ring = tiles.scores();
  const auto take = [&]<int kSlot>(std::integral_constant<int, kSlot>) {
    if (params.scores.stage_bytes > 0) barrier_wait(ring.full(place.stage), place.phase);
    apply_slot<typename Traits::T, Traits::kBlockN, kRenorm, kSlot>(
        s, kept, params, ring.tile(0) + place.stage * params.scores.stage_bytes, warp_key);
    if (params.scores.stage_bytes == 0) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(place.stage));
    place.advance();
  };
  static_assert(Traits::kBlockM <= 2 * kScoreRows);
  take(std::integral_constant<int, 0>());
  if constexpr (Traits::kBlockM > kScoreRows) take(std::integral_constant<int, 1>());
}

// The next tile of queries, whose numbers are in this stage.
template <class Traits, bool kMayRenorm>
__device__ __forceinline__ void take_backward_scores(float (&s)[Traits::kBlockM / 2], float (&dv)[Traits::kHeadDim / 2],
                                                     KeptOfMask<Traits>& kept, const ScoredBackwardParams& params,
                                                     const typename Traits::Tiles& tiles, int stage, ScoreState& place,
                                                     int warp_key, float slope, int distance) {
  if (!kMayRenorm || !has_renorm(tiles.stats_renorm(stage))) {
    apply_backward_scores<Traits, false>(s, kept, params, tiles, place, warp_key, slope, distance);
  } else {
    apply_backward_scores<Traits, true>(s, kept, params, tiles, place, warp_key, slope, distance);
    subtract_renorm(s, tiles.stats_renorm(stage), 1.f, params.inverse_scale);
    if constexpr (Traits::kDropout) {
      keep_nan(dv, s, tiles.stats_renorm(stage));
    }
  }
}

// fn(number of the first of two scores of a row, bits of a packed pair where dropout drops them, delta of their
// queries) over a fragment of dP^T; 16 keys a warp from key `warp_key` of the tile on.
// NOTE: 64 queries at a time, each behind a wait, which returns at once but for the first: ptxas moves nothing over
// that loop, and else spills 40 registers at head dim 64, because it prepares everything as early as it can.
template <class Traits, class Fn>
__device__ __forceinline__ void with_drops(const typename Traits::Tiles& tiles, const typename Traits::Place& place,
                                           int warp_key, const Fn& fn) {
  const auto ring = tiles.drops();
  const int lane = threadIdx.x % 32;
  const uint32_t words = ring.tile(place.stage) + warp_key * 8 + lane * 4;
  const uint32_t deltas = tiles.stats_delta(place.stage) + lane % 4 * 8;
#pragma unroll
  for (int first = 0; first < Traits::kBlockM; first += kScoreRows) {
    barrier_wait(ring.full(place.stage), place.phase);
    const uint32_t drops = load_shared_int(words + first / kScoreRows * kMaskBytes);
#pragma unroll
    for (int n = first / 8; n < (first + kScoreRows) / 8; ++n) {
      const float2 delta = load_shared2(deltas + n * 32);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int j = (2 * n + half) % 16;  // of a word's pairs
        fn(4 * n + 2 * half, spread_high_bits(drops << j), delta);
      }
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(ring.empty(place.stage));
}

// dS of P and dP; and of P what dropout leaves, and the mark of what is hidden.
template <class Traits>
__device__ __forceinline__ void drop(uint32_t (&p_frag)[Traits::kBlockM / 4], uint32_t (&ds_frag)[Traits::kBlockM / 4],
                                     const float (&dp)[Traits::kBlockM / 2], const typename Traits::Tiles& tiles,
                                     const typename Traits::Place& place, int warp_key, float ds_scale) {
  using T = typename Traits::T;
  with_drops<Traits>(tiles, place, warp_key, [&](int i, uint32_t dropped, float2 delta) {
    uint32_t& p = p_frag[i / 2];
    float p_x, p_y, kept_x, kept_y;
    unpack(p, p_x, p_y, T());
    p &= ~dropped | kSigns;
    unpack(p, kept_x, kept_y, T());
    const float x = fmaf(kept_x, dp[i], -p_x * delta.x), y = fmaf(kept_y, dp[i + 1], -p_y * delta.y);
    ds_frag[i / 2] = pack(x * ds_scale, y * ds_scale, T());
  });
}

}  // namespace flash_ext::sm90
