// core/dropout.h against a second Philox, published vectors, the golden file and statistics.
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace flash_ext {
namespace {

using Words = std::array<uint32_t, 4>;

// Written from the paper (section 3.3), not from the header: each pair (R, L) = (x[2i], x[2i + 1]) makes
// mulhi(R, M) and mullo(R, M), and the other pair receives them as its R (mixed with its key and L) and its L.
Words paper_philox(Words x, std::array<uint32_t, 2> key, int rounds) {
  const std::array<uint64_t, 2> multiplier = {3528531795u, 3449720151u};
  const std::array<uint32_t, 2> weyl = {2654435769u, 3144134277u};
  for (int round = 0; round < rounds; ++round) {
    Words next{};
    for (int pair = 0; pair < 2; ++pair) {
      const uint64_t product = multiplier[pair] * x[2 * pair];
      const int other = 1 - pair;
      next[2 * other] = static_cast<uint32_t>(product / 4294967296u) ^ key[other] ^ x[2 * other + 1];
      next[2 * other + 1] = static_cast<uint32_t>(product % 4294967296u);
    }
    x = next;
    for (int i = 0; i < 2; ++i) key[i] += weyl[i];
  }
  return x;
}

struct KnownAnswer {
  int rounds;
  Words counter;
  std::array<uint32_t, 2> key;
  Words result;
};

// kat_vectors of Random123, the authors' library.
const KnownAnswer kKnownAnswers[] = {
    {7, {0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
    {7, {~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
    {7,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    {10, {0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {10, {~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {10,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

Words to_array(const PhiloxWords<uint32_t>& words) {
  return {words.word[0], words.word[1], words.word[2], words.word[3]};
}

TEST(Dropout, PublishedVectors) {
  for (const KnownAnswer& answer : kKnownAnswers) {
    EXPECT_EQ(paper_philox(answer.counter, answer.key, answer.rounds), answer.result);
    const Words& c = answer.counter;
    const PhiloxWords<uint32_t> counter{{c[0], c[1], c[2], c[3]}};
    EXPECT_EQ(to_array(answer.rounds == 7 ? philox4x32<7>(counter, answer.key[0], answer.key[1])
                                          : philox4x32<10>(counter, answer.key[0], answer.key[1])),
              answer.result);
  }
}

// The map in its documented form, by positions, on top of the second Philox.
uint32_t paper_number(int64_t seed, int64_t offset, uint32_t bh, int64_t q, int64_t k) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(x & 0xffffffff); };
  const auto high = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const int64_t g = lane / 4, t = lane % 4;
    const Words words = paper_philox({low((k / 16) << 5 | lane), low(q / 16), bh, low(offset)},
                                     {low(seed), high(seed) ^ high(offset)}, 7);
    for (int i = 0; i < 8; ++i) {
      const int64_t row = i / 2 % 2 == 0 ? g : g + 8;
      const int64_t col = 2 * t + i % 2 + (i < 4 ? 0 : 8);
      if (row == q % 16 && col == k % 16) return i % 2 == 0 ? words[i / 2] % 65536 : words[i / 2] / 65536;
    }
  }
  return 1u << 31;  // no lane holds the element
}

// A call of three heads from the third of six on, without the first 16 queries and 32 keys.
TEST(Dropout, PlaceOfAPart) {
  constexpr DropoutPlace place = {.first = {.bh = 2, .q16 = 1, .k16 = 2}, .other_heads = 3};
  for (uint32_t b = 0; b < 3; ++b) {
    for (uint32_t h = 0; h < 3; ++h) {
      EXPECT_EQ(place.bh(b, b * 3 + h), b * 6 + 2 + h);
      const DropoutBlock block = place.of_batch(b).at(b * 3 + h, 48, 80);
      EXPECT_EQ(block.bh, b * 6 + 2 + h);
      EXPECT_EQ(block.q16, (16 + 48) / 16u);
      EXPECT_EQ(block.k16, (32 + 80) / 16u);
    }
  }
  EXPECT_EQ(place.query(5), 16 + 5);
  EXPECT_EQ(place.key(7), 32 + 7);
}

TEST(Dropout, GoldenFile) {
  std::ifstream file(GOLDEN_DIR "/dropout_map.json");
  int entries = 0;
  for (std::string line; std::getline(file, line);) {
    long long seed, offset, q, k;
    unsigned long bh;
    unsigned number;
    double p;
    char keep[8];
    const char* format =
        R"({"seed": %lld, "offset": %lld, "bh": %lu, "q": %lld, "k": %lld, "p": %lf, "number": %u, "keep": %7[a-z])";
    if (std::sscanf(line.c_str(), format, &seed, &offset, &bh, &q, &k, &p, &number, keep) != 8) continue;
    ++entries;
    const Dropout dropout = make_dropout(seed, offset, p);
    EXPECT_EQ(dropout.number(static_cast<uint32_t>(bh), q, k), number) << line;
    EXPECT_EQ(paper_number(seed, offset, static_cast<uint32_t>(bh), q, k), number) << line;
    EXPECT_EQ(dropout.keep(static_cast<uint32_t>(bh), q, k), std::string(keep) == "true") << line;
  }
  EXPECT_EQ(entries, 41);
}

TEST(Dropout, EveryElementOfABlockHasItsOwnNumber) {
  const Dropout dropout = make_dropout(1234567890123456789, 77, 0.5);
  std::vector<bool> taken(32 * 4 * 2);
  for (int64_t q = 0; q < 16; ++q)
    for (int64_t k = 0; k < 16; ++k) {
      const DropoutSlot slot = dropout_slot(q + 32, k + 48);
      const size_t index = (slot.lane * 4 + slot.word) * 2 + slot.shift / 16;
      EXPECT_FALSE(taken.at(index));
      taken[index] = true;
      EXPECT_EQ(dropout.number(9, q + 32, k + 48), paper_number(1234567890123456789, 77, 9, q + 32, k + 48));
    }
}

TEST(Dropout, RateAtItsLimits) {
  const Dropout none = make_dropout(1, 2, 0.0);
  EXPECT_EQ(none.threshold, 0u);
  EXPECT_EQ(none.scale, 1.0);
  EXPECT_TRUE(none.keeps(0));
  const Dropout all = make_dropout(1, 2, 1.0);
  EXPECT_EQ(all.threshold, 65536u);
  EXPECT_EQ(all.scale, 0.0);
  EXPECT_FALSE(all.keeps(65535));
  const Dropout nearly_all = make_dropout(1, 2, 1.0 - 1e-6);  // rounds to all, which pairs may not tell from 65535
  EXPECT_EQ(nearly_all.threshold, 65536u);
  EXPECT_EQ(nearly_all.scale, 0.0);
  EXPECT_EQ(make_dropout(1, 2, 0.001).threshold, 66u);
  EXPECT_EQ(make_dropout(1, 2, 0.1).scale, 1.0 / 0.9);
  EXPECT_EQ(make_dropout(1, 2, 0.5 / 65536).threshold, 1u);
}

TEST(Dropout, PairsAreComparedAsNumbers) {
  for (double p : {0.5 / 65536, 0.1, 0.5, 0.9, 65535.0 / 65536}) {
    const Dropout dropout = make_dropout(1, 2, p);
    const uint32_t threshold = dropout.pair_threshold(), t = dropout.threshold;
    for (uint32_t low : {0u, t - 1, t, 65535u}) {
      for (uint32_t high : {0u, t - 1, t, 65535u}) {
        EXPECT_EQ(Dropout::keeps_low(high << 16 | low, threshold), dropout.keeps(low)) << p;
        EXPECT_EQ(Dropout::keeps_high(high << 16 | low, threshold), dropout.keeps(high)) << p;
      }
    }
  }
}

// 2^20 elements of four heads.
template <class Visit>
void for_each_number(const Dropout& dropout, Visit visit) {
  for (uint32_t bh = 0; bh < 4; ++bh)
    for (uint32_t q16 = 0; q16 < 32; ++q16)
      for (uint32_t k16 = 0; k16 < 32; ++k16)
        for (uint32_t lane = 0; lane < 32; ++lane)
          for (uint32_t word : to_array(dropout.block_words(bh, q16, k16, lane))) {
            visit(word & 0xffff);
            visit(word >> 16);
          }
}

TEST(Dropout, KeepRate) {
  for (double p : {0.0, 0.001, 0.1, 0.5, 0.9, 1.0}) {
    const Dropout dropout = make_dropout(2024, 0, p);
    double kept = 0, count = 0;
    for_each_number(dropout, [&](uint32_t number) {
      kept += dropout.keeps(number);
      ++count;
    });
    const double rate = 1.0 - dropout.threshold / 65536.0;
    EXPECT_NEAR(1.0 - p, rate, 0x1p-17);
    EXPECT_LE(std::abs(kept - count * rate), 5 * std::sqrt(count * rate * (1 - rate))) << p;
  }
}

TEST(Dropout, NumbersAreUniform) {
  std::vector<double> low(256), high(256);
  for_each_number(make_dropout(7, 3, 0.5), [&](uint32_t number) {
    ++low[number & 255];
    ++high[number >> 8];
  });
  for (const std::vector<double>& bins : {low, high}) {
    double chi_square = 0;
    for (double bin : bins) chi_square += (bin - 4096) * (bin - 4096) / 4096;
    EXPECT_LT(chi_square, 255 + 5 * std::sqrt(2 * 255.0));
  }
}

TEST(Dropout, NeighboursAreIndependent) {
  const auto agreement = [](auto other) {
    const Dropout dropout = make_dropout(99, 4, 0.5);
    int same = 0;
    for (int64_t q = 0; q < 256; ++q)
      for (int64_t k = 0; k < 256; ++k) same += dropout.keep(6, q, k) == other(q, k);
    return same;
  };
  const Dropout same = make_dropout(99, 4, 0.5);
  const std::function<bool(int64_t, int64_t)> others[] = {
      [&](int64_t q, int64_t k) { return same.keep(6, q + 1, k); },
      [&](int64_t q, int64_t k) { return same.keep(6, q + 8, k); },
      [&](int64_t q, int64_t k) { return same.keep(6, q, k + 1); },
      [&](int64_t q, int64_t k) { return same.keep(6, q, k + 8); },
      [&](int64_t q, int64_t k) { return same.keep(6, q + 16, k); },
      [&](int64_t q, int64_t k) { return same.keep(6, q, k + 16); },
      [&](int64_t q, int64_t k) { return same.keep(7, q, k); },
      [&](int64_t q, int64_t k) { return same.keep(6, k + 1, q); },
      [&](int64_t q, int64_t k) { return make_dropout(100, 4, 0.5).keep(6, q, k); },
      [&](int64_t q, int64_t k) { return make_dropout(99, 8, 0.5).keep(6, q, k); },
      [&](int64_t q, int64_t k) { return make_dropout(99, 4 + (int64_t{1} << 32), 0.5).keep(6, q, k); },
      [&](int64_t q, int64_t k) { return make_dropout(99 + (int64_t{1} << 32), 4, 0.5).keep(6, q, k); },
  };
  for (const auto& other : others) EXPECT_NEAR(agreement(other), 32768, 5 * 128);  // sigma = sqrt(65536) / 2
}

// What a kernel that holds S^T does: movmatrix on each word (row g of an 8x8 matrix of 16-bit numbers lies in lanes
// 4g..4g+3, two a lane), and words 1 and 2 change places. Lane 4g + t must then hold keys {g, g + 8} x rows {2t, ...}.
TEST(Dropout, TransposedFragmentHoldsTheSameNumbers) {
  const Dropout dropout = make_dropout(31337, 12, 0.3);
  const auto half = [](uint32_t word, int64_t i) { return word >> (16 * i) & 0xffff; };
  Words words[32], transposed[32];
  for (uint32_t lane = 0; lane < 32; ++lane) words[lane] = to_array(dropout.block_words(11, 2, 3, lane));
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int w = 0; w < 4; ++w) {
      const int64_t row = lane / 4, col = lane % 4 * 2;
      const auto source = [&](int64_t r, int64_t c) { return half(words[r * 4 + c / 2][w], c % 2); };
      transposed[lane][w == 1 ? 2 : w == 2 ? 1 : w] = source(col, row) | source(col + 1, row) << 16;
    }
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 8; ++i) {
      const int64_t key = lane / 4 + (i / 2 % 2) * 8;
      const int64_t query = lane % 4 * 2 + i % 2 + i / 4 * 8;
      EXPECT_EQ(half(transposed[lane][i / 2], i % 2), dropout.number(11, 2 * 16 + query, 3 * 16 + key));
    }
}

}  // namespace
}  // namespace flash_ext

// A vector of words lives in a namespace of its own; mul_hi_lo is found there.
namespace vectors {

struct Word8 {
  uint32_t x[8]{};
  Word8() = default;
  explicit Word8(uint32_t value) {
    for (uint32_t& xi : x) xi = value;
  }
};

template <class Op>
Word8 map(const Word8& a, const Word8& b, Op op) {
  Word8 c;
  for (int i = 0; i < 8; ++i) c.x[i] = op(a.x[i], b.x[i]);
  return c;
}
Word8 operator+(const Word8& a, const Word8& b) { return map(a, b, std::plus<uint32_t>{}); }
Word8 operator^(const Word8& a, const Word8& b) { return map(a, b, std::bit_xor<uint32_t>{}); }
void mul_hi_lo(uint32_t a, const Word8& b, Word8& hi, Word8& lo) {
  for (int i = 0; i < 8; ++i) flash_ext::mul_hi_lo(a, b.x[i], hi.x[i], lo.x[i]);
}

TEST(Dropout, VectorOfWordsEqualsScalar) {
  const flash_ext::Dropout dropout = flash_ext::make_dropout(-5, 1ll << 40, 0.2);
  Word8 lanes;
  for (uint32_t i = 0; i < 8; ++i) lanes.x[i] = 32 * (i / 4) + 20 + i % 4;  // lanes 20..23 of blocks 101 and 102
  const flash_ext::PhiloxWords<Word8> words = dropout.block_words(3, 50, 101, lanes);
  for (uint32_t i = 0; i < 8; ++i) {
    const auto scalar = dropout.block_words(3, 50, 101 + i / 4, 20 + i % 4);
    for (int w = 0; w < 4; ++w) EXPECT_EQ(words.word[w].x[i], scalar.word[w]);
  }
}

}  // namespace vectors
