// Softcap, bias, ALiBi and mask of the forward and of the two-pass backward: bias and mask from global memory, whatever
// their strides, through a ring in shared memory to the accumulators of S = Q K^T.
//
//   s = cap * tanh(scale * q k^T / cap) + bias - slope |i + offset - j|    -inf where the mask holds 0
//
// in natural units; with a mask alone s stays q k^T.
// Three warps beside the producer copy a tile [query][key] of each for every tile of keys, as many ahead as there is
// room; where the rows are all the same the tile is one row. Called by forward/kernel.cuh, backward/scores.cuh and
// backward_two_pass; parameters are made by run_scores.cuh. Invariant: nothing outside of a tensor's rows is read; what
// stands in a tile for that is 0 and lies outside of the band, too. A stage's full barrier has two arrivals of each
// loading thread, one of its own stores and one of its copies, its empty barrier one of each consumer warp.
#pragma once

#include <algorithm>

#include "core/mask_ranges.h"
#include "core/score_mod.h"
#include "kernels/sm90/dropout.cuh"
#include "kernels/sm90/forward/work.cuh"
#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/softcap.cuh"
#include "kernels/sm90/softmax.cuh"

namespace flash_ext::sm90 {

// Strides in bytes; data null: absent.
struct ScoreView {
  const char* data;
  int64_t col, row, head, b0, b1;
  bool vectors;  // every chunk of 16 bytes is aligned and contiguous

  __device__ __forceinline__ const char* of(int of_head, int of_b0, int of_b1) const {
    return data + of_head * head + of_b0 * b0 + of_b1 * b1;
  }
  template <class Work>
  __device__ __forceinline__ const char* of(const Work& work) const {
    return of(work.head, work.b0, work.b1);
  }
};

// ALiBi (arXiv:2108.12409): slopes of heads, null: absent. Strides of elements.
struct AlibiView {
  const float* slopes;
  int64_t head, b0, b1;
  int offset;  // of the diagonal

  __device__ __forceinline__ float of(int of_head, int of_b0, int of_b1) const {
    return slopes == nullptr ? 0.f : __ldg(slopes + of_head * head + of_b0 * b0 + of_b1 * b1);
  }
};

struct ScoreParams {
  ScoreView bias, mask;
  AlibiView alibi;
  SoftcapParams softcap;  // in natural units
  float scale;            // of q k^T, with a bias or slopes; 1 with a softcap, which it is part of
  bool bias_is_float;
  int mask_at;              // offset in a stage, behind the bias
  int stage_bytes, stages;  // 0 bytes: nothing is brought
  DropoutParams dropout;
  MaskRanges ranges;  // of the tiles that blocks are given
};

struct ScoredParams : ForwardParams {
  ScoreParams scores;
};

__device__ __forceinline__ const DropoutParams& dropout_of(const ScoredParams& params) { return params.scores.dropout; }
__device__ __forceinline__ DropoutParams dropout_of(const ForwardParams&) { return {nullptr, 0, 1.f, {}}; }

constexpr int kScoreLoaders = 96;  // threads

struct ScoreState {
  int stages;
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ explicit ScoreState(int stages_) : stages(stages_) {}
  // The one after `count` others.
  __device__ __forceinline__ ScoreState(int stages_, uint32_t count)
      : stages(stages_), stage(static_cast<int>(count % stages_)), phase(count / stages_ % 2) {}
  __device__ __forceinline__ explicit ScoreState(const ScoredParams& params) : ScoreState(params.scores.stages) {}
  __device__ __forceinline__ explicit ScoreState(const ForwardParams&) : ScoreState(0) {}  // no such ring
  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---- loading --------------------------------------------------------------------------------------------------------

// A chunk of 16 bytes element by element, of which there are `count`; the others become 0.
template <int kSize>
__device__ __forceinline__ void gather_chunk(uint32_t target, const char* from, int64_t col, int count) {
#pragma unroll 1
  for (int first = 0; first < 16 / kSize; first += 4 / kSize) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4 / kSize; ++i) {
      uint32_t element = 0;
      if (first + i < count) {
        if constexpr (kSize == 1) element = *reinterpret_cast<const uint8_t*>(from);
        if constexpr (kSize == 2) element = *reinterpret_cast<const uint16_t*>(from);
        if constexpr (kSize == 4) element = *reinterpret_cast<const uint32_t*>(from);
      }
      word |= element << i * kSize * 8;
      from += col;
    }
    store_shared1(target + first * kSize, __uint_as_float(word));
  }
}

// A tile of kRows rows, or the one row that stands for all, of elements of kSize bytes. from: of the head.
template <int kRows, int kCols, int kSize>
__device__ __forceinline__ void copy_scores(uint32_t tile, const ScoreView& view, const char* from, int first_row,
                                            int first_col, int len_q, int len_k) {
  constexpr int kPitch = score_pitch(kCols, kSize), kChunks = kCols * kSize / 16, kPerChunk = 16 / kSize;
  constexpr int kStep = kScoreLoaders / kChunks;  // rows a pass; where the division has a rest, some threads stay idle
  const int thread = no_hoist(static_cast<int>(threadIdx.x) - 32);
  const int first = thread / kChunks, col = first_col + thread % kChunks * kPerChunk;
  if (first >= kStep) return;
  const int present = view.row == 0 ? 1 : kRows;
  const int rows = min(view.row == 0 ? 1 : len_q - first_row, present);
  const int count = min(max(len_k - col, 0), kPerChunk);  // elements that there are
  const char* source = from + (first_row + first) * view.row + col * view.col;
  const int64_t step = kStep * view.row;
  uint32_t target = tile + first * kPitch + thread % kChunks * 16;
  if (view.vectors) {
#pragma unroll 4
    for (int row = first; row < present; row += kStep) {
      const bool inside = row < rows && count > 0;
      cp_async_16(target, inside ? source : from, inside ? count * kSize : 0);
      source += step;
      target += kStep * kPitch;
    }
    return;
  }
  // Chunks that begin anywhere: out of five words where all lie inside the row, else element by element.
  constexpr int kBatch = 2;                                                        // on their way together
  const int before = min(col, 16) * kSize, behind = min(len_k - col, 32) * kSize;  // bytes of the row, near enough
#pragma unroll 1
  for (int row = first; row < present; row += kBatch * kStep) {
    uint32_t words[kBatch][5];
    bool whole[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const char* const start = source + j * step;
      const int shift = static_cast<int>(reinterpret_cast<uint64_t>(start)) & 3;
      whole[j] = row + j * kStep < rows && view.col == kSize && before >= shift && behind >= 20 - shift;
      if (whole[j]) {
#pragma unroll
        for (int i = 0; i < 5; ++i) words[j][i] = reinterpret_cast<const uint32_t*>(start - shift)[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (whole[j]) {
        const int bits = (static_cast<int>(reinterpret_cast<uint64_t>(source)) & 3) * 8;
        uint32_t* const w = words[j];
        store_shared(target, uint4{__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                                   __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits)});
      } else if (row + j * kStep < present) {
        gather_chunk<kSize>(target, source, view.col, row + j * kStep < rows ? count : 0);
      }
      source += step;
      target += kStep * kPitch;
    }
  }
}

// What the three warps do: the producer's tiles in the producer's order.
template <class Traits>
__device__ __forceinline__ void load_scores(const typename Traits::Params& params,
                                            const typename Traits::Rings& rings) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  const ScoreParams& scores = params.scores;
  typename Traits::WorkState w;
  ScoreState place(params);
  int len_q = params.len_q, len_k = params.band.len_k;
  while (true) {
    typename Traits::Work work;
    barrier_wait(rings.works.full(w.stage), w.phase);
    load_shared(work, rings.works.tile(w.stage));
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(rings.works.empty(w.stage));
    w.advance();
    if (!work.any()) break;
    if (scores.stage_bytes == 0) continue;
    if constexpr (Traits::kPacked) {
      len_q = work.len_q;
      len_k = work.band.len_k;
    }
    for (int n = work.last_n - 1; n >= work.first_n; --n) {
      barrier_wait(rings.scores.empty(place.stage), place.phase ^ 1);
      const uint32_t tile = rings.scores.tile(0) + place.stage * scores.stage_bytes;
      const int first_row = work.first_query, first_col = n * kBlockN;
      if (scores.bias.data != nullptr) {
        const char* const from = scores.bias.of(work);
        if (scores.bias_is_float) {
          copy_scores<kBlockM, kBlockN, 4>(tile, scores.bias, from, first_row, first_col, len_q, len_k);
        } else {
          copy_scores<kBlockM, kBlockN, 2>(tile, scores.bias, from, first_row, first_col, len_q, len_k);
        }
      }
      if (scores.mask.data != nullptr) {
        copy_scores<kBlockM, kBlockN, 1>(tile + scores.mask_at, scores.mask, scores.mask.of(work), first_row, first_col,
                                         len_q, len_k);
      }
      barrier_arrive_copied(rings.scores.full(place.stage));
      barrier_arrive(rings.scores.full(place.stage));
      place.advance();
    }
  }
  cp_async_wait_all();
}

// ---- use ------------------------------------------------------------------------------------------------------------

// Row minus column of number i of a fragment, less those of its first number.
__device__ __forceinline__ constexpr float away(int i) { return static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2); }

// A fragment of S or S^T; distance: of its first number, row - column + offset or the negative of it.
template <int kCount>
__device__ __forceinline__ void add_alibi(float (&s)[kCount], float minus_slope, int distance) {
  const auto first = static_cast<float>(distance);
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = fmaf(minus_slope, fabsf(first + away(i)), s[i]);
}

// fn(score, its bias) over S, 16 rows a warp from row `warp_row` of the tile on. kTransposed: over at most 64
// columns of S^T from number kFirst on; `slot` is [query][key] all the same.
template <class T, int kKeys, bool kTransposed, int kFirst = 0, int kCount, class Fn>
__device__ __forceinline__ void with_bias(float (&s)[kCount], const ScoreParams& params, uint32_t slot, int warp_row,
                                          const Fn& fn) {
  const int lane = threadIdx.x % 32, step = params.bias.row != 0;
  constexpr int kTiles = kTransposed ? std::min((kCount - kFirst) / 4, 8) : kKeys / 8;  // of 8 columns, 4 numbers each
  static_assert(kFirst + 4 * kTiles <= kCount);
  if (params.bias_is_float) {
    constexpr int kPitch = score_pitch(kKeys, 4);
    if constexpr (kTransposed) {
      const uint32_t from = slot + lane % 4 * 2 * kPitch * step + (warp_row + lane / 4) * 4;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          fn(s[kFirst + 4 * n + i], load_shared_float(from + (8 * n + i % 2) * kPitch * step + i / 2 * 32));
        }
      }
    } else {
      const uint32_t from = slot + (warp_row + lane / 4) * kPitch * step + lane % 4 * 8;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 bias = load_shared2(from + half * 8 * kPitch * step + n * 32);
          fn(s[kFirst + 4 * n + 2 * half], bias.x);
          fn(s[kFirst + 4 * n + 2 * half + 1], bias.y);
        }
      }
    }
  } else {
    constexpr int kPitch = score_pitch(kKeys, 2);
    const uint32_t from = kTransposed
                              ? slot + (lane % 8 + lane / 16 * 8) * kPitch * step + warp_row * 2 + lane / 8 % 2 * 16
                              : slot + (warp_row + lane % 16) * kPitch * step + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t words[4];
      if constexpr (kTransposed) {
        ldmatrix_x4_trans(words, from + 8 * n * kPitch * step);
      } else {
        ldmatrix_x4(words, from + n * 16);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float bias[2];
        unpack(words[i], bias[0], bias[1], T());
        fn(s[kFirst + 4 * n + 2 * i], bias[0]);
        fn(s[kFirst + 4 * n + 2 * i + 1], bias[1]);
      }
    }
  }
}

// A softcap, or in its place a ScoreFunction (core/score_mod.h) of a call whose softcap is 1. keep(slope): called with
// slope(i), its derivative at number i.
template <class T, class Function, bool kTransposed, bool kCapsNear, int kCount, class Keep>
__device__ __forceinline__ void cap_or_call(float (&s)[kCount], const SoftcapParams& softcap, int distance,
                                            const Keep& keep) {
  if constexpr (std::is_void_v<Function>) {
    cap_scores<T, kCapsNear>(s, softcap);
    keep([&](int i) { return slope_of(s[i], softcap); });
  } else {
    static_assert(ScoreFunction<Function>);
    float slope[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float at = (static_cast<float>(distance) + away(i)) * (kTransposed ? -1.f : 1.f);
      const float score = s[i] * softcap.to_tanh;
      slope[i] = Function::slope(score, at);
      s[i] = Function::value(score, at);
    }
    keep([&](int i) { return slope[i]; });
  }
}

// A softcap, a bias and slopes. S or S^T, 16 rows a warp from row `warp_row` of the tile on. distance: of a thread's
// first number, as above. Function, keep: of cap_or_call.
template <class T, int kKeys, bool kTransposed, bool kCapsNear, class Function, int kCount, class Keep>
__device__ __forceinline__ void add_scores(float (&s)[kCount], const ScoreParams& params, uint32_t slot, int warp_row,
                                           float slope, int distance, const Keep& keep) {
  if (params.softcap.cap != 0.f) {
    cap_or_call<T, Function, kTransposed, kCapsNear>(s, params.softcap, distance, keep);
  }
  if (params.bias.data != nullptr) {
    with_bias<T, kKeys, kTransposed>(s, params, slot, warp_row,
                                     [&](float& x, float bias) { x = fmaf(x, params.scale, bias); });
  }
  if (params.alibi.slopes != nullptr) {
    if (params.bias.data == nullptr) {
#pragma unroll
      for (float& x : s) x *= params.scale;
    }
    add_alibi(s, -slope, distance);
  }
}

// S, 16 rows a warp from row `warp_row` of the tile on. distance: of a thread's first number, as above.
template <class T, int kCols, bool kCapsNear, class Function>
__device__ __forceinline__ void apply_scores(float (&s)[kCols / 2], const ScoreParams& params, uint32_t stage,
                                             int warp_row, float slope, int distance) {
  const int lane = threadIdx.x % 32;
  add_scores<T, kCols, false, kCapsNear, Function>(s, params, stage, warp_row, slope, distance, [](const auto&) {});
  if (params.mask.data != nullptr) {
    constexpr int kPitch = score_pitch(kCols, 1);
    const int step = params.mask.row != 0;
    const uint32_t from = stage + params.mask_at + (warp_row + lane / 4) * kPitch * step + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t bytes = load_shared_16(from + half * 8 * kPitch * step + n * 8);
        float* const x = s + 4 * n + 2 * half;
        if ((bytes & 0xFF) == 0) x[0] = kMinusInf;
        if ((bytes & 0xFF00) == 0) x[1] = kMinusInf;
      }
    }
  }
}

// The next stage: applied to S, or only handed back.
template <class T, int kCols, bool kCapsNear, class Function, class Ring>
__device__ __forceinline__ void take_scores(float (&s)[kCols / 2], const ScoreParams& params, const Ring& ring,
                                            ScoreState& place, int warp_row, float slope, int distance) {
  if (params.stage_bytes > 0) barrier_wait(ring.full(place.stage), place.phase);
  apply_scores<T, kCols, kCapsNear, Function>(s, params, ring.tile(0) + place.stage * params.stage_bytes, warp_row,
                                              slope, distance);
  if (params.stage_bytes == 0) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(place.stage));
  place.advance();
}
template <class Ring>
__device__ __forceinline__ void skip_scores(const ScoreParams& params, const Ring& ring, ScoreState& place) {
  if (params.stage_bytes == 0) return;
  barrier_wait(ring.full(place.stage), place.phase);
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(place.stage));
  place.advance();
}

}  // namespace flash_ext::sm90
