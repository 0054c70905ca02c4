// What happens to a warp's scores between the matrix product and the softmax, and back:
//
//   s = cap * tanh(scale * q k^T / cap) + bias - slope * |i + offset - j|,  -inf where band or mask removes the pair
//
// (attention/score_mod.h, written here per feature over the whole fragment, so that a feature that is off costs one
// branch a tile). Bias and mask come from shared memory. Called by fwd.cuh, bwd.cuh and bias_gradient.cuh.
// Invariant: coordinates are (query, key) inside the tile, whichever of the two runs along the fragment's rows:
// kTransposed says that rows are keys, as in backward, which computes S^T.
#pragma once

#include "attention/band.h"
#include "attention/dropout.h"
#include "sm80/config.h"
#include "sm80/tile.cuh"

namespace flash_ext::sm80 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInf = -__builtin_huge_valf();

// fn(value, query, key) for every element of a warp's fragment that starts at (row0, col0) of the tile.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void for_each_score(float (&c)[kM][kN][4], int row0, int col0, const Fn& fn) {
  const int lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + m * 16 + g + i / 2 * 8;
        const int col = col0 + n * 8 + 2 * t + i % 2;
        if constexpr (kTransposed) {
          fn(c[m][n][i], col, row);
        } else {
          fn(c[m][n][i], row, col);
        }
      }
    }
  }
}

// The band of a sequence whose lengths fit an int: key j is seen by query i when j - i is in [lower, upper] and j <
// len_k.
struct TileBand {
  int lower, upper, len_k;

  static __device__ __forceinline__ TileBand make(const Problem& problem) {
    constexpr int64_t kFar = 1 << 30;  // refused lengths begin here
    const Band band = make_band(problem);
    const auto clamp = [](int64_t x) { return static_cast<int>(x < -kFar ? -kFar : (x > kFar ? kFar : x)); };
    return {clamp(band.lower), clamp(band.upper), static_cast<int>(problem.len_k)};
  }
  // True when a tile has a pair that is not kept.
  __device__ __forceinline__ bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    const int shift = first_key - first_query;
    return first_key + keys > len_k || shift + keys - 1 > upper || shift - queries + 1 < lower;
  }
};

template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void mask_band(float (&s)[kM][kN][4], int row0, int col0, const TileBand& band,
                                          int first_query, int first_key) {
  const int lower = band.lower + first_query - first_key, upper = band.upper + first_query - first_key;
  const int keys = band.len_k - first_key;
  for_each_score<kTransposed>(s, row0, col0, [&](float& x, int query, int key) {
    if (key < query + lower || key > query + upper || key >= keys) x = kMinusInf;
  });
}

// One number of a bias or mask tile in shared memory, as float; a pair has an even key and its successor.
template <class T>
__device__ __forceinline__ float aux_value(uint32_t address) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(load_shared(address));
  } else if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    return static_cast<float>(reinterpret_cast<const T&>(bits));
  } else {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return static_cast<float>(value);
  }
}

template <class T>
__device__ __forceinline__ float2 aux_pair(uint32_t address) {
  if constexpr (sizeof(T) == 4) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
  } else if constexpr (sizeof(T) == 2) {
    const uint32_t bits = load_shared(address);
    const uint16_t low = bits & 0xFFFFu, high = bits >> 16;
    return {static_cast<float>(reinterpret_cast<const T&>(low)), static_cast<float>(reinterpret_cast<const T&>(high))};
  } else {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    return {static_cast<float>(bits & 0xFFu), static_cast<float>(bits >> 8)};
  }
}

// fn(score, number) with the tile's number at the score's place. `query_step`: 0 where the tile is one row for all
// queries, else 1.
template <bool kTransposed, class T, int kPitch, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_aux(float (&c)[kM][kN][4], int row0, int col0, uint32_t tile, int query_step,
                                          const Fn& fn) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  const auto address = [&](int query, int key) {
    const int byte = key * kSize;
    return tile + swizzled<kPitch>(query * query_step, byte & ~(kChunkBytes - 1)) + (byte & (kChunkBytes - 1));
  };
  if constexpr (kTransposed) {
    for_each_score<true>(c, row0, col0,
                         [&](float& x, int query, int key) { fn(x, aux_value<T>(address(query, key))); });
  } else {
    const int lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 pair = aux_pair<T>(address(row0 + m * 16 + g + half * 8, col0 + n * 8 + 2 * t));
          fn(c[m][n][2 * half], pair.x);
          fn(c[m][n][2 * half + 1], pair.y);
        }
      }
    }
  }
}

// tanh by ex2 and rcp: absolute error 2e-7. tanh.approx (5e-4) times a cap of 50 would break the error rule.
template <class T>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (sizeof(T) == 4) return tanhf(x);
  return 1.f - 2.f * reciprocal_fast(1.f + exp2_fast(2.f * kLog2e * x));
}

// The general path of one (batch, head): what it loads for a tile, and what it does to the tile's scores.
template <class Element, int kBlockM, int kBlockN, int kThreads>
struct ScoreMods {
  using T = StorageOf<Element>;
  static constexpr int kBiasPitch = aux_pitch(kBlockN, sizeof(T));
  static constexpr int kFloatPitch = aux_pitch(kBlockN, 4);
  static constexpr int kMaskPitch = aux_pitch(kBlockN, 1);

  float scale;
  float cap, inverse_cap;  // cap 0: off
  float slope;
  const float* alibi;  // where the slope came from
  bool has_alibi, has_bias, bias_is_float, has_mask;
  int bias_step, mask_step;  // 0: one row for all queries
  uint32_t bias_tile, mask_tile;
  GlobalRows<T> bias;  // as float where bias_is_float
  GlobalRows<uint8_t> mask;

  static __device__ __forceinline__ ScoreMods make(const ForwardArgs& args, int64_t b, int64_t head, uint32_t bias_smem,
                                                   uint32_t mask_smem) {
    const Problem& problem = args.problem;
    ScoreMods mods;
    const double limit = 0x1p100;  // beyond it the cap changes nothing, see make_softcap
    const double c = problem.softcap > limit ? limit : problem.softcap;
    mods.scale = static_cast<float>(problem.scale);
    mods.cap = static_cast<float>(c == 0.0 || c >= 1.0 / limit ? c : 1.0 / limit);
    mods.inverse_cap = mods.cap > 0.f ? 1.f / mods.cap : 0.f;
    mods.has_alibi = problem.has_alibi;
    mods.has_bias = problem.has_bias;
    mods.has_mask = problem.has_mask;
    mods.bias_is_float = sizeof(T) == 4 || problem.bias_dtype == DType::kFloat32;
    mods.bias_step = args.bias.row_stride != 0;
    mods.mask_step = args.mask.row_stride != 0;
    mods.bias_tile = bias_smem;
    mods.mask_tile = mask_smem;
    mods.slope = 0.f;
    if (mods.has_alibi) {
      const int64_t at = batch_offset(problem, args.alibi, b) + head * args.alibi.head_stride;
      mods.alibi = static_cast<const float*>(args.alibi.data) + at;
      mods.slope = *mods.alibi;
    }
    if (mods.has_bias) {
      const int64_t at = batch_offset(problem, args.bias, b) + head * args.bias.head_stride;
      mods.bias = rows_of<T>(args.bias, at, problem.len_q, problem.len_k);
      if (mods.bias_is_float) {
        const GlobalRows<float> wide = rows_of<float>(args.bias, at, problem.len_q, problem.len_k);
        mods.bias.data = reinterpret_cast<T*>(wide.data);
        mods.bias.vectors = wide.vectors;
      }
    }
    if (mods.has_mask) {
      const int64_t at = batch_offset(problem, args.mask, b) + head * args.mask.head_stride;
      mods.mask = rows_of<uint8_t>(args.mask, at, problem.len_q, problem.len_k);
    }
    return mods;
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void apply(float (&s)[kM][kN][4], int row0, int col0, int distance) const {
    apply<kTransposed>(s, row0, col0, distance, [](auto&) {});
  }

  // Steps on by one query head of the same batch element.
  __device__ __forceinline__ void next_head(const ForwardArgs& args) {
    if (has_bias) bias.advance(args.bias.head_stride * (bias_is_float ? 4 / static_cast<int>(sizeof(T)) : 1));
    if (has_mask) mask.advance(args.mask.head_stride);
    if (has_alibi) slope = *(alibi += args.alibi.head_stride);
  }

  // Starts the copies of a tile's bias and mask.
  __device__ __forceinline__ void load(int first_query, int first_key) const {
    if (has_bias) {
      const int present = bias_step ? kBlockM : 1;
      if (bias_is_float) {
        const GlobalRows<float> wide{
            reinterpret_cast<float*>(bias.data), bias.row_stride, bias.col_stride, bias.rows, bias.cols, bias.vectors};
        load_rows<kBlockM, kBlockN / 4, kFloatPitch, kThreads>(bias_tile, wide, bias_step * first_query, first_key,
                                                               present);
      } else if constexpr (sizeof(T) == 2) {
        load_rows<kBlockM, kBlockN / 8, kBiasPitch, kThreads>(bias_tile, bias, bias_step * first_query, first_key,
                                                              present);
      }
    }
    if (has_mask) {
      load_rows<kBlockM, kBlockN / 16, kMaskPitch, kThreads>(mask_tile, mask, mask_step * first_query, first_key,
                                                             mask_step ? kBlockM : 1);
    }
  }

  template <bool kTransposed, int kM, int kN, class Fn>
  __device__ __forceinline__ void visit_bias(float (&s)[kM][kN][4], int row0, int col0, const Fn& fn) const {
    if (bias_is_float) {
      visit_aux<kTransposed, float, kFloatPitch>(s, row0, col0, bias_tile, bias_step, fn);
    } else if constexpr (sizeof(T) == 2) {
      visit_aux<kTransposed, T, kBiasPitch>(s, row0, col0, bias_tile, bias_step, fn);
    }
  }

  // NOTE: the multiplication is rounded, not contracted, so that every kernel sees the same score.
  // q k^T -> the score in natural units; `distance` is i + offset - j of the tile's first query and key.
  // With a softcap `capped(s)` is told cap * tanh(...) on the way, for backward.
  template <bool kTransposed, int kM, int kN, class Capped>
  __device__ __forceinline__ void apply(float (&s)[kM][kN][4], int row0, int col0, int distance,
                                        const Capped& capped) const {
    for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = __fmul_rn(x, scale); });
    if (cap != 0.f) {
      for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = cap * tanh_of<T>(x * inverse_cap); });
      capped(s);
    }
    if (has_bias) visit_bias<kTransposed>(s, row0, col0, [](float& x, float value) { x += value; });
    if (has_alibi) {
      for_each_score<kTransposed>(s, row0, col0, [&](float& x, int query, int key) {
        x -= slope * fabsf(static_cast<float>(distance + query - key));
      });
    }
    if (has_mask) {
      visit_aux<kTransposed, uint8_t, kMaskPitch>(s, row0, col0, mask_tile, mask_step, [](float& x, float value) {
        if (value == 0.f) x = kMinusInf;
      });
    }
  }
};

// ---- dropout --------------------------------------------------------------------------------------------------------

// fn(value, kept) for every element of a fragment whose first (query, key), multiples of 16, are blocks (q16, k16) of
// the map. In S^T the words are transposed across the warp, and words 1 and 2 change places (attention/dropout.h).
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_dropout(float (&p)[kM][kN][4], const Dropout& dropout, uint32_t bh, uint32_t q16,
                                              uint32_t k16, const Fn& fn) {
  const uint32_t lane = opaque(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const PhiloxWords<uint32_t> words =
          dropout.block_words(bh, q16 + (kTransposed ? n : m), k16 + (kTransposed ? m : n), lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Fragment word i: rows g + 8 * (i % 2), columns 8 * (i / 2) + {2t, 2t + 1}.
        const uint32_t word = kTransposed ? movmatrix_trans(words.word[i % 2 * 2 + i / 2]) : words.word[i];
        float(&pair)[4] = p[m][2 * n + i / 2];
        fn(pair[i % 2 * 2], dropout.keeps(word & 0xFFFFu));
        fn(pair[i % 2 * 2 + 1], dropout.keeps(word >> 16));
      }
    }
  }
}

}  // namespace flash_ext::sm80
