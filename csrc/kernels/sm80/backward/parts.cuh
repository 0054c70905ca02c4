// What the backward kernels are made of beside tiles, products and scores: their traits and scratch, fragments of S^T,
// and the scale of dS in fp16.
//
// Called by steps.cuh, backward_single_tile/kernel.cuh, bias_gradient/kernel.cuh, renormalise.cuh and run.cuh.
// Invariant: fragments are [keys, queries], kM rows of 16 keys a warp; every sum runs in an order that depends on
// nothing but the shapes, but for dQ's without turns.
#pragma once

#include <cmath>

#include "core/mask_ranges.h"
#include "core/score_kind.h"
#include "core/score_mod.h"
#include "core/tile_schedule.h"
#include "gpu/tensor_map.h"
#include "gpu/warp.cuh"
#include "kernels/sm80/backward/long_sums.cuh"
#include "kernels/sm80/backward/renormalised_rows.cuh"
#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/score.cuh"

namespace flash_ext::sm80 {

// Scratch in the workspace. What lies from `dq_semaphore` to the end of sums must be zero before the kernel runs.
// Packed, what is [b, h_q, s_q] here is [h_q, rows_q], and what has blocks of a sequence in it is [h_q,
// most_packed_tiles], of which a sequence's begin at first_tile.
struct BackwardScratch {
  float* inverse = nullptr;  // [b, h_q, s_q], 1 / sum of P, where renormalise.cuh runs
  float* shift = nullptr;    // [b, h_q, s_q], there, too: lse, or a renormalised row's largest score
  float2* renorm = nullptr;  // [b, h_q, s_q], with finds_renorm_rows: of renormalised rows, see renormalised_rows.cuh
  // What P of a row takes beside lse: inverse, or, with finds_renorm_rows, renorm, which has two numbers a row.
  const float* beside_lse = nullptr;
  int beside_lse_size = 1;
  float* delta = nullptr;       // [b, h_q, s_q]
  float* slopes = nullptr;      // [b, h_q, n_blocks], with dalibi
  int* dq_semaphore = nullptr;  // [b, h_q, m_blocks, warps] and one more, the counter of tiles; when deterministic
  float* bounds = nullptr;      // [b, h_q, 2], fp16: cuda::delta
  float* dq_accum = nullptr;    // [b, h_q, s_q, d], with dq that is a sum
  float* sums = nullptr;        // [tiles of keys, accumulators, threads], long_sums.cuh
  int64_t m_blocks = 0;
  int64_t zeroed_bytes = 0;
  int64_t bytes = 0;
  float* bias_partial = nullptr;       // bias_partial_elements(), with dbias
  float* zeros = nullptr;              // [d_v], float with one key
  const float* d_lse = nullptr;        // [b, h_q, s_q], where delta is without it, see is_dlse_apart
  bool direct_dbias = false;           // no dimension of the bias is broadcast: the main kernel writes its gradient
  cuda::TensorMap dbias_map;           // of bias_boxes.cuh
  bool adds_dbias = false;             // to what is there
  bool direct_dq = false;              // one tile of keys: dQ is written, see dq_accumulate.cuh
  int first_batch = 0;                 // of this launch
  PackedTile* tiles = nullptr;         // packed: list of tiles of keys
  PackedTile* renorm_tiles = nullptr;  // ... and of queries, of renormalise.cuh
  int64_t rows = 0;                    // of a head in delta and what is laid out like it
  MaskRange* ranges_data = nullptr;    // of tiles of keys
  MaskRanges ranges;                   // the same, where finds_ranges
};

// kScoreKind: kNone, kDropout (16-bit types, no row is renormalised) or kAny. NOTE: code for what a call does not have
// is in its way: a jump over it takes a warp about 70 clocks, because the instructions behind it are not there yet.
// Dropout alone, as in training, had a dozen a tile of queries.
template <class Element_, int kHeadDim_, bool kSmall_, ScoreKind kScoreKind_>
struct BackwardTraits {
  using Element = Element_;
  using Frag = Fragments<Element>;
  using T = typename Frag::Storage;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ScoreKind kScoreKind = kScoreKind_;
  static constexpr bool kSmall = kSmall_, kPlain = kScoreKind == ScoreKind::kNone,
                        kGeneral = kScoreKind == ScoreKind::kAny;
  static constexpr BackwardShape kShape = backward_shape(sizeof(T), kHeadDim, kSmall, kPlain);
  static constexpr int kBlockM = kShape.tile.block_m, kBlockN = kShape.tile.block_n;
  static constexpr int kWarps = kShape.tile.warps, kThreads = kWarps * 32;
  static constexpr int kStages = kShape.stages;
  static constexpr bool kDeferred = kShape.deferred();
  static constexpr bool kDirectDq = kHeadDim <= 64;        // where direct_dq may be; NOTE: with more ptxas spills
  static constexpr int kM = kShape.key_rows / 16;          // fragments of 16 keys of a warp
  static constexpr int kAccumulators = kM * kHeadDim / 2;  // of dK or dV in a thread
  static constexpr int kDqWarpsM = kShape.dq_warps_m, kDqWarpsN = kShape.dq_warps_n;
  static constexpr int kFirstDqWarp = kWarps - kDqWarpsM * kDqWarpsN;
  static constexpr int kDqM = kBlockM / kDqWarpsM / 16;
  static constexpr int kDqN = kHeadDim / kDqWarpsN / 8;
  // Columns of 8 at once, fewer where registers would spill.
  static constexpr bool kTight = sizeof(T) == 4 && (kHeadDim == 96 || kHeadDim > 128);
  static constexpr bool kTightHalf = std::is_same_v<Element, Fp16> && kHeadDim == 128;
  static constexpr int kDqPart = kTight ? 2 : kSmall ? kDqN : kTightHalf ? (kGeneral ? 4 : 2) : kDqN;
  // Of dV and dK. NOTE: those of FragmentsTf32 spilled 4 to 12 bytes on 9.0, and 40 and 280 of small tiles on 8.0.
  static constexpr bool kTightSums = Frag::kSplit && kHeadDim > 128 && (kSmall || kComputeCapability >= 90);
  using Sums = std::conditional_t<kTightSums, StepSums<1, kSmall && (kHeadDim > 192) ? 0 : 1>, void>;
  // See multiply_by_p. NOTE: in the plain kernel of head dimension 128 it was 2 % slower, in the other one 8.0 spilled.
  static constexpr bool kPacksDs =
      std::is_same_v<Element, Bf16> && (kHeadDim <= 64 || (!kPlain && kComputeCapability >= 90));
  // Whether a tile has hidden pairs is asked when dS is there. NOTE: asked before, the one of 8.0 spilled 12 bytes.
  static constexpr bool kAsksLate = std::is_same_v<Element, Bf16> && kHeadDim == 128 && kGeneral && !kPacksDs;
  // Whether queries beyond the last are hidden, and dS of hidden pairs is cleared. NOTE: on 8.0 12 and 544 bytes were
  // spilled.
  static constexpr bool kClearsHidden = !(kTight && kComputeCapability < 90);
  static constexpr bool kSendsDbias = std::is_same_v<Element, Bf16> && kM == 2 && !kSmall && kGeneral;
  static_assert(kBlockM * sizeof(T) >= 64, "P fits where dS will be");
  static_assert(kBlockN == kShape.key_rows * kWarps / 2, "the keys are laid over half of the warps");
  static_assert(kDqM >= 1 && kDqN >= 2 && kDqN % 2 == 0, "dQ is laid over the warps in pairs of 8 columns");
  // P is at most 1: in fp16, where 2^-14 is the least normal number, it is kept as 2^10 P.
  static constexpr float kPShift = std::is_same_v<Element, Fp16> ? 10.f : 0.f;
  using Tile = SmemTile<T, kHeadDim>;
  using ScoreTile = SmemTile<T, aux_pitch(kBlockM, sizeof(T)) / static_cast<int>(sizeof(T))>;  // [key][query]
  using Mods = ScoreMods<Element, kBlockM, kBlockN, kThreads>;
};

// Small tiles are for cards with less shared memory than 9.0 has. Machine code for it has none of them where the others
// always fit: a tenth of what the compiler has to do. PTX of 9.0, if there is any, is for other cards, too.
template <class Traits>
__device__ constexpr bool is_reachable() {
#if __CUDA_ARCH__ == 900 && !defined(FLASH_EXT_WITH_PTX_90)
  constexpr int kLimit = 227 * 1024, kBiasBytes = Traits::kGeneral ? 4 : 0, kElement = sizeof(typename Traits::T);
  constexpr BackwardShape kLarge = backward_shape(kElement, Traits::kHeadDim, false, Traits::kPlain);
  constexpr BackwardSmem kSmem =
      backward_smem(kLarge, Traits::kHeadDim, kElement, {kBiasBytes, Traits::kGeneral, true, true});
  return !Traits::kSmall || kSmem.total + kStaticSharedBytes > kLimit;
#else
  return true;
#endif
}

// fn(value, number of its query) over a fragment of S^T; the numbers lie in shared memory, one a query.
// `prepare` is applied to each number first.
template <int kM, int kN, class Prepare, class Fn>
__device__ __forceinline__ void for_each_column(float (&c)[kM][kN][4], const float* numbers, const Prepare& prepare,
                                                const Fn& fn) {
  numbers += no_hoist(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float2 pair = *reinterpret_cast<const float2*>(numbers + n * 8);
    pair = {prepare(pair.x), prepare(pair.y)};
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      fn(c[m][n][0], pair.x);
      fn(c[m][n][1], pair.y);
      fn(c[m][n][2], pair.x);
      fn(c[m][n][3], pair.y);
    }
  }
}

template <int kM, int kN, class Fn>
__device__ __forceinline__ void for_each_column(float (&c)[kM][kN][4], const float* numbers, const Fn& fn) {
  for_each_column(
      c, numbers, [](float x) { return x; }, fn);
}

// Whether `is` holds for one of this lane's of kCount numbers in shared memory, which the warp's lanes share.
// NOTE: by one load; by one for each 32, an instance spilled 8 bytes.
template <int kCount, class Is>
__device__ __forceinline__ bool lane_has(const float* numbers, const Is& is) {
  constexpr int kOwn = kCount < 32 ? 1 : kCount / 32;
  struct alignas(4 * kOwn) Own {
    float x[kOwn];
  };
  const Own own = *reinterpret_cast<const Own*>(numbers + no_hoist(threadIdx.x) % (kCount / kOwn) * kOwn);
  bool result = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) result |= is(own.x[i]);
  return result;
}

// Whether a tile has rows that are renormalised, or whose P is to be divided by its sum. A row of finfo.min with one
// key is far though that sum is 1. lse: in shared memory, inverse behind it.
template <int kBlockM>
__device__ __forceinline__ bool is_rare(const float* lse, bool renormalised) {
  bool rare = lane_has<kBlockM>(lse, [](float x) { return needs_renorm(x); });
  if (renormalised) rare |= lane_has<kBlockM>(lse + 2 * kBlockM, [](float x) { return x != 1.f; });
  return __any_sync(~0u, rare) != 0;
}

// dP^T - delta of rows that have keys, by their dlse. lse: in shared memory; d_lse: of the tile's first query, of which
// there are `queries`.
template <int kM, int kN>
__device__ __forceinline__ void add_dlse(float (&dp)[kM][kN][4], const float* lse, const float* d_lse, int queries) {
  const int column = lane_column() * 2, left = no_hoist(queries - column);
  d_lse += column;
  lse += column;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has_keys = n * 8 + i < left && lse[n * 8 + i] != kMinusInf;
      const float x = has_keys ? d_lse[n * 8 + i] : 0.f;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        dp[m][n][i] += x;
        dp[m][n][i + 2] += x;
      }
    }
  }
}

// A fragment of S^T to its place in a [key][query] tile.
template <class Frag, int kM, int kN, class Tile>
__device__ __forceinline__ void store_scores(Tile tile, const Operands<Frag, kM, kN>& c, int key, int query = 0) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      c.row[m].store(tile, key + m * 16, query + n * 8, lane, n, 0);
      c.row[m].store(tile, key + m * 16 + 8, query + n * 8, lane, n, 1);
    }
  }
}

// c *= what the same lane of this or its partner warp stored at the fragment's place.
template <class Frag, int kM, int kN, class Tile>
__device__ __forceinline__ void multiply_scores(float (&c)[kM][kN][4], Tile tile, int key) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = Frag::template Operand<kN>::load(tile, key + m * 16 + half * 8, n * 8, lane);
        c[m][n][2 * half] *= pair.x;
        c[m][n][2 * half + 1] *= pair.y;
      }
    }
  }
}

// The same of what is packed, in bf16.
template <class Frag, int kM, int kN, class Tile>
__device__ __forceinline__ void multiply_scores(Operands<Frag, kM, kN>& c, Tile tile, int key) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      const uint32_t word = Frag::template Operand<kN>::load_word(tile, key + m * 16 + i % 2 * 8, i / 2 * 8, lane);
      c.row[m].set_word(i, multiply_bf16(c.row[m].word(i), word));
    }
  }
}

// sum dS (|i - j| - distance_to_keys(i)) of a fragment of dS^T whose first key is j and first query is at position i.
// The gradient of a slope is sum dS |i - j|. NOTE: the dS of a row add up to its dlse, but for their roundings, which a
// distance that all keys have in common would multiply: sum_slopes (kernels/stages/rows.cu) takes that one of dlse.
template <int kM, int kN>
__device__ __forceinline__ float weighted_by_distance(const float (&ds)[kM][kN][4], int key, int position, int len_k) {
  const int own_key = key + lane_row(), own_position = position + 2 * lane_column();
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = own_position + n * 8 + i;
      const float first = static_cast<float>(at - own_key), common = static_cast<float>(distance_to_keys(at, len_k));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum += ds[m][n][2 * half + i] * (fabsf(first - static_cast<float>(m * 16 + half * 8)) - common);
        }
      }
    }
  }
  return sum;
}

// A fragment of S^T to a matrix of floats [queries, keys] with the strides of `view`.
template <int kM, int kN>
__device__ __forceinline__ void store_transposed(const float (&c)[kM][kN][4], float* matrix, const TensorView& view,
                                                 int query, int queries, int key, int keys) {
  query += 2 * lane_column();
  key += lane_row();
  float* row = matrix + query * view.row_stride + key * view.col_stride;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* to = row;
#pragma unroll
      for (int part = 0; part < 2 * kM; ++part) {
        if (query + n * 8 + i < queries && key + part * 8 < keys) *to = c[part / 2][n][part % 2 * 2 + i];
        to += 8 * no_hoist(view.col_stride);
      }
      row += (i == 0 ? 1 : 7) * no_hoist(view.row_stride);
    }
  }
}

// P from the warp that computed it to the same lanes of its partner: 16 bytes a lane and step, so that no swizzle is
// needed. `buffer`: of this pair, as large as the fragment.
template <class Frag, int kM, int kN>
__device__ __forceinline__ void send(uint32_t buffer, const Operands<Frag, kM, kN>& p) {
  constexpr int kWords = Frag::template Operand<kN>::kWords;
  const uint32_t at = buffer + no_hoist(threadIdx.x % 32) * kChunkBytes;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint32_t words[4] = {p.row[m].word(i), p.row[m].word(i + 1), p.row[m].word(i + 2), p.row[m].word(i + 3)};
      store_shared(at + (m * kWords + i) * 128, words);
    }
  }
}

// fn(value, P of the same place), P as it was sent. It is read here, a few words at once, to save registers.
template <class Frag, int kM, int kN, class Fn>
__device__ __forceinline__ void with_p(float (&c)[kM][kN][4], uint32_t buffer, const Fn& fn) {
  constexpr int kBlocks = Frag::kBlocksPerChunk, kWords = Frag::template Operand<kN>::kWords;
  const uint32_t at = buffer + no_hoist(threadIdx.x % 32) * kChunkBytes;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; n += kBlocks) {
      typename Frag::template Operand<kBlocks> p;
      uint32_t words[4];
      load_shared(words, at + (m * kWords + n / kBlocks * 4) * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) p.set_word(i, words[i]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fn(c[m][n + block][i], p.value(block, i));
      }
    }
  }
}

// dP - delta in bf16, where dP is `factor` times dp: what dS is made of when P has come, rounded as eager attention
// rounds dP. kExact: not by one multiply-add, because with one key delta is dP, bit for bit (renormalise.cuh), and dS
// 0.
template <class Frag, bool kDrops, bool kExact, int kM, int kN>
__device__ __forceinline__ void subtract_delta(Operands<Frag, kM, kN>& result, const float (&dp)[kM][kN][4],
                                               const float* delta, float factor) {
  const auto difference = [&](float x, float number) {
    if constexpr (kDrops && !kExact) return fmaf(x, factor, -number);
    return (kDrops ? __fmul_rn(x, factor) : x) - number;
  };
  delta += no_hoist(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        result.row[m].set_word(2 * n + half, Frag::pack(difference(dp[m][n][2 * half], pair.x),
                                                        difference(dp[m][n][2 * half + 1], pair.y)));
      }
    }
  }
}

// dS of it, two numbers an instruction. P as with_p has it. With kDrops dP is 0 where P is negative, and dS then P
// delta.
template <class Frag, bool kDrops, int kM, int kN>
__device__ __forceinline__ void multiply_by_p(Operands<Frag, kM, kN>& ds, uint32_t buffer, const float* delta) {
  constexpr int kWords = Frag::template Operand<kN>::kWords;
  const unsigned lane = no_hoist(threadIdx.x % 32);
  const uint32_t at = buffer + lane * kChunkBytes;
  delta += lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kN; n += 2) {
    uint32_t deltas[2];
#pragma unroll
    for (int i = 0; i < 2 && kDrops; ++i) deltas[i] = Frag::pack(delta[(n + i) * 8], delta[(n + i) * 8 + 1]);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t p[4];
      load_shared(p, at + (m * kWords + 2 * n) * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word = ds.row[m].word(2 * n + i);
        if constexpr (kDrops) {
          const uint32_t negative = spread_high_bits(p[i]);
          word = (word & ~negative) | (deltas[i / 2] & negative);
        }
        ds.row[m].set_word(2 * n + i, multiply_bf16(p[i], word));
      }
    }
  }
}

// fn of the x of all threads and 0, in a fixed order, the same in every thread; `scratch` holds one float a warp.
template <int kThreads, class Fn>
__device__ __forceinline__ float block_reduce(float x, float* scratch, const Fn& fn) {
  x = warp_reduce(x, fn);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float result = 0.f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) result = fn(result, scratch[warp]);
  return result;
}

// max |x| over a tile of 16-bit numbers in shared memory, over all threads.
template <int kBytes, int kThreads>
__device__ __forceinline__ float tile_max_abs(uint32_t tile, float* scratch) {
  __half2 most = __float2half2_rn(0.f);
  for (int i = threadIdx.x * kChunkBytes; i < kBytes; i += kThreads * kChunkBytes) {
    uint32_t words[4];
    load_shared(words, tile + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) most = __hmax2(most, __habs2(reinterpret_cast<const __half2&>(words[j])));
  }
  const float x = fmaxf(__low2float(most), __high2float(most));
  return block_reduce<kThreads>(x, scratch, [](float a, float b) { return fmaxf(a, b); });
}

// The power of two by which dS is multiplied before it becomes fp16: with |dS| <= |dO| |V| / (1 - p) + |delta| it stays
// below 2^15, and what a tile holds below that bound has 29 binary digits of room before fp16 ends.
__device__ __forceinline__ float fp16_scale(float bound) {
  if (!(bound > 0.f) || bound > 3e38f) return 1.f;
  int exponent;
  frexpf(bound, &exponent);  // bound < 2^exponent
  const int shift = 15 - exponent;
  return exp2f(static_cast<float>(shift < -100 ? -100 : (shift > 100 ? 100 : shift)));
}

}  // namespace flash_ext::sm80
