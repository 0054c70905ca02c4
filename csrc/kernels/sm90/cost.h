// What the rows of sm90 take (core/cost.h). Called by rows.cpp. Speeds are an H200's, of
// benchmarks/results/nvidia-h200.
#pragma once

#include "core/cost.h"
#include "core/tile_schedule.h"
#include "kernels/sm90/bwd_config.h"
#include "kernels/sm90/config.h"

namespace flash_ext::sm90 {

inline double forward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool few_queries = problem.len_q <= 64;
  // A tile of 64 queries occupies a multiprocessor for 3 us however little of it there is.
  Speed speed{head_dim <= 64 ? 550.0 : head_dim <= 128 ? 700.0 : 780.0, few_queries ? 3.0 : 1.0};
  if (is_scored(problem)) speed.tflops *= 0.72;
  const double tiles =
      static_cast<double>(problem.batch * problem.heads_q * block_count(problem.len_q, few_queries ? 64 : 128));
  return time_of(problem, device, 2, tiles, speed);
}

inline double backward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const double tflops = head_dim <= 64 ? 560 : head_dim <= 128 ? 620 : 510;
  const double tiles = static_cast<double>(problem.batch * problem.heads_k * block_count(problem.len_k, 128));
  double us = time_of(problem, device, 5, tiles, {is_scored(problem) ? 0.8 * tflops : tflops, 6});
  if (problem.wants_dbias && !problem.whole_dbias) us += time_of(problem, device, 2, tiles, {400, 6});
  return us + memory_cost(dq_bytes(problem));
}

}  // namespace flash_ext::sm90
