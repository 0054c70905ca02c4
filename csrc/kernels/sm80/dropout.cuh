// The dropout map of core/dropout.h over a warp's fragment of scores, as it stands or transposed.
//
// Called by forward/kernel.cuh, backward/steps.cuh, backward/renormalise.cuh and bias_gradient/kernel.cuh. Invariant:
// every lane of a warp takes part.
#pragma once

#include "kernels/sm80/score.cuh"

namespace flash_ext::sm80 {

// The map, and where the numbers of a batch element begin in it.
// NOTE: found once, and kept in shared memory. Found by a division of bh where blocks are drawn, two of backward's
// kernels (bf16 of head dim 128, float of 256) spilled 4 to 24 bytes.
struct ElementDropout : Dropout {
  DropoutBlock first;
};

__device__ __forceinline__ ElementDropout dropout_of(const ForwardArgs& args, int64_t b) {
  return {make_dropout(args.rng_state[0], args.rng_state[1], args.problem.dropout_p),
          args.dropout_place.of_batch(static_cast<uint32_t>(b))};
}

// fn(value, kept) for every element of a fragment whose first block of the map is `first`. In S^T the words are
// transposed across the warp, and words 1 and 2 change places (core/dropout.h).
template <bool kTransposed, int kM, int kN, class Fn>
__device__ __forceinline__ void visit_dropout(float (&p)[kM][kN][4], const Dropout& dropout, const DropoutBlock& first,
                                              const Fn& fn) {
  const uint32_t lane = no_hoist(threadIdx.x % 32), threshold = dropout.pair_threshold();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      const PhiloxWords<uint32_t> words =
          dropout.block_words(first.bh, first.q16 + (kTransposed ? n : m), first.k16 + (kTransposed ? m : n), lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Fragment word i: rows g + 8 * (i % 2), columns 8 * (i / 2) + {2t, 2t + 1}.
        const uint32_t word = kTransposed ? movmatrix_trans(words.word[i % 2 * 2 + i / 2]) : words.word[i];
        float(&pair)[4] = p[m][2 * n + i / 2];
        fn(pair[i % 2 * 2], Dropout::keeps_low(word, threshold));
        fn(pair[i % 2 * 2 + 1], Dropout::keeps_high(word, threshold));
      }
    }
  }
}

// Which numbers of a fragment of S^T are kept, a bit each, for what shall be drawn before there are scores. Of a row of
// fragments: the upper half holds the second number of every pair, the lower half the first, pair 2n + i of block n
// (i: rows g + 8) at bit 2 kN - 1 - (2n + i).
template <int kM, int kN>
struct DropoutFlags {
  uint32_t row[kM] = {};

  // Blocks of 16 queries of part `part` of `parts`; part 0 comes first.
  __device__ __forceinline__ void draw(const Dropout& dropout, const DropoutBlock& from, int part, int parts) {
    const uint32_t lane = no_hoist(threadIdx.x % 32), threshold = dropout.pair_threshold();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t first = row[m] & 0xFFFFu, second = row[m] >> 16;
#pragma unroll
      for (int n = part * kN / 2 / parts; n < (part + 1) * kN / 2 / parts; ++n) {
        const PhiloxWords<uint32_t> words = dropout.block_words(from.bh, from.q16 + n, from.k16 + m, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = movmatrix_trans(words.word[i % 2 * 2 + i / 2]);
          append_carry(first, word << 16, 0u - threshold);
          append_carry(second, word, 0u - threshold);
        }
      }
      row[m] = second << 16 | (first & 0xFFFFu) | (threshold == 0 ? ~0u : 0u);  // 2^32 - 0 is no word
    }
  }
};

}  // namespace flash_ext::sm80
