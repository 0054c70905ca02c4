// What the rows of sm80 in 16 bits take (core/cost.h); the others are alone in what they serve.
//
// Called by rows.cpp. Speeds are an H200's, of benchmarks/results/nvidia-h200/sm80 where sequences are long.
#pragma once

#include "core/cost.h"
#include "core/tile_schedule.h"
#include "kernels/sm80/config.h"

namespace flash_ext::sm80 {

inline double forward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool few_queries = problem.len_q <= 64, plain = is_plain(problem);
  const double keys = static_cast<double>(problem.len_k);
  const double tiles =
      static_cast<double>(problem.batch * problem.heads_q * block_count(problem.len_q, few_queries ? 64 : 128));
  Speed speed;
  if (is_timed_short(problem) && plain) {
    speed = head_dim <= 32    ? Speed{177, 0.75, 2.6 + 0.012 * keys}
            : head_dim <= 64  ? Speed{257, 0.9, 3.3 + 0.013 * keys}
            : head_dim <= 128 ? Speed{225, 1.4, 3.5 + 0.007 * keys}
                              : Speed{277, 3.2, 5.5};
  } else {
    const double crowd = 2.5 * std::min(1.0, tiles / 132);  // 128 lone tiles take longer than 16
    speed = {head_dim <= 64 ? 360.0 : head_dim <= 128 ? 400.0 : 335.0, 2.2, 3.2 + 0.010 * keys + crowd};
    if (!plain && !few_queries && head_dim <= 128) {
      // An H200, 2,048 heads with a bias: 128 keys 72, 86 and 118 us at head dims 32, 64 and 128, 256 199, 234 and 314.
      const double tflops = head_dim <= 32 ? 150 : 0.8 * speed.tflops;
      const double tile_us = head_dim <= 32 ? 2.5 : head_dim <= 64 ? 3.4 : 3.9;
      const int64_t columns = (head_dim + 31) / 32 * 32;  // of an instance
      return time_of(in_whole_tiles(problem, 128, 64, columns), device, 2, tiles,
                     {tflops, tile_us, speed.lone_us + 3.0});
    }
    if (!plain) speed = {0.8 * speed.tflops, speed.tile_us + 1.0, speed.lone_us + 3.0};
    if (few_queries) speed.tile_us = speed.lone_us = 3.2;  // NOTE: not timed; no less than sm90 takes
  }
  return time_of(problem, device, 2, tiles, speed);
}

inline double bias_gradient_cost(const Problem& problem, const DeviceInfo& device) {
  const double tiles = static_cast<double>(problem.batch * problem.heads_q * block_count(problem.len_q, 128));
  return time_of(problem, device, 2, tiles, {250, 6});
}

inline double backward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const double tflops = head_dim <= 64 ? 290 : head_dim <= 128 ? 335 : 280;
  const double tiles = static_cast<double>(problem.batch * problem.heads_k * block_count(problem.len_k, 128));
  // A tile that holds all keys needs no sums of dQ (backward/run.cuh, kDirectDq).
  const bool is_direct = head_dim <= 64 && problem.len_k <= 128;
  // An H100, 2048 tokens: with a softcap, or in one order, 150 to 230 TFLOP/s.
  const bool is_slow = problem.softcap != 0.0 || problem.deterministic;
  const double factor = is_plain(problem) ? 1.0 : is_slow ? 0.6 : 0.9;
  // An H200, 3,072 heads of 128 tokens, head dim 32, with a bias: 481 us.
  const double tile_us = head_dim <= 32 && problem.has_bias ? 16 : 7;
  double us = time_of(problem, device, 5, tiles, {factor * tflops, tile_us});
  if (problem.wants_dbias && !problem.whole_dbias) us += bias_gradient_cost(problem, device);
  return us + (is_direct ? 0.0 : memory_cost(dq_bytes(problem)));
}

// An H200, 3,072 heads of 144, 128 and 96 tokens, head dim 32: 73, 66 and 52 us, with a bias 86, 75 and 58; 48
// heads 8.1, 7.8 and 6.8, with a bias 9.3, 9.1 and 7.8. Backward 252, 245 and 174, with a bias 273, 265 and 187, with
// its gradient 300, 286 and 204; 48 heads 15, 14 and 11. All in CUDA graphs, where the kernels below take 1.7 us less
// than their formulas say for 48 heads, and so shall this one. Keys come in parts.
inline double large_tile_cost(const Problem& problem, const DeviceInfo& device, Pass pass) {
  const auto parts = static_cast<double>(block_count(problem.len_k, one_tile_part(kLargeTile)));
  const double tiles = static_cast<double>(problem.batch * problem.heads_q);
  const bool plain = is_plain(problem);
  if (pass == Pass::kForward) {
    const double extra = plain ? 0 : 0.45;
    return time_of(problem, device, 2, tiles, {1000, 0.85 + 0.55 * parts + extra, 2.8 + 1.3 * parts + 2.5 * extra});
  }
  const double extra = plain ? 0 : 0.9;
  return time_of(problem, device, 5, tiles, {1000, 1.6 + 2.75 * parts + extra, 2.9 + 3.5 * parts + 1.7 * extra}) +
         (problem.wants_dbias ? 15 : 0);
}

// A head in a larger tile than its own takes longer.
inline bool is_of_large_tile(const Problem& problem, int block) {
  return block > kOneTile && std::max(problem.len_q, problem.len_k) > kOneTile;
}

// An H200, 49 keys: 12,288 heads 70 and 98 us at head dims 32 and 64, with a bias 80 and 114; 48 heads 5.3 and 5.8,
// where the kernel above takes 4.6 and 5.0, with a bias 6.7 and 7.2, where it takes 7.3 and 7.8.
template <int kBlock>
double one_tile_forward_cost(const Problem& problem, const DeviceInfo& device) {
  if (is_of_large_tile(problem, kBlock)) return large_tile_cost(problem, device, Pass::kForward);
  const bool narrow = std::max(problem.head_dim, problem.head_dim_v) <= 32;
  const double tiles = static_cast<double>(problem.batch * problem.heads_q), keys = static_cast<double>(problem.len_k);
  Speed speed{250, narrow ? 0.55 : 0.65, (narrow ? 3.4 : 4.1) + 0.013 * keys};
  if (!is_plain(problem)) speed = {250, narrow ? 0.7 : 0.85, 2.9};
  return time_of(problem, device, 2, tiles, speed) + (kBlock > kOneTile ? 1 : 0);
}

template <int kBlock>
double one_tile_backward_cost(const Problem& problem, const DeviceInfo& device) {
  if (is_of_large_tile(problem, kBlock)) return large_tile_cost(problem, device, Pass::kBackward);
  const double tiles = static_cast<double>(problem.batch * problem.heads_q);
  return time_of(problem, device, 5, tiles, {290, problem.head_dim <= 32 && problem.head_dim_v <= 32 ? 1.5 : 2.3}) +
         (kBlock > kOneTile ? 1 : 0);
}

}  // namespace flash_ext::sm80
