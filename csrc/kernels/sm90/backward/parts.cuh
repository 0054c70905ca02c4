// What the backward kernel is made of beside its two roles: shared memory, P and dS of a tile, stores, and the scale of
// dS in fp16.
//
// Called by kernel.cuh, producer.cuh, order.cuh, rows.cuh and backward_two_pass. Invariant: fragments are [keys,
// queries], as wgmma.cuh says for 64 rows.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/args.h"
#include "kernels/sm90/backward/config.h"
#include "kernels/sm90/backward/hidden.cuh"
#include "kernels/sm90/backward/products.cuh"
#include "kernels/sm90/backward/work.cuh"

namespace flash_ext::sm90 {

// P is at most 1: in fp16, where 2^-14 is the least normal number, it is kept as 2^10 P.
template <class T>
constexpr bool is_scaled = std::is_same_v<T, __half>;
template <class T>
constexpr float p_shift = is_scaled<T> ? 10.f : 0.f;

template <class T_, int kHeadDim_, Persistence kPersistence_ = Persistence::kOne,
          ScoreKind kScoreKind = ScoreKind::kNone, bool kPacked_ = false>
struct BackwardTraits {
  using T = T_;
  static constexpr bool kPacked = kPacked_;
  static constexpr bool kScored = is_scored(kScoreKind), kDropout = kScoreKind == ScoreKind::kDropout,
                        kSoftcap = kScoreKind == ScoreKind::kSoftcap;
  static_assert(kDropKeyBytes == 3 * DropoutDraws::kKeyBytes);
  // dP is issued behind the softmax. NOTE: beside P and P (1 - tanh^2) of 128 queries there are no registers for it:
  // bf16 spilled 16 to 90 bytes in all of twelve forms.
  static constexpr bool kLateDp = kSoftcap && kHeadDim_ <= 64;
  using DenseParams = std::conditional_t<kScored, ScoredBackwardParams,
                                         std::conditional_t<kSoftcap, CappedBackwardParams, BackwardParams>>;
  using Params = std::conditional_t<kPacked, PackedBackwardParams<DenseParams>, DenseParams>;
  using Work = std::conditional_t<kPacked, PackedKeyWork, KeyWork>;
  static constexpr bool kMayRenorm = !kScored && !kSoftcap;  // which scores see to themselves, and a softcap is not
  static constexpr Persistence kPersistence = kPersistence_;
  static constexpr bool kOrdered = kPersistence == Persistence::kOrdered,
                        kStored = kPersistence == Persistence::kStored;
  static constexpr bool kHasRanges = kPersistence == Persistence::kRanged;
  // NOTE: a softcap of packed sequences spilled 4 to 12 bytes (bf16), or its products waited for each other (fp16).
  // In order, three of the four warps that bring scores have other work.
  static_assert(!kPacked || ((kPersistence == Persistence::kOne || (kOrdered && !kScored)) && !kSoftcap));
  static constexpr BackwardShape kShape = backward_shape(kHeadDim_, kScoreKind);
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShape.block_m, kBlockN = kShape.block_n;
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kWorkBytes = kPacked && kOrdered ? kPackedKeyWorkBytes : kKeyWorkBytes;
  static constexpr BackwardSmem kSmem = backward_smem(kShape, kHeadDim, kWorkBytes);
  static constexpr int kQBytes = tile_bytes(kBlockM, kHeadDim), kKvBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kDsBytes = tile_bytes(kBlockN, kBlockM), kStatsBytes = kQueryStats * kBlockM * 4;
  static constexpr int kWarps = kShape.consumers * 4;
  // dQ of a warpgroup: 64 queries and all columns, or all queries and half of the columns.
  static constexpr int kDqCols = kShape.dq_cols(kHeadDim);
  static constexpr bool kSplitsQueries = kDqCols == kHeadDim;
  static constexpr bool kScaled = is_scaled<T>;
  // Tiles in which no pair is hidden have code of their own, but for kStored, which has few. NOTE: with scores or a
  // softcap at head dim 128, and with dropout in fp16 at 64, that spills 20 to 204 bytes.
  static constexpr bool kHasWholeStep = !kStored && (kMayRenorm || (kHeadDim <= 64 && !(kDropout && kScaled)));
  // NOTE: these find their rows anew, because keeping them spilled 8 bytes, and 88 with kStored; in others finding did.
  static constexpr bool kFindsRow = kHasRanges ? kScaled || kHeadDim > 64
                                               : (kScoreKind == ScoreKind::kScores && kScaled && kHeadDim <= 64) ||
                                                     (kPacked && kScored);
  // NOTE: these number their tiles of dQ, because an address spilled 60 bytes.
  static constexpr bool kNumbersDq = (kHasRanges && kScaled && kHeadDim <= 64) || (kPacked && kScored);
  static constexpr float kPShift = p_shift<T>;
  static constexpr int kStagingBytes = 16 * kDqCols * 4;
  static_assert(kStagingBytes >= 16 * kPanels * kPanelBytes, "a warp's rows of dK fit where its dQ was");
  static constexpr int kKSteps = kStored ? 0 : kShape.k_steps;  // NOTE: beside stores of dQ 4 and 8 bytes spilled
  using Place = RingState<kShape.stages>;
  using DsState = RingState<kShape.ds_stages>;
  // Whoever has read dS says so; else the order of the products does (kernel.cuh).
  static constexpr bool kReturnsDs = kShape.defers || kShape.ds_stages == 1;

  // Barriers: K, V, then those of the rings, of dS, and with scores of theirs.
  struct Tiles {
    uint32_t base;
    // Of a stage of Q, in the order of QueryStat.
    __device__ __forceinline__ uint32_t stats(int stage) const { return base + kSmem.stats + stage * kStatsBytes; }
    __device__ __forceinline__ uint32_t stats_lse(int stage) const { return stats(stage) + kLseStat * kBlockM * 4; }
    __device__ __forceinline__ uint32_t stats_renorm(int stage) const {
      return stats(stage) + kRenormStat * kBlockM * 4;
    }
    __device__ __forceinline__ uint32_t stats_delta(int stage) const { return stats(stage) + kDeltaStat * kBlockM * 4; }
    // Of a warp: its part of dQ in float, or 16 rows of dK or dV.
    __device__ __forceinline__ uint32_t staging(int warp) const { return base + kSmem.dq + warp * kStagingBytes; }
    // fp16: a float of each warp.
    __device__ __forceinline__ uint32_t maxima() const { return base + kSmem.maxima; }
    __device__ __forceinline__ Ring<kKvBytes> k() const { return {base + kSmem.k, base + kSmem.barriers}; }
    __device__ __forceinline__ Ring<kKvBytes> v() const { return {base + kSmem.v, base + kSmem.barriers + 16}; }
    __device__ __forceinline__ Ring<kQBytes> q() const { return {base + kSmem.q, base + kSmem.barriers + 32}; }
    __device__ __forceinline__ Ring<kQBytes> d_out() const {
      return {base + kSmem.d_out, base + kSmem.barriers + 32 + kShape.stages * 16};
    }
    __device__ __forceinline__ Ring<kDsBytes> ds() const {
      return {base + kSmem.ds, base + kSmem.barriers + 32 + kShape.stages * 32};
    }
    // kScored: slots of bias and mask, whose size is a parameter.
    __device__ __forceinline__ Ring<0> scores() const {
      return {base + kSmem.scores, base + kSmem.barriers + 32 + kShape.stages * 32 + kShape.ds_stages * 16};
    }
    // kDropout: Philox' keys, a copy of each warp that draws; what is dropped, with stages of Q.
    __device__ __forceinline__ uint32_t drop_keys(int warp) const {
      return base + kSmem.drop_keys + warp * DropoutDraws::kKeyBytes;
    }
    __device__ __forceinline__ Ring<kShape.drop_bytes()> drops() const {
      return {base + kSmem.drops,
              base + kSmem.barriers + 32 + kShape.stages * 32 + kShape.ds_stages * 16 + kScoreStages * 16};
    }
    // kOrdered: the staging of all warps as one, by parity of the tile of queries; which that is, of a stage of Q;
    // tiles of keys that are published; whether the one whose K is there meets a renormalised row.
    __device__ __forceinline__ uint32_t dq_full(int parity) const { return base + kSmem.walk + parity * 8; }
    __device__ __forceinline__ uint32_t dq_empty() const { return base + kSmem.walk + 16; }
    __device__ __forceinline__ uint32_t m_block(int stage) const { return base + kSmem.walk + 24 + stage * 4; }
    __device__ __forceinline__ Ring<kWorkBytes> works() const {
      return {base + kSmem.walk + 64, base + kSmem.walk + 32};
    }
    __device__ __forceinline__ uint32_t meets_renorm() const { return base + kSmem.walk + 64 + 2 * kWorkBytes; }
    // kPacked and Persistence::kOne: the block's tile of keys.
    __device__ __forceinline__ uint32_t packed_work() const { return base + kSmem.walk + 64; }
  };
};

// Persistence::kOne of packed sequences: what thread 0 has put there before any warp goes its way. NOTE: whoever has
// few registers reads it again rather than keeping it.
template <class Traits>
__device__ __forceinline__ PackedKeyWork packed_work(const typename Traits::Tiles& tiles) {
  PackedKeyWork work;
  load_shared(work, tiles.packed_work());
  return work;
}
// work: where that lies in shared memory.
__device__ __forceinline__ SequenceEdges packed_edges(uint32_t work) {
  SequenceEdges edges;
  load_shared(edges, work + static_cast<uint32_t>(offsetof(PackedKeyWork, edges)));
  return edges;
}

// A thread's first row of a tile of 64 rows a warpgroup; the compiler does not know that it was known.
__device__ __forceinline__ int find_row(int consumer) {
  const unsigned thread = no_hoist(threadIdx.x);
  return consumer * 64 + static_cast<int>(thread % 128 / 32 * 16 + thread % 32 / 4);
}

// fn(two scores of a row, two numbers of their queries) over a fragment of S^T; `numbers` is where they lie.
template <int kCount, class Fn>
__device__ __forceinline__ void with_queries(float (&c)[kCount], uint32_t numbers, const Fn& fn) {
  numbers += threadIdx.x % 4 * 8;
#pragma unroll
  for (int n = 0; n < kCount / 4; ++n) {
    const float2 pair = load_shared2(numbers + n * 32);
    fn(c[4 * n], c[4 * n + 1], pair, 4 * n);
    fn(c[4 * n + 2], c[4 * n + 3], pair, 4 * n + 2);
  }
}

constexpr float kNoRenorm = -kMinusInf;  // as kRenormStat

// Whether a tile of queries has one whose lse is far from 0. numbers: its kRenormStat.
__device__ __forceinline__ bool has_renorm(uint32_t numbers) { return load_shared_float(numbers) != kNoRenorm; }

// Whether one of the tiles [first, last) of queries of `group_size` heads is; asked by a whole warp. stats: the first
// head's.
template <int kBlock, int kUnroll = 4>
__device__ __forceinline__ bool any_renorm(const float* stats, int group_size, int m_blocks, int first, int last) {
  bool renorm = false;
  for (int member = 0; member < group_size; ++member) {
#pragma unroll kUnroll
    for (int m = first + static_cast<int>(threadIdx.x) % 32; m < last; m += 32) {
      renorm |= stats[(int64_t{member} * m_blocks + m) * (kQueryStats * kBlock) + kRenormStat * kBlock] != kNoRenorm;
    }
  }
  return __any_sync(~0u, renorm);
}

// The same of a tile of keys. NOTE: asked of each tile of queries, also ahead, it was 2 to 7 % at head dim 128.
template <int kBlock, class Work>
__device__ __forceinline__ bool any_renorm(const BackwardParams& params, const Work& work) {
  return any_renorm<kBlock>(params.stats + work.first_tile(params, 0) * (kQueryStats * kBlock), params.group_size,
                            params.m_blocks, work.first_m, work.last_m);
}

// Its scores, `factor` times which are natural ones, become their distance from the largest, in units of q k^T.
// NOTE: 32 queries at a time, or at head dim 64 12 to 20 bytes are spilled: ptxas moves nothing over __syncwarp.
template <int kCount>
__device__ __forceinline__ void subtract_renorm(float (&s)[kCount], uint32_t numbers, float factor,
                                                float inverse_scale) {
  with_queries(s, numbers, [&](float& x, float& y, float2 renorm, int i) {
    if (i % 16 == 0) __syncwarp();
    x = fminf(fmaf(x, factor, renorm.x), 0.f) * inverse_scale;
    y = fminf(fmaf(y, factor, renorm.y), 0.f) * inverse_scale;
  });
}

// P of a query whose lse is no number is NaN, and where dropout removes it the 0 that is multiplied would hide that
// from dV. numbers: the renormalised ones of a tile of queries, whose S^T this is.
template <int kAcc, int kCount>
__device__ __forceinline__ void keep_nan(float (&dv)[kAcc], float (&s)[kCount], uint32_t numbers) {
  bool is_nan = false;
  with_queries(s, numbers,
               [&](float, float, float2 renorm, int) { is_nan |= renorm.x != renorm.x || renorm.y != renorm.y; });
  if (!__any_sync(~0u, is_nan)) return;
#pragma unroll
  for (int i = 0; i < kAcc; ++i) dv[i] *= std::numeric_limits<float>::quiet_NaN();
}

// P (1 - tanh^2) of a pair of capped scores.
template <class T>
__device__ __forceinline__ uint32_t pack_sloped(float p_x, float p_y, float s_x, float s_y,
                                                const SoftcapParams& softcap) {
  return pack(p_x * slope_of(s_x, softcap), p_y * slope_of(s_y, softcap), T());
}

// P of S^T, packed; fn(two of P, their scores, number of the pair). lse: where the queries'
// numbers lie.
template <class Traits, int kCount, class Fn>
__device__ __forceinline__ void probabilities(uint32_t (&p)[kCount / 2], float (&s)[kCount],
                                              const typename Traits::Params& params, uint32_t lse, const Fn& fn) {
  with_queries(s, lse, [&](float s_x, float s_y, float2 minus_lse, int i) {
    const float x = exp2_fast(fmaf(s_x, params.to_log2, minus_lse.x));
    const float y = exp2_fast(fmaf(s_y, params.to_log2, minus_lse.y));
    p[i / 2] = pack(x, y, typename Traits::T());
    fn(x, y, s_x, s_y, i / 2);
  });
}

// dS = P o (dP - delta) of two queries. P is taken as it was rounded for dV, as eager attention does: in float, beside
// dP, it leaves no registers for K. bf16: dP - delta is rounded, too, and so multiplied two at a time, which is 40
// instructions fewer a tile of queries at head dim 128. NOTE: with scores that spills 52 bytes at head dim 64,
// with a softcap 44.
template <class Traits>
__device__ __forceinline__ uint32_t ds_of(uint32_t p, float dp_x, float dp_y, float2 delta, float ds_scale) {
  using T = typename Traits::T;
  if constexpr (!Traits::kScaled && !Traits::kScored && !Traits::kSoftcap) {
    return multiply_bf16(p, pack(dp_x - delta.x, dp_y - delta.y, T()));
  } else {
    float p_x, p_y;
    unpack(p, p_x, p_y, T());
    const float x = Traits::kScaled ? fmaf(dp_x, ds_scale, -delta.x * ds_scale) : dp_x - delta.x;
    const float y = Traits::kScaled ? fmaf(dp_y, ds_scale, -delta.y * ds_scale) : dp_y - delta.y;
    return pack(p_x * x, p_y * y, T());
  }
}

// 16 rows of a warp to a tile of kRows rows in shared memory.
template <int kRows, int kCount>
__device__ __forceinline__ void store_packed(const uint32_t (&packed)[kCount], uint32_t tile, int warp_row) {
  const int lane = threadIdx.x % 32;
  const int row = warp_row + lane % 16;
#pragma unroll
  for (int k = 0; k < kCount / 4; ++k) {
    const uint32_t* r = packed + 4 * k;
    stmatrix_x4(tile + tile_offset(kRows, row, 16 * k + lane / 16 * 8), r[0], r[1], r[2], r[3]);
  }
}

// 16 rows of a warp to its staging, as TMA takes them from there.
template <class T, int kCount>
__device__ __forceinline__ void stage_gradient(const float (&c)[kCount], float factor, uint32_t staging) {
  uint32_t packed[kCount / 2];
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) packed[i] = pack(c[2 * i] * factor, c[2 * i + 1] * factor, T());
  store_packed<16>(packed, staging, 0);
}

// dK or dV of one warp: 16 rows, through the warp's staging, then by TMA.
template <class Traits>
__device__ __forceinline__ void store_gradient(const float (&c)[Traits::kHeadDim / 2], float factor, uint32_t staging,
                                               const TensorMap& map, BoxStart at) {
  if (elect_one()) bulk_wait_read();
  __syncwarp();
  stage_gradient<typename Traits::T>(c, factor, staging);
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
#pragma unroll
    for (int panel = 0; panel < Traits::kPanels; ++panel) {
      tma_store(&map.map, staging + panel * panel_size(16), at);
      at.col += kPanelCols;
    }
    bulk_commit();
  }
}

constexpr int kConsumersBarrier = 1;  // named

// The power of two that takes what is at most `bound` below 2^15.
__device__ __forceinline__ float power_below(float bound) {
  if (!(bound > 0.f) || bound > 3e38f) return 1.f;
  int exponent;
  frexpf(bound, &exponent);  // bound < 2^exponent
  return exp2f(static_cast<float>(min(max(15 - exponent, -100), 100)));
}

// The power of two by which dS is multiplied before it becomes fp16, and what it is made of: |dS| <= |dO| |V| + |delta|
// stays below 2^15.
template <class Traits>
__device__ __forceinline__ float scale_of_ds(const BackwardParams& params, const typename Traits::Work& work,
                                             const typename Traits::Tiles& tiles) {
  const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  __half2 most = __float2half2_rn(0.f);
  for (int panel = 0; panel < Traits::kPanels; ++panel) {
    const uint32_t rows = tiles.v().tile(0) + panel * panel_size(Traits::kBlockN) + warp * 16 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = load_shared4(rows + (i * 32 + lane) * 16);
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        most = __hmax2(most, __habs2(reinterpret_cast<const __half2&>(word)));
      }
    }
  }
  float v_max = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v_max = fmaxf(v_max, __shfl_xor_sync(~0u, v_max, step));
  if (lane == 0) store_shared1(tiles.maxima() + warp * 4, v_max);
  named_barrier_sync(kConsumersBarrier, Traits::kWarps * 32);
#pragma unroll
  for (int i = 0; i < Traits::kWarps; i += 2) {
    const float2 pair = load_shared2(tiles.maxima() + i * 4);
    v_max = fmaxf(v_max, fmaxf(pair.x, pair.y));
  }
  float d_out = 0.f, delta = 0.f;
  for (int row = work.row; row < work.row + params.group_size; ++row) {
    d_out = fmaxf(d_out, params.bounds[2 * row]);
    delta = fmaxf(delta, params.bounds[2 * row + 1]);
  }
  return power_below(v_max * sqrtf(static_cast<float>(params.head_dim_v)) * d_out + delta);
}

}  // namespace flash_ext::sm90
