// What a pass takes by a kernel's speed, to compare kernels: rough, in microseconds of an H200.
//
// Called by the cost functions of rows. docs/numbers/ and docs/lab/2026-11-22-short-calls.md have the recorded times
// that the speeds are of; tests/backends/test_cost.py compares the choice with them.
#pragma once

#include <algorithm>

#include "core/band.h"
#include "core/kernel.h"

namespace flash_ext {

struct Speed {
  double tflops = 1;   // of a full card, of the products that the formulas have
  double tile_us = 0;  // what a tile takes beside its products, where many follow each other
  double lone_us = 0;  // ... where each has a multiprocessor for itself; 0: the same
};

// Pairs of query and key that the band keeps, from a few queries.
inline double kept_pairs(const Problem& problem) {
  constexpr int64_t kSamples = 4;
  const Band band = make_band(problem);
  double keys = 0;
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t query = (2 * i + 1) * problem.len_q / (2 * kSamples);
    keys += static_cast<double>(band.keys({query, query + 1}, problem.len_k).size());
  }
  return keys / kSamples * static_cast<double>(problem.len_q * problem.batch * problem.heads_q);
}

// Of forwards of up to 64 queries, those that were timed with both backends. Heads of a group may share a tile, which
// is not in the formulas and tells where keys are many.
inline bool is_timed_short(const Problem& problem) {
  return problem.len_q <= 64 && (problem.heads_q == problem.heads_k || problem.len_k <= 128);
}

// products: of a score tile, 2 in forward and 5 in backward.
inline double time_of(const Problem& problem, const DeviceInfo& device, int products, double tiles,
                      const Speed& speed) {
  constexpr double kLaunch = 3.0, kH200 = 132;
  const double multiprocessors = device.multiprocessors > 0 ? device.multiprocessors : kH200;
  const double flops = products * kept_pairs(problem) * static_cast<double>(problem.head_dim + problem.head_dim_v);
  const double rounds = tiles / multiprocessors, used = std::min(1.0, rounds);
  const double lone_us = speed.lone_us > 0 ? speed.lone_us : speed.tile_us;
  return kLaunch + std::max(lone_us, rounds * speed.tile_us) +
         flops / (speed.tflops * 1e6 * used * multiprocessors / kH200);
}

// As if queries and keys filled whole tiles, of all columns that an instance has.
inline Problem in_whole_tiles(const Problem& problem, int64_t block_m, int64_t block_n, int64_t head_dim) {
  const auto whole = [](int64_t length, int64_t block) { return (length + block - 1) / block * block; };
  Problem filled = problem;
  filled.len_q = whole(problem.len_q, block_m);
  filled.len_k = whole(problem.len_k, block_n);
  filled.head_dim = filled.head_dim_v = head_dim;
  return filled;
}

// Memory beside inputs and outputs is worth time: what is beyond 3 MiB counts as ten times what it takes to fill it.
inline double memory_cost(double bytes) { return 1e-5 * std::max(0.0, bytes - (3 << 20)); }

// Of the sums of dQ in float.
inline double dq_bytes(const Problem& problem) {
  return problem.wants_dq ? 4.0 * problem.batch * problem.heads_q * problem.len_q * problem.head_dim : 0.0;
}

}  // namespace flash_ext
