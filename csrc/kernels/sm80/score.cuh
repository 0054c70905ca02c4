// What happens to a warp's scores between the matrix product and the softmax, and back:
//
//   s = cap * tanh(scale * q k^T / cap) + bias - slope * |i + offset - j|,  -inf where band or mask removes the pair
//
// (core/score_mod.h, written here per feature over the whole fragment, so that a feature that is off costs one
// branch a tile). Bias and mask come from shared memory. Called by forward/kernel.cuh, backward/kernel.cuh and
// bias_gradient/kernel.cuh. Invariant: coordinates are (query, key) inside the tile, whichever of the two runs along
// the fragment's rows: kTransposed says that rows are keys, as in backward, which computes S^T.
#pragma once

#include "core/dropout.h"
#include "core/score_mod.h"
#include "kernels/sm80/config.h"
#include "kernels/sm80/hidden.cuh"

namespace flash_ext::sm80 {

// fn(value, i + offset - j); `distance` is that of the tile's first query and key.
// NOTE: a place's distance from the tile's first one is a constant, and integers add exactly in float; a conversion
// from integer a score takes as long as an ex2.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_offset(float (&c)[kM][kN][4], int row0, int col0, int distance, const Fn& fn) {
  const int row = row0 + lane_row(), col = col0 + 2 * lane_column();
  const float first = static_cast<float>(distance + (kTransposed ? col - row : row - col));
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = m * 16 + i / 2 * 8 - n * 8 - i % 2;  // along rows minus along columns
        fn(c[m][n][i], first + static_cast<float>(kTransposed ? -step : step));
      }
    }
  }
}

// The same with |i + offset - j|.
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_distance(float (&c)[kM][kN][4], int row0, int col0, int distance, const Fn& fn) {
  visit_offset<kTransposed>(c, row0, col0, distance, [&](float& x, float at) { fn(x, fabsf(at)); });
}

// fn(score, number) with the number of a bias tile [query][key] at the score's place. `query_step`: 0 where the tile is
// one row for all queries, else 1.
template <bool kTransposed, class T, int kPitch, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_bias_tile(float (&c)[kM][kN][4], int row0, int col0, uint32_t tile,
                                                int query_step, const Fn& fn) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  const SmemTile<T, kPitch / kSize> bias{tile};
  const unsigned lane = no_hoist(threadIdx.x % 32);
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

// What a call has between q k^T and the softmax, in one number that is a kernel's parameter.
// NOTE: asked of shared memory, each answer took a warp 50 clocks a tile; bools of the parameters, which an instruction
// cannot read in place, were kept in registers, of which there are none.
enum ScoreFlag : unsigned {
  kBias = 1,
  kFloatBias = 2,
  kBiasRows = 4,  // one a query, not one for all
  kMask = 8,
  kMaskRows = 16,
  kAlibi = 32,
  kCap = 64,
  kDropout = 128,
  kRaw = 256,  // scores stay q k^T, which the kernel scales
  // Of backward:
  kRenormalised = 512,  // rows may have an inverse, see backward/renormalise.cuh
  kDlseApart = 1024,    // see is_dlse_apart
  kSlopeGradient = 2048,
  kBiasGradient = 4096,  // written by the main kernel, in float
  kBiasBoxes = 8192,     // the same in bf16, by TMA
  kNarrowDbias = 16384,  // of bias_gradient/kernel.cuh: in the type of query, not in float
  kPApart = 32768,       // BackwardNeeds::p_apart
};

inline unsigned features_of(const ForwardArgs& args) {
  const Problem& problem = args.problem;
  const bool is_float = problem.dtype == DType::kFloat32 || problem.bias_dtype == DType::kFloat32;
  return (problem.has_bias ? kBias : 0u) | (problem.has_bias && is_float ? kFloatBias : 0u) |
         (problem.has_bias && args.bias.row_stride != 0 ? kBiasRows : 0u) | (problem.has_mask ? kMask : 0u) |
         (problem.has_mask && args.mask.row_stride != 0 ? kMaskRows : 0u) | (problem.has_alibi ? kAlibi : 0u) |
         (problem.softcap != 0.0 ? kCap : 0u) | (problem.dropout_p > 0.0 ? kDropout : 0u);
}

// A score of -inf where it is NaN, in backward. An infinite number that is split in two makes NaN of every score that
// it has a part in; one that is NaN or +inf in truth has a row whose lse is NaN, and so is P. Not with a softcap, which
// makes finite what is infinite: score_product.
template <class Frag>
__device__ __forceinline__ float without_split_nan(float x, unsigned features) {
  if constexpr (!Frag::kSplit) return x;
  return fmaxf(x, features & kCap ? std::numeric_limits<float>::quiet_NaN() : kMinusInf);
}

// P of a score and the lse of its row, which is not -inf, in the kernels of backward that must find the same bits.
template <class Frag>
__device__ __forceinline__ float p_of_score(float score, float lse, unsigned features) {
  return exp2_fast((without_split_nan<Frag>(score, features) - lse) * kLog2eFloat);
}

// C = A B^T of backward's scores. With a softcap a tile that the split made NaN of is multiplied again with large
// numbers for infinite ones, whose scores get the sign; where one is NaN in truth, so is lse.
template <class Frag, int kHeadDim, bool kMayCap = true, bool kAhead = Frag::kAhead, int kM, int kN, class TileA,
          class TileB>
__device__ __forceinline__ void score_product(unsigned features, float (&c)[kM][kN][4], TileA a_tile, int row,
                                              TileB b_tile, int col) {
  clear(c);
  gemm_nt<Frag, kHeadDim, kAhead>(c, a_tile, row, b_tile, col);
  if constexpr (kMayCap && Frag::kSplit) {
    if ((no_hoist(features) & kCap) && warp_has_special(c)) {
      clear(c);
      gemm_nt<FragmentsTf32<true, true>, kHeadDim, kAhead>(c, a_tile, row, b_tile, col);
    }
  }
}

// What forward and the main backward kernel are told of their scores.
struct ScoreOptions {
  unsigned features;
  float to_log2;        // what one unit of score is in log2: log2(e), or scale * log2(e) where scores stay q k^T
  float scale;          // as float
  float dropout_scale;  // Dropout::scale

  // Scores stay q k^T where nothing but the band, a mask or dropout lies behind them: the scale is then part of the
  // multiply-add before ex2. `may_be_raw`: not where backward/renormalise.cuh must find the same bits.
  static ScoreOptions of(const ForwardArgs& args, bool may_be_raw) {
    const Problem& problem = args.problem;
    const bool is_raw =
        may_be_raw && !problem.has_bias && !problem.has_alibi && problem.softcap == 0.0 && problem.scale > 0.0;
    return {features_of(args) | (is_raw ? kRaw : 0u), static_cast<float>((is_raw ? problem.scale : 1.0) * kLog2e),
            static_cast<float>(problem.scale), static_cast<float>(make_dropout(0, 0, problem.dropout_p).scale)};
  }
};

// The general path of one (batch, head): what it loads for a tile, and what it does to the tile's scores. Function: a
// ScoreFunction (core/score_mod.h) in the place of the softcap, void: none.
template <class Element, int kBlockM, int kBlockN, int kThreads, class Function = void>
struct ScoreMods {
  using T = StorageOf<Element>;
  template <ScoreFunction F>
  using With = ScoreMods<Element, kBlockM, kBlockN, kThreads, F>;
  static constexpr bool kApproximatesTanh = std::is_same_v<Element, Bf16>;
  static constexpr int kBiasPitch = aux_pitch(kBlockN, sizeof(T));
  static constexpr int kFloatPitch = aux_pitch(kBlockN, 4);
  static constexpr int kMaskPitch = aux_pitch(kBlockN, 1);

  float scale;
  float cap, inverse_cap;  // cap 0: off
  float to_cap;            // tanh is taken of it times q k^T; in fp16 ex2 is
  float slope;
  const float* alibi;  // where the slope came from
  bool is_regular;     // load_whole may be used
  uint32_t bias_smem, mask_smem;
  GlobalRows<T> bias;  // as float where bias_is_float
  GlobalRows<uint8_t> mask;

  FLASH_DEVICE void set_cap(const Problem& problem) {
    const double limit = 0x1p100;  // beyond it the cap changes nothing, see make_softcap
    const double c = problem.softcap > limit ? limit : problem.softcap;
    scale = static_cast<float>(problem.scale);
    cap = static_cast<float>(c == 0.0 || c >= 1.0 / limit ? c : 1.0 / limit);
    inverse_cap = cap > 0.f ? 1.f / cap : 0.f;
    const double factor = problem.scale / (c > 0.0 ? cap : 1.0) * (kApproximatesTanh ? 1.0 : 2.0 * kLog2eFloat);
    to_cap = static_cast<float>(factor < -3e38 ? -3e38 : (factor > 3e38 ? 3e38 : factor));  // times 0 it is 0
  }

  static __device__ __forceinline__ ScoreMods make(const ForwardArgs& args, int64_t b, int64_t head,
                                                   const Sequence& sequence, uint32_t bias_base, uint32_t mask_base) {
    const Problem& problem = args.problem;
    ScoreMods mods;
    mods.set_cap(problem);
    mods.is_regular = true;
    mods.bias_smem = bias_base;
    mods.mask_smem = mask_base;
    mods.slope = 0.f;
    if (problem.has_alibi) {
      const int64_t at = batch_offset(problem, args.alibi, b) + head * args.alibi.head_stride;
      mods.alibi = static_cast<const float*>(args.alibi.data) + at;
      mods.slope = *mods.alibi;
    }
    if (problem.has_bias) {
      const int64_t at = batch_offset(problem, args.bias, b) + head * args.bias.head_stride;
      mods.bias = rows_of<T>(args.bias, at, sequence.len_q, sequence.len_k);
      if (sizeof(T) == 4 || problem.bias_dtype == DType::kFloat32) {
        const GlobalRows<float> wide = rows_of<float>(args.bias, at, sequence.len_q, sequence.len_k);
        mods.bias.data = reinterpret_cast<T*>(wide.data);
        mods.bias.row_bytes = wide.row_bytes;
        mods.bias.vectors = wide.vectors;
        mods.bias.is_regular = wide.is_regular;
      }
      mods.is_regular = mods.bias.is_regular;
    }
    if (problem.has_mask) {
      const int64_t at = batch_offset(problem, args.mask, b) + head * args.mask.head_stride;
      mods.mask = rows_of<uint8_t>(args.mask, at, sequence.len_q, sequence.len_k);
      mods.is_regular = mods.is_regular && mods.mask.is_regular;
    }
    return mods;
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void apply(unsigned features, float (&s)[kM][kN][4], int row0, int col0,
                                        int distance) const {
    apply<kTransposed>(features, s, row0, col0, distance, 0, [](auto&) {});
  }

  // Steps on by one query head of the same batch element.
  __device__ __forceinline__ void next_head(const ForwardArgs& args) {
    const Problem& problem = args.problem;
    is_regular = true;
    if (problem.has_bias) {
      const bool is_float = sizeof(T) == 4 || problem.bias_dtype == DType::kFloat32;
      bias.advance(args.bias.head_stride * (is_float ? 4 / static_cast<int>(sizeof(T)) : 1));
      is_regular = bias.is_regular;
    }
    if (problem.has_mask) {
      mask.advance(args.mask.head_stride);
      is_regular = is_regular && mask.is_regular;
    }
    if (problem.has_alibi) slope = *(alibi += args.alibi.head_stride);
  }

  __device__ __forceinline__ uint32_t bias_stage(unsigned features, int stage) const {
    return bias_smem + stage * kBlockM * (features & kFloatBias ? kFloatPitch : kBiasPitch);
  }
  __device__ __forceinline__ uint32_t mask_stage(int stage) const { return mask_smem + stage * kBlockM * kMaskPitch; }

  // Starts the copies of a tile's bias and mask.
  __device__ __forceinline__ void load(unsigned features, int first_query, int first_key, int stage = 0) const {
    features = no_hoist(features);
    if (features & kBias) {
      const int step = features & kBiasRows ? 1 : 0, present = step ? kBlockM : 1;
      const uint32_t to = bias_stage(features, stage);
      if (sizeof(T) == 4 || (features & kFloatBias)) {
        load_rows<kBlockM, kBlockN / 4, kFloatPitch, kThreads, LoadForm::kRare>(to, as_float(), step * first_query,
                                                                                first_key, present);
      } else if constexpr (sizeof(T) == 2) {
        load_rows<kBlockM, kBlockN / 8, kBiasPitch, kThreads, LoadForm::kRare>(to, bias, step * first_query, first_key,
                                                                               present);
      }
    }
    if (features & kMask) {
      const int step = features & kMaskRows ? 1 : 0;
      load_rows<kBlockM, kBlockN / 16, kMaskPitch, kThreads, LoadForm::kRare>(
          mask_stage(stage), mask, step * first_query, first_key, step ? kBlockM : 1);
    }
  }

  // The same for a whole tile where is_regular.
  __device__ __forceinline__ void load_whole(unsigned features, int first_query, int first_key, int stage,
                                             unsigned thread) const {
    features = no_hoist(features);
    if (features & kBias) {
      const uint32_t to = bias_stage(features, stage);
      const bool has_rows = features & kBiasRows;
      if (sizeof(T) == 4 || (features & kFloatBias)) {
        load_rows_of<kBlockN / 4, kFloatPitch>(to, as_float(), has_rows, first_query, first_key, thread);
      } else if constexpr (sizeof(T) == 2) {
        load_rows_of<kBlockN / 8, kBiasPitch>(to, bias, has_rows, first_query, first_key, thread);
      }
    }
    if (features & kMask) {
      load_rows_of<kBlockN / 16, kMaskPitch>(mask_stage(stage), mask, features & kMaskRows, first_query, first_key,
                                             thread);
    }
  }

  // NOTE: of one row for all queries one row is copied. All its copies came from one line of L2: a tenth of forward.
  template <int kChunks, int kPitch, class U>
  static __device__ __forceinline__ void load_rows_of(uint32_t to, const GlobalRows<U>& from, bool has_rows,
                                                      int first_query, int first_key, unsigned thread) {
    if (has_rows) {
      sm80::load_whole<kBlockM, kChunks, kPitch, kThreads>(to, from, first_query, first_key, thread);
    } else {
      sm80::load_whole<1, kChunks, kPitch, kThreads>(to, from, 0, first_key, thread);
    }
  }

  __device__ __forceinline__ GlobalRows<float> as_float() const {
    return {reinterpret_cast<float*>(bias.data),
            bias.row_stride,
            bias.col_stride,
            bias.rows,
            bias.cols,
            bias.row_bytes,
            bias.vectors,
            bias.is_regular};
  }

  template <bool kTransposed, int kM, int kN, class Fn>
  __device__ __forceinline__ void visit_bias(unsigned features, float (&s)[kM][kN][4], int row0, int col0, int stage,
                                             const Fn& fn) const {
    const uint32_t tile = bias_stage(features, stage);
    const int step = features & kBiasRows ? 1 : 0;
    if (sizeof(T) == 4 || (features & kFloatBias)) {
      visit_bias_tile<kTransposed, float, kFloatPitch>(s, row0, col0, tile, step, fn);
    } else if constexpr (sizeof(T) == 2) {
      visit_bias_tile<kTransposed, T, kBiasPitch>(s, row0, col0, tile, step, fn);
    }
  }

  template <bool kTransposed, int kM, int kN, class Fn>
  __device__ __forceinline__ void visit_masked(unsigned features, int row0, int col0, int stage, const Fn& fn) const {
    sm80::visit_masked<kTransposed, kMaskPitch, kM, kN>(row0, col0, mask_stage(stage), features & kMaskRows ? 1 : 0,
                                                        fn);
  }

  // S^T: what the mask hides, and what queries without keys have. lse: as of visit_emptied.
  template <int kM, int kN, class Fn>
  __device__ __forceinline__ void visit_unseen(unsigned features, int row0, int stage, const float* lse,
                                               const Fn& fn) const {
    if (no_hoist(features) & kMask) visit_masked<true, kM, kN>(features, row0, 0, stage, fn);
    visit_emptied<kM, kN>(lse, fn);
  }

  // NOTE: what is rounded is written out, not left to contraction, so that every kernel sees the same score.
  // q k^T -> the score in natural units, but where it stays raw; `distance` is i + offset - j of the tile's first query
  // and key. With a softcap or a function backward keeps its slope, what it makes of 1 more of a score.
  template <bool kTransposed, int kM, int kN, class Keep>
  __device__ __forceinline__ void apply(unsigned features, float (&s)[kM][kN][4], int row0, int col0, int distance,
                                        int stage, const Keep& keep) const {
    features = no_hoist(features);
    if (features & kCap) {
      float slope[kM][kN][4];
      if constexpr (std::is_void_v<Function>) {
        for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = capped_score(x); });
        for_each_pair(slope, s, [&](float& x, float score) {
          const float t = score * inverse_cap;
          x = __saturatef(fmaf(-t, t, 1.f));  // 0 of a NaN, which P has, too
        });
      } else {
        for_each_pair(slope, s, [&](float& x, float score) { x = __fmul_rn(score, scale); });
        for_each_pair(s, slope, [](float& x, float score) { x = score; });
        visit_offset<kTransposed>(s, row0, col0, distance, [](float& x, float at) { x = Function::value(x, at); });
        visit_offset<kTransposed>(slope, row0, col0, distance, [](float& x, float at) { x = Function::slope(x, at); });
      }
      keep(slope);
    } else if (!(features & (kBias | kRaw))) {
      for_each_score<kTransposed>(s, row0, col0, [&](float& x, int, int) { x = __fmul_rn(x, scale); });
    }
    if (features & kBias) {
      const float factor = features & kCap ? 1.f : scale;
      visit_bias<kTransposed>(features, s, row0, col0, stage,
                              [&](float& x, float value) { x = fmaf(x, factor, value); });
    }
    if (features & kAlibi) {
      visit_distance<kTransposed>(s, row0, col0, distance, [&](float& x, float away) { x = fmaf(-slope, away, x); });
    }
    if (features & kMask) visit_masked<kTransposed, kM, kN>(features, row0, col0, stage, sets_hidden(s, kMinusInf));
  }

  // cap * tanh(scale * x / cap). bf16: tanh.approx is within 1e-5 of tanh on 9.0 (2^-11 by its manual), where each of
  // eager attention's roundings is up to 2^-9. fp16: by ex2 and rcp, 2e-7 of the cap, for which rows.cpp refuses
  // caps above 4096. NOTE: a third special function a score, and what it took beside it, were 10 % of forward; a
  // polynomial is no faster than they.
  __device__ __forceinline__ float capped_score(float x) const {
    if constexpr (sizeof(T) == 4) return cap * tanhf(__fmul_rn(x, scale) * inverse_cap);
    if constexpr (kApproximatesTanh) return __fmul_rn(cap, tanh_fast(x * to_cap));
    return fmaf(-2.f * cap, reciprocal_fast(1.f + exp2_fast(x * to_cap)), cap);
  }
};

}  // namespace flash_ext::sm80
