// Which pairs of query and key of a warp's fragment are hidden: by the band, by a bool mask, because they lie beyond
// a length, or by a bias that leaves their query none. Their scores are -inf, and in backward their dS is 0: P = 0
// times what their row has may be NaN. So eager attention has it, whose masked_fill passes no gradient on.
//
// Called by score.cuh and every kernel that has scores. Invariant: coordinates are (query, key) inside the tile,
// whichever of the two runs along the fragment's rows: kTransposed says that rows are keys.
#pragma once

#include "core/band.h"
#include "core/online_softmax.h"
#include "kernels/sm80/sequence.h"
#include "kernels/sm80/tile.cuh"

namespace flash_ext::sm80 {

// i + diagonal is the key beside query i, from which distances are counted.
__device__ __forceinline__ int diagonal_of(const Problem& problem, const Sequence& sequence) {
  return problem.bottom_right ? sequence.len_k - sequence.len_q : 0;
}

template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void mask_band(float (&s)[kM][kN][4], int row0, int col0, const TileBand& band,
                                          int first_query, int first_key, float value = kMinusInf) {
  const int lower = band.lower + first_query - first_key, upper = band.upper + first_query - first_key;
  const int keys = band.len_k - first_key;
  for_each_score<kTransposed>(s, row0, col0, [&](float& x, int query, int key) {
    if (key < query + lower || key > query + upper || key >= keys) x = value;
  });
}

// fn(m, n, half, first, second) for every two neighbours of a fragment, numbers 2 half and 2 half + 1 of block (m, n):
// whether each of them is hidden. Here by the band or a length, in a fragment whose rows are the keys from `first_key`.
// NOTE: a query beyond len_q is zeros in shared memory, which an infinite key or value makes NaN.
template <int kM, int kN, class Fn>
__device__ __forceinline__ void visit_hidden(const TileBand& band, int len_q, int first_query, int first_key,
                                             const Fn& fn) {
  const int own_query = first_query + 2 * lane_column(), own_key = first_key + lane_row();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    int least[2], most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = own_query + n * 8 + i;
      least[i] = query + band.lower;
      most[i] = query < len_q ? min(query + band.upper, band.len_k - 1) : -1;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = own_key + m * 16 + half * 8;
        fn(m, n, half, key < least[0] || key > most[0], key < least[1] || key > most[1]);
      }
    }
  }
}

// The same where a query's row has no key, which a bias of -inf leaves it. lse: in shared memory, of a fragment whose
// rows are keys.
template <int kM, int kN, class Fn>
__device__ __forceinline__ void visit_emptied(const float* lse, const Fn& fn) {
  lse += 2 * lane_column();
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const bool first = lse[n * 8] == kMinusInf, second = lse[n * 8 + 1] == kMinusInf;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      fn(m, n, 0, first, second);
      fn(m, n, 1, first, second);
    }
  }
}

// The same where a mask tile [query][key] of bytes holds 0. `query_step`: 0 where the tile is one row for all queries,
// else 1.
template <bool kTransposed, int kPitch, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_masked(int row0, int col0, uint32_t tile, int query_step, const Fn& fn) {
  const SmemTile<uint8_t, kPitch> mask{tile};
  const unsigned lane = no_hoist(threadIdx.x % 32), g = lane / 4, t = lane % 4;
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
            fn(m, n + i, half, (bytes & 0xFFu) == 0, (bytes & 0xFF0000u) == 0);
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
          const uint16_t bytes = load_shared_16(address + (key & 8) + 2 * t);
          fn(m, n, half, (bytes & 0xFFu) == 0, (bytes & 0xFF00u) == 0);
        }
      }
    }
  }
}

// What the visits tell: hidden numbers of a fragment become `value`, or, where it is packed, 0.
template <int kM, int kN>
__device__ __forceinline__ auto sets_hidden(float (&c)[kM][kN][4], float value) {
  return [&c, value](int m, int n, int half, bool first, bool second) {
    if (first) c[m][n][2 * half] = value;
    if (second) c[m][n][2 * half + 1] = value;
  };
}

template <int kM, int kN>
__device__ __forceinline__ auto clears_hidden(float (&c)[kM][kN][4]) {
  return sets_hidden(c, 0.f);
}

template <class Frag, int kM, int kN>
__device__ __forceinline__ auto clears_hidden(Operands<Frag, kM, kN>& c) {
  static_assert(Frag::kK == 16);
  return [&c](int m, int n, int half, bool first, bool second) {
    const uint32_t kept = (first ? 0u : 0xFFFFu) | (second ? 0u : 0xFFFF0000u);
    c.row[m].set_word(2 * n + half, c.row[m].word(2 * n + half) & kept);
  };
}

// Whether a number of the warp's fragment is NaN or infinite: else what a mask or a bias hides has dS = 0 by its P, and
// the mask need not be read again.
template <int kM, int kN>
__device__ __forceinline__ bool warp_has_special(const float (&c)[kM][kN][4]) {
  float sum = 0.f;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fmaf(c[m][n][i], 0.f, sum);
    }
  }
  return __any_sync(~0u, sum != 0.f) != 0;
}

// In bf16, whose exponent of such a number is all ones, so that one more overflows it.
template <class Frag, int kM, int kN>
__device__ __forceinline__ bool warp_has_special(const Operands<Frag, kM, kN>& c) {
  static_assert(std::is_same_v<typename Frag::Storage, __nv_bfloat16>);
  uint32_t bits = 0;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) bits |= (c.row[m].word(i) & 0x7F807F80u) + 0x00800080u;
  }
  return __any_sync(~0u, (bits & 0x80008000u) != 0) != 0;
}

}  // namespace flash_ext::sm80
