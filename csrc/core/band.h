// Causal, window and diagonal offset as data: key j is seen by query i exactly when  i + lower <= j <= i + upper.
//
// Every backend asks this one structure which tiles exist, which of them need a mask and which pair is kept; costs
// (core/cost.h) count pairs with it. Called by all kernels, on host and device.
// Invariant: lower and upper are clamped to [-2^40, 2^40], so that adding an index never overflows.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/portable.h"

namespace flash_ext {

struct Range {
  int64_t first = 0;
  int64_t last = 0;  // one past the end

  FLASH_DEVICE int64_t size() const { return last > first ? last - first : 0; }
  FLASH_DEVICE bool empty() const { return last <= first; }
};

struct Band {
  static constexpr int64_t kLimit = int64_t{1} << 40;

  int64_t lower = -kLimit;
  int64_t upper = kLimit;

  FLASH_DEVICE bool keep(int64_t query, int64_t key) const { return key - query >= lower && key - query <= upper; }

  // True when no pair is removed whatever the lengths.
  FLASH_DEVICE bool unbounded() const { return lower <= -kLimit && upper >= kLimit; }

  // Keys in [0, len_k) that at least one of the queries sees.
  FLASH_DEVICE Range keys(Range queries, int64_t len_k) const {
    if (queries.empty()) return {};
    const int64_t first = queries.first + lower;
    const int64_t last = queries.last + upper;
    return {first > 0 ? first : 0, last < len_k ? last : len_k};
  }

  // Queries in [0, len_q) that see at least one of the keys.
  FLASH_DEVICE Range queries(Range keys, int64_t len_q) const {
    if (keys.empty()) return {};
    const int64_t first = keys.first - upper;
    const int64_t last = keys.last - lower;
    return {first > 0 ? first : 0, last < len_q ? last : len_q};
  }

  // True when a tile has at least one pair that is not kept, so that it must be masked.
  FLASH_DEVICE bool is_boundary(Range queries, Range keys) const {
    return !(keep(queries.first, keys.last - 1) && keep(queries.last - 1, keys.first));
  }
};

// The band of one sequence of these lengths. `align` of the public call: offset 0 (top left) or len_k - len_q (bottom
// right).
FLASH_DEVICE Band make_band(const Problem& problem, int64_t len_q, int64_t len_k) {
  const auto clamp = [](int64_t x) {
    return x < -Band::kLimit ? -Band::kLimit : (x > Band::kLimit ? Band::kLimit : x);
  };
  const int64_t offset = problem.bottom_right ? len_k - len_q : 0;
  Band band;
  if (problem.window_left < Band::kLimit) band.lower = clamp(offset - problem.window_left);
  if (problem.window_right < Band::kLimit) band.upper = clamp(offset + problem.window_right);
  if (problem.causal && offset < band.upper) band.upper = offset;
  return band;
}

FLASH_DEVICE Band make_band(const Problem& problem) { return make_band(problem, problem.len_q, problem.len_k); }

constexpr int64_t kMostLength = 1 << 30;  // kernels refuse lengths from here on, or from less

// The band of lengths that fit an int, as the inner loops of a GPU have it: key j is seen by query i when j - i is in
// [lower, upper] and j < len_k.
struct TileBand {
  int lower, upper, len_k;

  FLASH_DEVICE static TileBand make(const Band& band, int len_k) {
    const auto clamp = [](int64_t x) {
      return static_cast<int>(x < -kMostLength ? -kMostLength : (x > kMostLength ? kMostLength : x));
    };
    return {clamp(band.lower), clamp(band.upper), len_k};
  }
  // True when a tile has a pair that is not kept.
  FLASH_DEVICE bool is_boundary(int first_query, int queries, int first_key, int keys) const {
    const int shift = first_key - first_query;
    return first_key + keys > len_k || shift + keys - 1 > upper || shift - queries + 1 < lower;
  }
};

}  // namespace flash_ext
