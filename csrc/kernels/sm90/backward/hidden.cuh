// Which pairs of a tile of backward the band, the lengths, a mask or a row without keys hide, and how they are kept out
// of gradients.
//
// A fragment of 64 rows: this thread has columns 8 n + c and 8 n + c + 1, c = 2 (lane % 4), of two rows, 8 apart; a
// packed word has two neighbours. Whether each is kept is a bit: of 32 columns of a row bits 8 n and 8 n + 1 of a word,
// which is what one prmt makes a word's mask of.
// S is not masked: P and dS of a hidden pair are made and then replaced, because a lse, a delta or a dP that is NaN
// would make NaN of 0, too. In P a hidden pair is -0, which no exponential is, so that dS is known by it.
// Called by steps.cuh, scores.cuh, backward_two_pass and bias_gradient/kernel.cuh. Invariant: what is not hidden keeps
// its bits.
#pragma once

#include "kernels/sm90/softmax.cuh"

namespace flash_ext::sm90 {

// Bits [low, high] of 32.
__device__ __forceinline__ uint32_t bits_between(int low, int high) {
  return __funnelshift_lc(0, ~0u, max(low, 0)) & __funnelshift_rc(~0u, 0, max(31 - high, 0));
}

// The columns of a tile that each of a thread's two rows keeps, from its own first column on. NOTE: made where it is
// used; where the compiler made it ahead of the loop, kernels with scores spilled 4 to 84 bytes.
struct KeptColumns {
  int low[2], high[2];

  // Rows are queries, columns keys. row: this thread's first query.
  static __device__ __forceinline__ KeptColumns of_queries(const TileBand& band, int row, int first_key) {
    KeptColumns kept;
    asm volatile("" : "+r"(row), "+r"(first_key));
    const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = row + 8 * half;
      kept.low[half] = query + band.lower - column;
      kept.high[half] = min(query + band.upper, band.len_k - 1) - column;
    }
    return kept;
  }

  // Rows are keys, columns queries. row: this thread's first key.
  static __device__ __forceinline__ KeptColumns of_keys(const TileBand& band, int len_q, int row, int first_query) {
    KeptColumns kept;
    asm volatile("" : "+r"(row), "+r"(first_query));
    const int column = first_query + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = row + 8 * half;
      kept.low[half] = key < band.len_k ? key - band.upper - column : 1 << 30;
      kept.high[half] = min(key - band.lower, len_q - 1) - column;
    }
    return kept;
  }

  __device__ __forceinline__ bool has(int half, int column) const {
    return column >= low[half] && column <= high[half];
  }
  // Of 32 columns.
  __device__ __forceinline__ uint32_t bits(int group, int half) const {
    return bits_between(low[half] - 32 * group, high[half] - 32 * group);
  }
};

// Of a mask: 64 columns a word, of which a byte has two bits of each (group, half).
template <int kWords>
struct KeptBits {
  uint32_t word[kWords];

  __device__ __forceinline__ uint32_t bits(int group, int half) const {
    return word[group / 2] >> (group % 2 * 4 + half * 2);
  }
  // bits: only those that count are taken. (0, 0) of a word comes first.
  __device__ __forceinline__ void add(int group, int half, uint32_t bits) {
    const uint32_t own = (bits & 0x03030303) << (group % 2 * 4 + half * 2);
    word[group / 2] = group % 2 == 0 && half == 0 ? own : word[group / 2] | own;
  }
};

// fn(packed word of a fragment, bits that are kept)
template <class Kept, class Fn, int kCount>
__device__ __forceinline__ void with_kept(uint32_t (&packed)[kCount], const Kept& kept, const Fn& fn) {
#pragma unroll
  for (int group = 0; group < (kCount + 7) / 8; ++group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t bits = kept.bits(group, half), even = bits << 7, odd = bits << 6;
      fn(packed[8 * group + half], spread_byte_signs<0>(even, odd));
      fn(packed[8 * group + 2 + half], spread_byte_signs<1>(even, odd));
      if (8 * group + 4 >= kCount) continue;
      fn(packed[8 * group + 4 + half], spread_byte_signs<2>(even, odd));
      fn(packed[8 * group + 6 + half], spread_byte_signs<3>(even, odd));
    }
  }
}

// A packed fragment, 0 where a pair is hidden.
template <class Kept, int kCount>
__device__ __forceinline__ void clear_hidden(uint32_t (&packed)[kCount], const Kept& kept) {
  with_kept(packed, kept, [](uint32_t& x, uint32_t keeps) { x &= keeps; });
}

constexpr uint32_t kSigns = 0x80008000;  // of a packed pair

// A packed fragment of P, -0 where a pair is hidden.
template <class Kept, int kCount>
__device__ __forceinline__ void mark_hidden(uint32_t (&p)[kCount], const Kept& kept) {
  with_kept(p, kept, [](uint32_t& x, uint32_t keeps) { x = (x & keeps) | (kSigns & ~keeps); });
}

// The same where a query has no key; rows are keys. lse: kLseStat of the queries, in shared memory.
template <int kCount>
__device__ __forceinline__ void clear_emptied(uint32_t (&packed)[kCount], uint32_t lse) {
  lse += threadIdx.x % 4 * 8;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kCount / 2; ++n) {
    const float2 pair = load_shared2(lse + n * 32);
    const uint32_t keeps = (pair.x == kMinusInf ? 0u : 0xFFFFu) | (pair.y == kMinusInf ? 0u : 0xFFFF0000u);
    packed[2 * n] &= keeps;
    packed[2 * n + 1] &= keeps;
  }
}

// dS, 0 where mark_hidden() has marked P.
template <int kCount>
__device__ __forceinline__ void clear_marked(uint32_t (&ds)[kCount], const uint32_t (&p)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) ds[i] &= ~spread_high_bits(p[i]);
}

}  // namespace flash_ext::sm90
