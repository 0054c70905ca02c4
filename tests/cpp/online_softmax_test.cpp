// core/online_softmax.h against a two-pass softmax in long double, for tiles in any order and of any size.
#include "core/online_softmax.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

namespace flash_ext {
namespace {

template <class Real>
constexpr Real kInf = std::numeric_limits<Real>::infinity();
template <class Real>
constexpr Real kLowest = std::numeric_limits<Real>::lowest();

// A row of scores, and one value for each.
template <class Real>
struct Row {
  std::vector<Real> scores;
  std::vector<Real> values;
  std::optional<Real> sink;
};

struct Expected {
  long double out = 0;
  long double lse = -kInf<long double>;
};

template <class Real>
Expected two_pass(const Row<Real>& row) {
  long double max = row.sink ? static_cast<long double>(*row.sink) : -kInf<long double>;
  for (Real score : row.scores) max = std::max(max, static_cast<long double>(score));
  if (max == -kInf<long double>) return {};
  long double sum = row.sink ? std::exp(*row.sink - max) : 0;
  long double out = 0;
  for (size_t j = 0; j < row.scores.size(); ++j) {
    const long double p = std::exp(row.scores[j] - max);
    sum += p;
    out += p * row.values[j];
  }
  return {out / sum, max + std::log(sum)};
}

// A partial result: the state of the softmax and the accumulator that belongs to it.
template <class Real>
struct Partial {
  OnlineSoftmax<Real> softmax;
  Real o_acc = 0;

  void tile(const Row<Real>& row, const std::vector<size_t>& keys) {
    Real tile_max = -kInf<Real>;
    for (size_t j : keys) tile_max = std::max(tile_max, row.scores[j]);
    o_acc *= softmax.step(tile_max);
    Real tile_sum = 0;
    for (size_t j : keys) {
      const Real p = std::exp(row.scores[j] - softmax.shift());
      tile_sum += p;
      o_acc += p * row.values[j];
    }
    softmax.add(tile_sum);
  }

  // Another accumulator is one more step of the recurrence.
  void merge(const Partial& other) {
    const Real factor = softmax.step(other.softmax.row_max);
    const Real factor_other = std::exp(other.softmax.row_max - softmax.shift());
    softmax.add(other.softmax.row_sum * factor_other);
    o_acc = factor * o_acc + factor_other * other.o_acc;
  }
};

template <class Real>
Partial<Real> one_tile(const Row<Real>& row, const std::vector<size_t>& keys) {
  Partial<Real> partial;
  partial.tile(row, keys);
  return partial;
}

template <class Real>
Expected finish(const Partial<Real>& partial, const Row<Real>& row) {
  const auto result = row.sink ? partial.softmax.finish(*row.sink) : partial.softmax.finish();
  return {partial.o_acc * result.inverse_sum, result.lse};
}

// The keys of a row, shuffled and cut at random places; empty tiles included.
std::vector<std::vector<size_t>> random_tiles(size_t keys, std::mt19937& random) {
  std::vector<size_t> order(keys);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<std::vector<size_t>> tiles(1 + random() % 6);
  for (size_t j : order) tiles[random() % tiles.size()].push_back(j);
  return tiles;
}

template <class Real>
void expect_close(Expected got, Expected expected, Real spread) {
  const Real eps = std::numeric_limits<Real>::epsilon();
  EXPECT_NEAR(got.out, expected.out, (8 + spread) * eps);
  if (expected.lse == -kInf<long double>) {
    EXPECT_EQ(got.lse, expected.lse);
  } else {
    EXPECT_LE(std::abs(got.lse - expected.lse), 4 * eps * std::max(1.0L, std::abs(expected.lse)));
  }
}

// One tile, many tiles, and many partial results merged in random order all give the two-pass softmax.
template <class Real>
void check(const Row<Real>& row, Real spread) {
  std::mt19937 random(static_cast<unsigned>(row.scores.size()));
  const Expected expected = two_pass(row);
  for (int trial = 0; trial < 20; ++trial) {
    Partial<Real> running, merged;
    for (const std::vector<size_t>& tile : random_tiles(row.scores.size(), random)) {
      running.tile(row, tile);
      merged.merge(one_tile(row, tile));
    }
    expect_close(finish(running, row), expected, spread);
    expect_close(finish(merged, row), expected, spread);
  }
}

template <class Real>
Row<Real> random_row(size_t keys, Real spread) {
  std::mt19937 random(7);
  std::uniform_real_distribution<Real> score(-spread, spread), value(-1, 1);
  Row<Real> row;
  for (size_t j = 0; j < keys; ++j) {
    row.scores.push_back(score(random));
    row.values.push_back(value(random));
  }
  return row;
}

template <class Real>
class OnlineSoftmaxTest : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(OnlineSoftmaxTest, Reals);

TYPED_TEST(OnlineSoftmaxTest, AnySplitOfRandomRows) {
  for (size_t keys : {0, 1, 2, 17, 200})
    for (TypeParam spread : {0.0, 1.0, 30.0, 300.0}) check(random_row<TypeParam>(keys, spread), spread);
}

TYPED_TEST(OnlineSoftmaxTest, RemovedKeys) {
  Row<TypeParam> row = random_row<TypeParam>(40, TypeParam(5));
  for (size_t j = 0; j < row.scores.size(); ++j)
    if (j % 3 != 1) row.scores[j] = -kInf<TypeParam>;
  check(row, TypeParam(5));
  std::fill(row.scores.begin(), row.scores.end(), -kInf<TypeParam>);
  check(row, TypeParam(5));
  row.scores[20] = kLowest<TypeParam>;
  check(row, TypeParam(5));
}

TYPED_TEST(OnlineSoftmaxTest, RowFullOfTheLowestNumberIsTheMean) {
  Row<TypeParam> row = random_row<TypeParam>(30, TypeParam(1));
  std::fill(row.scores.begin(), row.scores.end(), kLowest<TypeParam>);
  check(row, TypeParam(1));
  EXPECT_NEAR(finish(one_tile(row, {0, 1, 2, 3}), row).out,
              (row.values[0] + row.values[1] + row.values[2] + row.values[3]) / 4, 1e-6);
}

TYPED_TEST(OnlineSoftmaxTest, HugeScores) {
  const TypeParam max = std::numeric_limits<TypeParam>::max();
  check(Row<TypeParam>{{max, -max, max, 0, 1}, {1, 2, 3, 4, 5}, {}}, TypeParam(1));
  check(Row<TypeParam>{{TypeParam(1e30), TypeParam(1e30), TypeParam(-1e30)}, {1, -1, 7}, {}}, TypeParam(1));
  check(Row<TypeParam>{{-max, max / 2}, {1, 2}, {}}, TypeParam(1));
}

TYPED_TEST(OnlineSoftmaxTest, SinkTakesItsShareAndHasNoValue) {
  for (double sink : {-1e4, -3.0, 0.0, 4.0, 90.0, 1e4})
    for (size_t keys : {0, 1, 50}) {
      Row<TypeParam> row = random_row<TypeParam>(keys, TypeParam(4));
      row.sink = static_cast<TypeParam>(sink);
      check(row, TypeParam(4));
    }
  Row<TypeParam> row = random_row<TypeParam>(50, TypeParam(4));
  row.sink = -kInf<TypeParam>;
  check(row, TypeParam(4));
  // The mean of the values where the sink equals two equal scores: it takes a third.
  const Row<TypeParam> thirds{{2, 2}, {1, 1}, TypeParam(2)};
  EXPECT_NEAR(finish(one_tile(thirds, {0, 1}), thirds).out, 2.0 / 3, 1e-6);
}

TYPED_TEST(OnlineSoftmaxTest, EmptyRows) {
  const OnlineSoftmax<TypeParam> empty;
  EXPECT_EQ(empty.finish().inverse_sum, 0);
  EXPECT_EQ(empty.finish().lse, -kInf<TypeParam>);
  EXPECT_EQ(empty.finish(TypeParam(3)).inverse_sum, 0);
  EXPECT_EQ(empty.finish(TypeParam(3)).lse, 3);
  EXPECT_EQ(empty.finish(-kInf<TypeParam>).lse, -kInf<TypeParam>);
}

TYPED_TEST(OnlineSoftmaxTest, NanAndInfinityAreNotHidden) {
  const TypeParam nan = std::numeric_limits<TypeParam>::quiet_NaN();
  for (TypeParam bad : {nan, kInf<TypeParam>})
    for (size_t place : {0, 5, 9}) {
      Row<TypeParam> row = random_row<TypeParam>(10, TypeParam(1));
      row.scores[place] = bad;
      Partial<TypeParam> running, merged, first, second;
      for (size_t j = 0; j < 10; ++j) {
        running.tile(row, {j});
        (j < 5 ? first : second).tile(row, {j});
      }
      merged.merge(first);
      merged.merge(second);
      for (const Partial<TypeParam>& partial : {running, merged}) {
        EXPECT_TRUE(std::isnan(finish(partial, row).out));
        EXPECT_TRUE(std::isnan(finish(partial, row).lse));
      }
    }
  const Row<TypeParam> row = random_row<TypeParam>(3, TypeParam(1));
  EXPECT_TRUE(std::isnan(one_tile(row, {0, 1, 2}).softmax.finish(nan).inverse_sum));
}

// Split-K: a finished result is one score of its lse with the value out, so the recurrence joins any number of them.
TYPED_TEST(OnlineSoftmaxTest, FinishedResultsMerge) {
  for (TypeParam spread : {1.0, 50.0}) {
    const Row<TypeParam> row = random_row<TypeParam>(60, spread);
    std::mt19937 random(3);
    for (int trial = 0; trial < 20; ++trial) {
      Partial<TypeParam> combined;
      for (const std::vector<size_t>& tile : random_tiles(60, random)) {
        const Expected result = finish(one_tile(row, tile), row);
        const TypeParam out = result.out, lse = result.lse;
        combined.tile({{lse}, {out}, {}}, {0});
      }
      expect_close(finish(combined, row), two_pass(row), spread);
    }
  }
}

TYPED_TEST(OnlineSoftmaxTest, BackwardProbabilities) {
  Row<TypeParam> row = random_row<TypeParam>(30, TypeParam(20));
  row.scores[3] = -kInf<TypeParam>;
  for (bool with_sink : {false, true}) {
    if (with_sink) row.sink = TypeParam(19);
    const Expected expected = two_pass(row);
    const TypeParam lse = expected.lse;
    EXPECT_FALSE(needs_renormalisation(lse));
    for (TypeParam score : row.scores)
      EXPECT_NEAR(probability(score, lse), std::exp(score - expected.lse),
                  40 * std::numeric_limits<TypeParam>::epsilon());
  }
  EXPECT_EQ(probability(-kInf<TypeParam>, -kInf<TypeParam>), 0);
  EXPECT_EQ(probability(TypeParam(1), -kInf<TypeParam>), 0);
}

TYPED_TEST(OnlineSoftmaxTest, LargeLseIsRenormalised) {
  const TypeParam limit = 32768;
  EXPECT_FALSE(needs_renormalisation(TypeParam(0)));
  EXPECT_FALSE(needs_renormalisation(limit));
  EXPECT_FALSE(needs_renormalisation(-limit));
  EXPECT_FALSE(needs_renormalisation(-kInf<TypeParam>));
  EXPECT_TRUE(needs_renormalisation(limit + 1));
  EXPECT_TRUE(needs_renormalisation(-limit - 1));

  for (TypeParam level : {kLowest<TypeParam>, TypeParam(1e30)}) {
    Row<TypeParam> row = random_row<TypeParam>(10, TypeParam(1));
    std::fill(row.scores.begin(), row.scores.end(), level);
    const TypeParam lse = finish(one_tile(row, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), row).lse;
    ASSERT_TRUE(needs_renormalisation(lse));
    EXPECT_EQ(probability(level, lse), 1);  // not 1 / 10: this is the trap
    TypeParam sum = 0;
    for (TypeParam score : row.scores) sum += probability(score, lse);
    EXPECT_EQ(probability(level, lse) / sum, TypeParam(0.1));
  }
}

}  // namespace
TEST(LogSumExpTest, IsRoundedOnce) {
  std::mt19937 random(11);
  std::normal_distribution<float> max(0.f, 8.f);
  std::uniform_real_distribution<float> log2_sum(-8.f, 24.f), scale(0.05f, 1.f);
  for (int i = 0; i < 100000; ++i) {
    const float m = max(random), c = scale(random), sum = std::exp2(log2_sum(random));
    const double exact = static_cast<double>(m) * c + std::log(static_cast<double>(sum));
    const double unit = std::ldexp(1.0, std::max(std::ilogb(exact), -126) - 23);
    ASSERT_LE(std::abs(log_sum_exp(m, c, sum) - exact), 0.5 * unit + 5e-8) << m << " " << c << " " << sum;
  }
  EXPECT_EQ(log_sum_exp(3.f, 1.f, 1.f), 3.f);
  EXPECT_EQ(log_sum_exp(kLowest<float>, 1.f, 7.f), kLowest<float>);
  EXPECT_TRUE(std::isnan(log_sum_exp(1.f, 1.f, std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace flash_ext
