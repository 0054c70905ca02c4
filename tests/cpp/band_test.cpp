// core/band.h against the contract's own words, pair by pair, over every small problem.
#include "core/band.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace flash_ext {
namespace {

// sdpa.md: causal j <= i + offset; window i + offset - left <= j <= i + offset + right.
bool allowed(const Problem& problem, int64_t i, int64_t j) {
  const int64_t offset = problem.bottom_right ? problem.len_k - problem.len_q : 0;
  const int64_t distance = j - i - offset;
  if (problem.causal && distance > 0) return false;
  if (problem.window_left != kUnbounded && -distance > problem.window_left) return false;
  if (problem.window_right != kUnbounded && distance > problem.window_right) return false;
  return true;
}

std::vector<Problem> small_problems(int64_t max_len) {
  std::vector<Problem> problems;
  const int64_t windows[] = {kUnbounded, 0, 1, 2, 4, 100};
  Problem problem;
  for (problem.len_q = 0; problem.len_q <= max_len; ++problem.len_q)
    for (problem.len_k = 0; problem.len_k <= max_len; ++problem.len_k)
      for (int flags = 0; flags < 4; ++flags)
        for (int64_t left : windows)
          for (int64_t right : windows) {
            problem.causal = flags & 1;
            problem.bottom_right = flags & 2;
            problem.window_left = left;
            problem.window_right = right;
            problems.push_back(problem);
          }
  return problems;
}

std::vector<Range> subranges(int64_t len) {
  std::vector<Range> ranges;
  for (int64_t first = 0; first < len; ++first)
    for (int64_t last = first + 1; last <= len; ++last) ranges.push_back({first, last});
  return ranges;
}

void expect_same(Range got, Range expected) {
  if (expected.empty()) {
    EXPECT_TRUE(got.empty()) << "[" << got.first << ", " << got.last << ")";
    EXPECT_EQ(got.size(), 0);
  } else {
    EXPECT_EQ(got.first, expected.first);
    EXPECT_EQ(got.last, expected.last);
    EXPECT_EQ(got.size(), expected.last - expected.first);
  }
}

// The smallest range that holds every index for which `seen` is true.
template <class Seen>
Range hull(int64_t len, Seen seen) {
  Range range{len, 0};
  for (int64_t i = 0; i < len; ++i) {
    if (!seen(i)) continue;
    range.first = std::min(range.first, i);
    range.last = i + 1;
  }
  return range;
}

TEST(Band, KeepsWhatTheContractAllows) {
  for (const Problem& problem : small_problems(7)) {
    const Band band = make_band(problem);
    int64_t pairs = 0;
    for (int64_t i = 0; i < problem.len_q; ++i)
      for (int64_t j = 0; j < problem.len_k; ++j) {
        ASSERT_EQ(band.keep(i, j), allowed(problem, i, j));
        pairs += allowed(problem, i, j);
      }
    if (band.unbounded()) {
      ASSERT_EQ(pairs, problem.len_q * problem.len_k);
    }
  }
}

TEST(Band, TileRangesAreExact) {
  for (const Problem& problem : small_problems(5)) {
    const Band band = make_band(problem);
    for (Range queries : subranges(problem.len_q))
      expect_same(band.keys(queries, problem.len_k), hull(problem.len_k, [&](int64_t j) {
                    for (int64_t i = queries.first; i < queries.last; ++i)
                      if (allowed(problem, i, j)) return true;
                    return false;
                  }));
    for (Range keys : subranges(problem.len_k))
      expect_same(band.queries(keys, problem.len_q), hull(problem.len_q, [&](int64_t i) {
                    for (int64_t j = keys.first; j < keys.last; ++j)
                      if (allowed(problem, i, j)) return true;
                    return false;
                  }));
  }
}

TEST(Band, BoundaryTilesAreThoseWithARemovedPair) {
  for (const Problem& problem : small_problems(5)) {
    const Band band = make_band(problem);
    for (Range queries : subranges(problem.len_q))
      for (Range keys : subranges(problem.len_k)) {
        bool removed = false;
        for (int64_t i = queries.first; i < queries.last; ++i)
          for (int64_t j = keys.first; j < keys.last; ++j) removed |= !allowed(problem, i, j);
        ASSERT_EQ(band.is_boundary(queries, keys), removed);
      }
  }
}

TEST(Band, EmptyRangesSeeNothing) {
  const Band band = make_band(Problem{});
  EXPECT_TRUE(band.keys({3, 3}, 10).empty());
  EXPECT_TRUE(band.keys({5, 3}, 10).empty());
  EXPECT_TRUE(band.queries({4, 4}, 10).empty());
  EXPECT_TRUE(band.keys({0, 4}, 0).empty());
}

TEST(Band, UnboundedOnlyWithoutAnyLimit) {
  for (const Problem& problem : small_problems(3)) {
    const bool limited = problem.causal || problem.window_left != kUnbounded || problem.window_right != kUnbounded;
    EXPECT_EQ(make_band(problem).unbounded(), !limited);
  }
}

TEST(Band, ExtremeWindowsAndLengthsDoNotOverflow) {
  const int64_t extremes[] = {kUnbounded,       kUnbounded - 1, kUnbounded / 2,
                              Band::kLimit + 1, Band::kLimit,   Band::kLimit - 1};
  const int64_t lengths[] = {1, 1000, int64_t{1} << 31, int64_t{1} << 36};
  Problem problem;
  for (int64_t left : extremes)
    for (int64_t right : extremes)
      for (int64_t len_q : lengths)
        for (int64_t len_k : lengths)
          for (int flags = 0; flags < 4; ++flags) {
            problem.window_left = left;
            problem.window_right = right;
            problem.len_q = len_q;
            problem.len_k = len_k;
            problem.bottom_right = flags & 1;
            problem.causal = flags & 2;
            const Band band = make_band(problem);
            const int64_t diagonal = problem.bottom_right ? len_k - len_q : 0;
            ASSERT_GE(band.lower, -Band::kLimit);
            ASSERT_LE(band.upper, Band::kLimit);
            ASSERT_EQ(band.keys({len_q - 1, len_q}, len_k).size(),
                      problem.causal ? std::clamp<int64_t>(len_q + diagonal, 0, len_k) : len_k);
            ASSERT_TRUE(band.keep(len_q - 1, len_q - 1 + diagonal));
            ASSERT_EQ(band.keep(0, diagonal + 1), !problem.causal);
            ASSERT_EQ(band.queries({0, 1}, len_q).first, problem.causal ? std::max<int64_t>(-diagonal, 0) : 0);
          }
}

}  // namespace
}  // namespace flash_ext
