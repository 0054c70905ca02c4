// What the rows of sm90 take (core/cost.h). Called by rows.cpp. Speeds are an H200's, of
// benchmarks/results/nvidia-h200.
#pragma once

#include "core/cost.h"
#include "core/tile_schedule.h"
#include "kernels/sm90/backward_two_pass/config.h"
#include "kernels/sm90/config.h"
#include "kernels/sm90/forward/choose_tiles.h"

namespace flash_ext::sm90 {

// NOTE: tiles of 192 queries and 80 or 96 keys, which lengths such as 144 fill and 128 do not (an H200, 2,048 heads, a
// bias, head dim 64, 96 keys 57 us, 128 94, 144 98, 256 202).
inline double scored_forward_cost(const Problem& problem, const DeviceInfo& device, const Speed& speed) {
  const int64_t wanted = std::max(problem.head_dim, problem.head_dim_v);
  const int head_dim = wanted <= 64 ? 64 : wanted <= 128 ? 128 : wanted <= 192 ? 192 : 256;
  const ForwardShape shape = forward_shape(head_dim, Tiles::kScored);
  const int64_t tiles = problem.batch * problem.heads_q * block_count(problem.len_q, shape.block_m());
  return time_of(in_whole_tiles(problem, shape.block_m(), shape.block_n, head_dim), device, 2,
                 static_cast<double>(tiles), speed);
}

inline double forward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const bool few_queries = problem.len_q <= 64;
  const double keys = static_cast<double>(problem.len_k);
  const bool scored = is_scored(problem);
  Speed speed;
  if (is_timed_short(problem) && !scored) {
    speed = head_dim <= 32   ? Speed{212, 3.4, 4.6 + 0.003 * keys}
            : head_dim <= 64 ? Speed{366, 3.2, 4.7 + 0.002 * keys}
                             : Speed{293, 2.3, 4.3};
  } else {
    const double tflops = head_dim <= 64 ? 550 : head_dim <= 128 ? 700 : head_dim <= 256 ? 780 : 370;
    speed = {tflops, head_dim <= 64 ? 2.0 : 2.6, 4.8 + 0.002 * keys};
    if (scored && !few_queries) return scored_forward_cost(problem, device, {0.72 * tflops, 2.1, speed.lone_us + 2.0});
    if (few_queries) speed.tile_us = speed.lone_us = 3.0;
  }
  const double tiles =
      static_cast<double>(problem.batch * problem.heads_q * block_count(problem.len_q, few_queries ? 64 : 128));
  return time_of(problem, device, 2, tiles, speed);
}

inline double backward_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const double tflops = head_dim <= 64 ? 560 : head_dim <= 128 ? 620 : head_dim <= 256 ? 510 : 180;
  const double tiles = static_cast<double>(problem.batch * problem.heads_k * block_count(problem.len_k, 128));
  double us = time_of(problem, device, 5, tiles, {is_scored(problem) ? 0.8 * tflops : tflops, 6});
  // An H200, 3,072 heads of 128 tokens, head dim 32: 54 us of 250.
  const double tile_us = head_dim <= 32 ? 2.5 : 6;
  if (problem.wants_dbias && !problem.whole_dbias) us += time_of(problem, device, 2, tiles, {400, tile_us});
  return us + (is_dq_stored(problem) ? 0.0 : memory_cost(dq_bytes(problem)));
}

// Packed sequences whose dQ is added up in one order. is_faster_in_order() is dense calls' rule for their mean
// (is_ordered), where tiles differ; above head dim 64 it is measured for dense calls alone, and up to 64 dense calls
// have another way to even out what blocks have to do (is_backward_persistent), which packed ones have not.
inline bool is_faster_in_order(const Problem& problem) {
  Problem mean = mean_of_packed(problem);
  mean.packed = false;
  const int64_t tiles = mean.batch * mean.heads_k * block_count(mean.len_k, BackwardShape::block_n);
  return !is_even(mean) && tiles >= 512 && std::max(mean.len_q, mean.len_k) <= 2048;
}
inline double packed_in_order_cost(const Problem& problem, const DeviceInfo& device) {
  const double us = backward_cost(problem, device);
  if (!problem.packed) return us;  // of one size: the batch must not choose
  return is_faster_in_order(problem) ? 0.95 * us : 1.05 * us;
}

// Seven products instead of five, of what it has a kernel for. NOTE: dQ is not added up in memory, but up to
// kSmallHeadDim counts as if: the other kernels are faster where they serve a call.
inline double two_pass_cost(const Problem& problem, const DeviceInfo& device) {
  const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
  const ScoreKind added = two_pass_score_kind(problem, head_dim);
  if (head_dim > kSmallHeadDim && added != ScoreKind::kScores) return backward_cost(problem, device);
  const TwoPassShape shape = two_pass_shape(static_cast<int>(head_dim), added);
  const int products = (problem.wants_dk || problem.wants_dv ? 4 : 0) + (problem.wants_dq ? 3 : 0);
  const double tiles = static_cast<double>(problem.batch * problem.heads_k * block_count(problem.len_k, shape.keys));
  double tflops = head_dim <= 64 ? 420 : 540;
  if (shape.scored) tflops = head_dim <= 64 ? 260 : head_dim <= 128 ? 400 : head_dim <= 256 ? 460 : 220;
  return time_of(problem, device, products, tiles, {tflops, 6}) +
         (head_dim <= kSmallHeadDim ? memory_cost(dq_bytes(problem)) : 0.0);
}

}  // namespace flash_ext::sm90
