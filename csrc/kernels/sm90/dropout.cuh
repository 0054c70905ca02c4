// Dropout of both passes: the map of core/dropout.h, drawn by whoever has time for it.
//
//   out = keep / (1 - p) o P V      dV = (keep o P)^T dO / (1 - p)      dS = (keep o dP - (1 - p) delta) o P / (1 - p)
//
// The factors of 1 / (1 - p) are applied where out, dQ, dK and dV are scaled anyway, that of delta in prepare.
// Forward: a fragment of S is one of the map, so consumers draw for themselves, when P is packed. Backward: the
// fragments are of S^T and registers are scarce, so the warps beside the producer draw, as bits, a slot at a time
// (backward/scores.cuh); in two passes consumers do. Called by forward/kernel.cuh, backward/scores.cuh and
// backward_two_pass, parameters made by run_scores.cuh. Invariant: tiles start at multiples of 16 queries and keys.
#pragma once

#include "core/dropout.h"
#include "gpu/ptx.cuh"

namespace flash_ext::sm90 {

struct DropoutParams {
  const int64_t* rng_state;  // {seed, offset}; null: no dropout
  uint32_t thresholds;       // one, below 2^16 (rows.cpp), in both halves
  float scale;               // 1 / (1 - p); without dropout 1
  DropoutPlace place;
};

constexpr uint32_t kHighBits = 0x80008000U;  // of both halves

// Bits 15 and 31: whether the 16-bit number is below the threshold. The other bits are without meaning.
// a < b: the highest bit of a is 0 and that of b 1, or they are the same and the others of a are less.
__device__ __forceinline__ uint32_t are_below(uint32_t numbers, uint32_t thresholds) {
  const uint32_t rest = (numbers | kHighBits) - (thresholds & ~kHighBits);  // no half borrows; high bit: is no less
  return (~numbers & thresholds) | (~(numbers ^ thresholds) & ~rest);
}

// Words that are drawn side by side, because one alone waits for its multiplications.
template <int kCount>
struct WordRow {
  uint32_t word[kCount];

  WordRow() = default;
  __device__ __forceinline__ explicit WordRow(uint32_t all, uint32_t step = 0) {
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) word[i] = all + i * step;
  }
  __device__ __forceinline__ WordRow operator^(const WordRow& other) const {
    WordRow result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) result.word[i] = word[i] ^ other.word[i];
    return result;
  }
};
template <int kCount>
__device__ __forceinline__ void mul_hi_lo(uint32_t a, const WordRow<kCount>& b, WordRow<kCount>& hi,
                                          WordRow<kCount>& lo) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) flash_ext::mul_hi_lo(a, b.word[i], hi.word[i], lo.word[i]);
}

// What draws, the same in all lanes.
struct DropoutDraws {
  Dropout map;
  uint32_t thresholds;

  __device__ __forceinline__ explicit DropoutDraws(const DropoutParams& params) : map(), thresholds(params.thresholds) {
    if (params.rng_state == nullptr) return;
    map = make_dropout(params.rng_state[0], params.rng_state[1], 0.0);
    const auto same = [](uint32_t& x) { x = __shfl_sync(~0U, x, 0); };  // and the compiler knows
    same(map.key0);
    same(map.key1);
    same(map.offset);
  }

  // fn(number of a packed pair, bits where it is dropped) over a fragment of 16 rows and kKeys columns from `first` on.
  template <int kKeys, class Fn>
  __device__ __forceinline__ void with_dropped(const DropoutBlock& first, const Fn& fn) const {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t k = 0; k < kKeys / 16; ++k) {
      const PhiloxWords<uint32_t> words = map.block_words(first.bh, first.q16, first.k16 + k, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) fn(4 * k + i, spread_high_bits(are_below(words.word[i], thresholds)));
    }
  }

  // P, packed as the A operand of P V.
  template <int kKeys>
  __device__ __forceinline__ void apply(uint32_t (&p_frag)[kKeys / 4], const DropoutBlock& first) const {
    with_dropped<kKeys>(first, [&](int i, uint32_t dropped) { p_frag[i] &= ~dropped; });
  }

  // A warp puts the keys of all rounds where transposed_bits() finds them, kKeyBytes.
  // NOTE: in registers they leave too few to draw four words side by side, and backward then waits for those who draw:
  // at head dim 64 4.64 ms, with the keys in shared memory 4.00.
  static constexpr int kKeyBytes = 64;
  __device__ __forceinline__ void store_keys(uint32_t keys) const {
    const uint32_t round = threadIdx.x % 32;
    if (round < Dropout::kRounds) {
      store_shared1(keys + round * 8, __uint_as_float(map.key0 + round * kPhiloxStep0));
      store_shared1(keys + round * 8 + 4, __uint_as_float(map.key1 + round * kPhiloxStep1));
    }
    __syncwarp();
  }

  // What is dropped of kRows rows, 64 at most, and 16 columns from `first` on, to the lanes that hold them in S^T: bit
  // 15 - j of a word is the first, bit 31 - j the second of the pair j of a fragment's packed numbers.
  template <int kRows = 64>
  __device__ __forceinline__ uint32_t transposed_bits(uint32_t keys, const DropoutBlock& first) const {
    constexpr int kGroups = kRows / 16;
    using Row = WordRow<kGroups>;
    const PhiloxWords<Row> counter{
        {Row(first.k16 * 32 + threadIdx.x % 32), Row(first.q16, 1), Row(first.bh), Row(map.offset)}};
    PhiloxWords<Row> words = counter;
#pragma unroll
    for (int round = 0; round < Dropout::kRounds; ++round) {
      const float2 pair = load_shared2(keys + round * 8);
      words = philox4x32<1>(words, __float_as_uint(pair.x), __float_as_uint(pair.y));
    }
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t n = 0; n < kGroups; ++n) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t j = 4 * n + i % 2 * 2 + i / 2;  // of eight queries, then of eight keys
        bits |= are_below(words.word[i].word[n], thresholds) >> j & kHighBits >> j;
      }
    }
    return movmatrix_trans(bits);
  }
};

}  // namespace flash_ext::sm90
