// Makes a BiasGradientPlan: how many parts share a tile, and how long a block of threads walks. Host code.
//
// Called by the host side of the kernels that read it, and by what asks for their scratch.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "core/bias_gradient_plan.h"

namespace flash_ext {

// Elements of the gradient: the bias's own shape, which is dense.
inline int64_t bias_elements(const Problem& problem, const TensorView& dbias) {
  int64_t count = (dbias.head_stride != 0 ? problem.heads_q : 1) * (dbias.row_stride != 0 ? problem.len_q : 1) *
                  (dbias.col_stride != 0 ? problem.len_k : 1);
  for (int i = 0; i < problem.batch_rank; ++i) count *= dbias.batch_stride[i] != 0 ? problem.batch_size[i] : 1;
  return count;
}

// Room for partial gradients, in floats: few tiles means a small gradient. A part sums 16 items or more where it
// matters, each of which holds at least the numbers of the gradient's tile.
inline int64_t bias_partial_elements(const Problem& problem) {
  constexpr int64_t kLeast = (2 << 20) / 4, kMost = (8 << 20) / 4;
  const int64_t scores = problem.batch * problem.heads_q * problem.len_q * problem.len_k;
  return std::min(scores, std::clamp(scores / 16, kLeast, kMost));
}

// For tiles of block_m queries by block_n keys. `places`: how many blocks of threads run at once.
inline BiasGradientPlan make_bias_gradient_plan(const Problem& problem, const TensorView& dbias, int64_t block_m,
                                                int64_t block_n, int64_t places) {
  constexpr int64_t kWaves = 8;     // so that the last one, half empty, is a small part of the whole
  constexpr int64_t kLongRun = 32;  // items beside which a block's start counts for little
  BiasGradientPlan plan;
  const int64_t m_blocks = block_count(problem.len_q, block_m), n_blocks = block_count(problem.len_k, block_n);
  int64_t tiles = 1, items = 1;
  const auto add = [&](bool own, int64_t size) {
    (own ? tiles : items) *= size;
    return own;
  };
  plan.own_rows = add(dbias.row_stride != 0, m_blocks);
  plan.own_cols = add(dbias.col_stride != 0, n_blocks);
  plan.own_head = add(dbias.head_stride != 0, problem.heads_q);
  for (int i = 0; i < problem.batch_rank; ++i)
    plan.own_batch[i] = add(dbias.batch_stride[i] != 0, problem.batch_size[i]);

  plan.part_elements = bias_elements(problem, dbias);
  const int64_t room = bias_partial_elements(problem) / plan.part_elements;
  const int64_t wanted = std::max(2 * places / tiles, std::min(kWaves * places / tiles, items * 2 / kLongRun));
  const int64_t parts = problem.batch_invariant ? 1 : std::max<int64_t>(1, std::min({wanted, items, room}));
  const int64_t part_items = block_count(items, parts);
  if (tiles * parts > INT32_MAX || items > INT32_MAX) {
    throw std::runtime_error("flash_ext: more than 2^31 - 1 tiles in one call");
  }
  plan.m_blocks = static_cast<uint32_t>(m_blocks);
  plan.n_blocks = static_cast<uint32_t>(n_blocks);
  plan.tiles = static_cast<uint32_t>(tiles);
  plan.items = static_cast<uint32_t>(items);
  plan.part_items = static_cast<uint32_t>(part_items);
  plan.parts = static_cast<uint32_t>(block_count(items, part_items));
  plan.turning = problem.batch_invariant ? 0 : 1;
  const int64_t run = std::min(kLongRun / part_items, int64_t{plan.units()} / (kWaves * places));
  plan.run = static_cast<uint32_t>(std::max<int64_t>(1, run));
  return plan;
}

}  // namespace flash_ext
