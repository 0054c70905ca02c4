// In which order the kernels of one tile walk heads, and how they may read them. Host code.
//
// Called by the run.cuh of forward_single_tile/ and backward_single_tile/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>

#include "core/band.h"
#include "core/device.h"
#include "core/plan_bias_gradient.h"
#include "kernels/sm80/config.h"

namespace flash_ext::sm80 {

// Blocks that run at a time on the card, of at most `blocks` on a multiprocessor; 0: not known.
inline int64_t one_tile_places(const DeviceInfo& device, int64_t shared_bytes, int blocks) {
  constexpr int64_t kReserved = 1024;  // of each block, beside what it asks for
  const int64_t fit = (device.shared_memory_per_block + kReserved) / (shared_bytes + kReserved);
  return device.multiprocessors * std::clamp<int64_t>(fit, 1, blocks);
}

// Kernels number heads in 32 bits.
inline void check_one_tile(const Problem& problem) {
  if (problem.batch * problem.heads_q > INT32_MAX) {
    throw std::runtime_error("flash_ext: more than 2^31 - 1 tiles in one call");
  }
}

// Whether 16 bytes of every row of these tensors are 8 columns, and aligned. An absent one is not read.
inline bool has_regular_rows(const Problem& problem, std::initializer_list<const TensorView*> views) {
  return problem.head_dim % 8 == 0 && problem.head_dim_v % 8 == 0 &&
         std::all_of(views.begin(), views.end(), [&](const TensorView* view) {
           bool regular = view->col_stride == 1 && reinterpret_cast<uint64_t>(view->data) % 16 == 0 &&
                          view->row_stride % 8 == 0 && view->head_stride % 8 == 0;
           for (int i = 0; i < problem.batch_rank; ++i) regular = regular && view->batch_stride[i] % 8 == 0;
           return regular || !*view;
         });
}

// Whether the band hides a pair of a tile of `block` queries and keys.
inline bool has_band(const Problem& problem, int64_t block) {
  const Band band = make_band(problem);
  return band.lower > 1 - block || band.upper < block - 1;
}

// Of the parts of a bias's gradient, at most: one of each of the blocks that run at a time, of which no card has more
// than a thousand.
inline int64_t one_tile_partial_elements(const Problem& problem, int64_t places) {
  return problem.whole_dbias ? 0 : std::min<int64_t>(places, 1024) * problem.len_q * problem.len_k;
}

// Items whose `shared`, a bias or a gradient of one, is the same follow each other, in as many parts as end soonest on
// `places` blocks that run at a time, and at most `most`. A part costs a load of the bias that nothing hides, about
// half an item.
inline BiasGradientPlan one_tile_order(const Problem& problem, const TensorView& shared, int64_t block, int64_t places,
                                       int64_t most) {
  BiasGradientPlan order = make_bias_gradient_plan(problem, shared, block, block, places);
  const int64_t tiles = order.tiles, items = order.items;
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](int64_t wanted) {
    const int64_t part_items = block_count(items, std::clamp<int64_t>(wanted, 1, std::min(items, most)));
    const int64_t parts = block_count(items, part_items), rounds = block_count(tiles * parts, places);
    const double time = static_cast<double>(rounds) * (static_cast<double>(part_items) + 0.5);
    if (time >= least || tiles * parts > INT32_MAX) return;
    least = time;
    order.part_items = static_cast<uint32_t>(part_items);
    order.parts = static_cast<uint32_t>(parts);
  };
  for (int64_t few = 1; few <= 6; ++few) consider(few);
  for (int64_t rounds = 1; rounds <= 4; ++rounds) consider(rounds * places / tiles);
  return order;
}

// Where nothing is summed: of a bias, or of a mask without one.
inline BiasGradientPlan one_tile_order(const ForwardArgs& args, int64_t block, int64_t places) {
  const Problem& problem = args.problem;
  return one_tile_order(problem, problem.has_bias ? args.bias : args.mask, block, places, INT32_MAX);
}

// Of the gradient of a bias.
inline BiasGradientPlan one_tile_gradient_order(const Problem& problem, const TensorView& dbias, int64_t block,
                                                int64_t places) {
  const int64_t room = one_tile_partial_elements(problem, places) / bias_elements(problem, dbias);
  return one_tile_order(problem, dbias, block, places, std::max<int64_t>(room, 1));
}

}  // namespace flash_ext::sm80
