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

// g and t of this lane, hidden as opaque() says.
__device__ __forceinline__ int lane_row() { return static_cast<int>(opaque(threadIdx.x) % 32 / 4); }
__device__ __forceinline__ int lane_column() { return static_cast<int>(opaque(threadIdx.x) % 4); }

// fn(value, query, key) for every element of a warp's fragment that starts at (row0, col0) of the tile.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void for_each_score(float (&c)[kM][kN][4], int row0, int col0, const Fn& fn) {
  const int g = lane_row(), t = lane_column();
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

// fn(value, |i + offset - j|); `distance` is i + offset - j of the tile's first query and key.
// NOTE: a place's distance from the tile's first one is a constant, and integers add exactly in float; a conversion
// from integer a score takes as long as an ex2.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_distance(float (&c)[kM][kN][4], int row0, int col0, int distance, const Fn& fn) {
  const int row = row0 + lane_row(), col = col0 + 2 * lane_column();
  const float first = static_cast<float>(distance + (kTransposed ? col - row : row - col));
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = m * 16 + i / 2 * 8 - n * 8 - i % 2;  // along rows minus along columns
        fn(c[m][n][i], fabsf(first + static_cast<float>(kTransposed ? -step : step)));
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

// fn(score, number) with the number of a bias tile [query][key] at the score's place. `query_step`: 0 where the tile is
// one row for all queries, else 1.
template <bool kTransposed, class T, int kPitch, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_bias_tile(float (&c)[kM][kN][4], int row0, int col0, uint32_t tile,
                                                int query_step, const Fn& fn) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  const SmemTile<T, kPitch / kSize> bias{tile};
  const unsigned lane = opaque(threadIdx.x % 32);
  if constexpr (kSize == 2) {
    // ldmatrix gives a lane the two neighbours that its accumulator holds: keys of a row of S, or, transposed, queries.
    const unsigned low = lane % 8 + (kTransposed ? lane / 16 : lane / 8 % 2) * 8;  // query
    const unsigned high = (kTransposed ? lane / 8 % 2 : lane / 16) * kChunkBytes;  // byte of the key
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        const int query = kTransposed ? col0 + n * 8 : row0 + m * 16, key = kTransposed ? row0 + m * 16 : col0 + n * 8;
        const uint32_t address = bias.at(query * query_step, low * query_step, key * kSize, high);
        uint32_t words[4];
        if constexpr (kTransposed) {
          ldmatrix_x4_trans(words, address);
        } else {
          ldmatrix_x4(words, address);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint16_t bits[2] = {static_cast<uint16_t>(words[i]), static_cast<uint16_t>(words[i] >> 16)};
          fn(c[m][n + i / 2][i % 2 * 2], static_cast<float>(reinterpret_cast<const T&>(bits[0])));
          fn(c[m][n + i / 2][i % 2 * 2 + 1], static_cast<float>(reinterpret_cast<const T&>(bits[1])));
        }
      }
    }
  } else {
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = row0 + m * 16 + i / 2 * 8, col = col0 + n * 8;  // of the fragment, multiples of 8
          const unsigned query = kTransposed ? 2 * t + i % 2 : g, key = kTransposed ? g : 2 * t + i % 2;
          const uint32_t address = bias.at((kTransposed ? col : row) * query_step, query * query_step,
                                           (kTransposed ? row : col) * kSize, key / 4 * kChunkBytes);
          fn(c[m][n][i], __uint_as_float(load_shared(address + key % 4 * kSize)));
        }
      }
    }
  }
}

// Scores where a mask tile [query][key] of bytes holds 0 become -inf.
template <bool kTransposed, int kPitch, int kM, int kN>
__device__ __forceinline__ void mask_tile(float (&c)[kM][kN][4], int row0, int col0, uint32_t tile, int query_step) {
  const SmemTile<uint8_t, kPitch> mask{tile};
  const unsigned lane = opaque(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  if constexpr (kTransposed) {
    // Transposed, ldmatrix gives lane (g, t) keys 2g and 2g + 1 of queries 2t (low half) and 2t + 1; keys g and g + 8
    // are a byte of what the lanes of rows g / 2 and 4 + g / 2 received.
    constexpr int kBlocks = kN < 4 ? kN : 4;
    const unsigned shift = g % 2 * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; n += kBlocks) {
        uint32_t words[4];
        ldmatrix_x4_trans(words,
                          mask.at((col0 + n * 8) * query_step, lane % (8 * kBlocks) * query_step, row0 + m * 16, 0));
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t bytes = __shfl_sync(~0u, words[i], half * 16 + g / 2 * 4 + t) >> shift;
            if ((bytes & 0xFFu) == 0) c[m][n + i][2 * half] = kMinusInf;
            if ((bytes & 0xFF0000u) == 0) c[m][n + i][2 * half + 1] = kMinusInf;
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const int key = col0 + n * 8;  // a multiple of 8: half a chunk
          const uint32_t address = mask.at((row0 + m * 16 + half * 8) * query_step, g * query_step, key & ~15, 0);
          uint16_t bytes;
          asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bytes) : "r"(address + (key & 8) + 2 * t) : "memory");
          if ((bytes & 0xFFu) == 0) c[m][n][2 * half] = kMinusInf;
          if ((bytes & 0xFF00u) == 0) c[m][n][2 * half + 1] = kMinusInf;
        }
      }
    }
  }
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
  uint32_t bias_smem, mask_smem;
  GlobalRows<T> bias;  // as float where bias_is_float
  GlobalRows<uint8_t> mask;

  static __device__ __forceinline__ ScoreMods make(const ForwardArgs& args, int64_t b, int64_t head, uint32_t bias_base,
                                                   uint32_t mask_base) {
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
    mods.bias_smem = bias_base;
    mods.mask_smem = mask_base;
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
    apply<kTransposed>(s, row0, col0, distance, 0, [](auto&) {});
  }

  // Steps on by one query head of the same batch element.
  __device__ __forceinline__ void next_head(const ForwardArgs& args) {
    if (has_bias) bias.advance(args.bias.head_stride * (bias_is_float ? 4 / static_cast<int>(sizeof(T)) : 1));
    if (has_mask) mask.advance(args.mask.head_stride);
    if (has_alibi) slope = *(alibi += args.alibi.head_stride);
  }

  __device__ __forceinline__ uint32_t bias_stage(int stage) const {
    return bias_smem + stage * kBlockM * (bias_is_float ? kFloatPitch : kBiasPitch);
  }
  __device__ __forceinline__ uint32_t mask_stage(int stage) const { return mask_smem + stage * kBlockM * kMaskPitch; }

  // Starts the copies of a tile's bias and mask.
  __device__ __forceinline__ void load(int first_query, int first_key, int stage = 0) const {
    if (has_bias) {
      const int present = bias_step ? kBlockM : 1;
      if (bias_is_float) {
        const GlobalRows<float> wide{
            reinterpret_cast<float*>(bias.data), bias.row_stride, bias.col_stride, bias.rows, bias.cols, bias.vectors};
        load_rows<kBlockM, kBlockN / 4, kFloatPitch, kThreads>(bias_stage(stage), wide, bias_step * first_query,
                                                               first_key, present);
      } else if constexpr (sizeof(T) == 2) {
        load_rows<kBlockM, kBlockN / 8, kBiasPitch, kThreads>(bias_stage(stage), bias, bias_step * first_query,
                                                              first_key, present);
      }
    }
    if (has_mask) {
      load_rows<kBlockM, kBlockN / 16, kMaskPitch, kThreads>(mask_stage(stage), mask, mask_step * first_query,
                                                             first_key, mask_step ? kBlockM : 1);
    }
  }

  template <bool kTransposed, int kM, int kN, class Fn>
  __device__ __forceinline__ void visit_bias(float (&s)[kM][kN][4], int row0, int col0, int stage, const Fn& fn) const {
    if (bias_is_float) {
      visit_bias_tile<kTransposed, float, kFloatPitch>(s, row0, col0, bias_stage(stage), bias_step, fn);
    } else if constexpr (sizeof(T) == 2) {
      visit_bias_tile<kTransposed, T, kBiasPitch>(s, row0, col0, bias_stage(stage), bias_step, fn);
    }
  }

  // NOTE: the multiplication is rounded, not contracted, so that every kernel sees the same score.
  // q k^T -> the score in natural units; `distance` is i + offset - j of the tile's first query and key.
  // With a softcap `capped(s)` is told cap * tanh(...) on the way, for backward.
  template <bool kTransposed, int kM, int kN, class Capped>
  __device__ __forceinline__ void apply(float (&s)[kM][kN][4], int row0, int col0, int distance, int stage,
                                        const Capped& capped) const {
    if (cap != 0.f) {
      for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = capped_score(x); });
      capped(s);
    } else {
      for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = __fmul_rn(x, scale); });
    }
    if (has_bias) visit_bias<kTransposed>(s, row0, col0, stage, [](float& x, float value) { x += value; });
    if (has_alibi) {
      visit_distance<kTransposed>(s, row0, col0, distance, [&](float& x, float away) { x = fmaf(-slope, away, x); });
    }
    if (has_mask) mask_tile<kTransposed, kMaskPitch>(s, row0, col0, mask_stage(stage), mask_step);
  }

  // cap * tanh(scale * x / cap), in 16-bit types by ex2 and rcp: absolute error 2e-7 of tanh. tanh.approx (5e-4) times
  // a cap of 50 would break the error rule.
  __device__ __forceinline__ float capped_score(float x) const {
    if constexpr (sizeof(T) == 4) return cap * tanhf(__fmul_rn(x, scale) * inverse_cap);
    return fmaf(-2.f * cap, reciprocal_fast(1.f + exp2_fast(__fmul_rn(x, scale) * (2.f * kLog2e * inverse_cap))), cap);
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
