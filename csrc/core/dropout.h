// The dropout mask as a pure function of (seed, offset, b, h, q, k): every backend draws the same bits, in any order.
//
//   out = sum_k keep(b, h, q, k) / (1 - p) * P[q, k] * v[k]      keep: number(b, h, q, k) >= round(p * 65536)
//
// Generator: Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// THE DEFINITION, golden values in tests/golden/dropout_map.json; changing any of it changes every saved run:
//   q, k   positions inside sequence b, counted from its first query and key (dense and varlen draw the same)
//   key    { seed[31:0], seed[63:32] ^ offset[63:32] }
//   counter{ (k / 16) * 32 + lane, q / 16, (b * heads_q + h) mod 2^32, offset[31:0] }   so k < 2^31 and q < 2^36
//   result four words; lane = 4 * (q % 8) + (k % 8) / 2, the lane whose m16n8k16 accumulator holds (q, k); with
//          g = lane / 4, t = lane % 4 and positions modulo 16:
//             word   row    key in bits 15:0   key in bits 31:16   packed A register   accumulators of its n8 tile
//              0     g          2t                 2t + 1                a0             keys 0..7:  c0, c1
//              1     g + 8      2t                 2t + 1                a1             keys 0..7:  c2, c3
//              2     g          2t + 8             2t + 9                a2             keys 8..15: c0, c1
//              3     g + 8      2t + 8             2t + 9                a3             keys 8..15: c2, c3
//   p is quantised to a multiple of 2^-16, threshold = floor(p * 65536 + 0.5); the scale is the exact 1 / (1 - p).
// Each word over 32 lanes is one 8x8 matrix of 16-bit numbers, so a kernel that holds S^T transposes the words (or
// bits) with movmatrix and swaps words 1 and 2. Called by every backend and by dropout_mask; no state, no memory.
#pragma once

#include <cstdint>

#include "core/portable.h"

namespace flash_ext {

// The full product of a constant and a word. A vector of words overloads this in its own namespace (found by ADL).
FLASH_DEVICE void mul_hi_lo(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  hi = static_cast<uint32_t>(product >> 32);
  lo = static_cast<uint32_t>(product);
}

template <class Word>
struct PhiloxWords {
  Word word[4];
};

constexpr uint32_t kPhiloxStep0 = 0x9E3779B9u, kPhiloxStep1 = 0xBB67AE85u;  // of the keys, from round to round

// Word: uint32_t, or a class holding several, constructible from uint32_t, with ^, + and mul_hi_lo.
template <int kRounds, class Word>
FLASH_DEVICE PhiloxWords<Word> philox4x32(PhiloxWords<Word> counter, uint32_t key0, uint32_t key1) {
  Word(&c)[4] = counter.word;
  for (int round = 0; round < kRounds; ++round) {
    Word hi0, lo0, hi1, lo1;
    mul_hi_lo(0xD2511F53u, c[0], hi0, lo0);
    mul_hi_lo(0xCD9E8D57u, c[2], hi1, lo1);
    c[0] = hi1 ^ c[1] ^ Word(key0);
    c[1] = lo1;
    c[2] = hi0 ^ c[3] ^ Word(key1);
    c[3] = lo0;
    key0 += kPhiloxStep0;
    key1 += kPhiloxStep1;
  }
  return counter;
}

// Where the number of (query, key) stands inside its 16x16 block.
struct DropoutSlot {
  uint32_t lane;   // 0..31
  uint32_t word;   // 0..3
  uint32_t shift;  // 0 or 16
};

FLASH_DEVICE DropoutSlot dropout_slot(int64_t query, int64_t key) {
  const uint32_t row = static_cast<uint32_t>(query) % 16;
  const uint32_t col = static_cast<uint32_t>(key) % 16;
  return {row % 8 * 4 + col % 8 / 2, col / 8 * 2 + row / 8, col % 2 * 16};
}

struct Dropout {
  static constexpr int kRounds = 7;

  uint32_t key0 = 0;
  uint32_t key1 = 0;
  uint32_t offset = 0;     // low half; the high half is in key1
  uint32_t threshold = 0;  // 0..65536, so it does not fit 16 bits when p = 1
  double scale = 1.0;      // 1 / (1 - p), 0 when everything is dropped

  FLASH_DEVICE bool keeps(uint32_t number) const { return number >= threshold; }

  // For a pair of numbers in a word, in an instruction less: compared as words, the upper one with bits below it, the
  // lower one shifted up. Where everything is dropped it keeps one number in 65536, with a scale of 0.
  FLASH_DEVICE uint32_t pair_threshold() const { return (threshold < 0xFFFFu ? threshold : 0xFFFFu) << 16; }
  FLASH_DEVICE static bool keeps_low(uint32_t word, uint32_t pair_threshold) { return word << 16 >= pair_threshold; }
  FLASH_DEVICE static bool keeps_high(uint32_t word, uint32_t pair_threshold) { return word >= pair_threshold; }

  // The eight numbers of `lane` in block (q16, k16). A lane of 32 * j + l means lane l of block k16 + j, so a vector
  // of words may run over lanes, over blocks of keys or both.
  template <class Word>
  FLASH_DEVICE PhiloxWords<Word> block_words(uint32_t bh, uint32_t q16, uint32_t k16, Word lane) const {
    return philox4x32<kRounds>(PhiloxWords<Word>{{Word(k16 * 32) + lane, Word(q16), Word(bh), Word(offset)}}, key0,
                               key1);
  }

  // One 16-bit number by position; draws eight to use one, for tests and ragged edges.
  FLASH_DEVICE uint32_t number(uint32_t bh, int64_t query, int64_t key) const {
    const DropoutSlot slot = dropout_slot(query, key);
    const PhiloxWords<uint32_t> words =
        block_words(bh, static_cast<uint32_t>(query / 16), static_cast<uint32_t>(key / 16), slot.lane);
    const uint32_t* const w = words.word;  // NOTE: w[slot.word] would lie in local memory
    const uint32_t word = slot.word / 2 == 0 ? (slot.word == 0 ? w[0] : w[1]) : (slot.word == 2 ? w[2] : w[3]);
    return word >> slot.shift & 0xFFFFu;
  }

  FLASH_DEVICE bool keep(uint32_t bh, int64_t query, int64_t key) const { return keeps(number(bh, query, key)); }
};

// A 16x16 block of the map.
struct DropoutBlock {
  uint32_t bh = 0, q16 = 0, k16 = 0;

  // That of a call's own numbers, where this one is its first; query and key are multiples of 16.
  FLASH_DEVICE DropoutBlock at(uint32_t own_bh, uint32_t query, uint32_t key) const {
    return {bh + own_bh, q16 + query / 16, k16 + key / 16};
  }
};

// Where a call lies in the map, which may be a larger call's. All zeros: the call is the whole.
struct DropoutPlace {
  DropoutBlock first;
  uint32_t other_heads = 0;  // how many the map has that the call has not

  // To which the numbers of batch element b of the call are added; its bh = b * heads_q + h.
  FLASH_DEVICE DropoutBlock of_batch(uint32_t b) const { return {first.bh + b * other_heads, first.q16, first.k16}; }
  FLASH_DEVICE uint32_t bh(int64_t b, int64_t own_bh) const {
    return of_batch(static_cast<uint32_t>(b)).bh + static_cast<uint32_t>(own_bh);
  }
  FLASH_DEVICE int64_t query(int64_t own) const { return int64_t{first.q16} * 16 + own; }
  FLASH_DEVICE int64_t key(int64_t own) const { return int64_t{first.k16} * 16 + own; }
};

// seed and offset are rng_state[0] and rng_state[1], read where they live; 0 <= p <= 1.
FLASH_DEVICE Dropout make_dropout(int64_t seed, int64_t offset, double p) {
  const uint64_t seed_bits = static_cast<uint64_t>(seed);
  const uint64_t offset_bits = static_cast<uint64_t>(offset);
  Dropout dropout;
  dropout.key0 = static_cast<uint32_t>(seed_bits);
  dropout.key1 = static_cast<uint32_t>(seed_bits >> 32) ^ static_cast<uint32_t>(offset_bits >> 32);
  dropout.offset = static_cast<uint32_t>(offset_bits);
  dropout.threshold = static_cast<uint32_t>(p * 65536.0 + 0.5);
  dropout.scale = dropout.threshold < 65536 ? 1.0 / (1.0 - p) : 0.0;
  return dropout;
}

}  // namespace flash_ext
