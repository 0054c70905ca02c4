// Which scores each block of threads sums up to the gradient of a bias, and in which order: a pure function of the
// shapes.
//
//   unit = (part, tile of the gradient)      item = one tile of scores that is summed into a unit
//
// The gradient has some of the dimensions (batch, head, query, key) for its own; over the others it is summed. A unit's
// items run over those, queries fastest, then keys, then heads, so that successive items share K and V, or Q and dO,
// and odd units run backwards, so that the first item of a unit shares what it can with the last one before. Where the
// gradient has fewer tiles than the card has places, several parts share a tile's items. Called by bias_gradient.cuh of
// sm80/ and of sm90/, on host and device, and by what asks for their scratch. Invariant: at() is a bijection from
// (unit, index) to all pairs of a tile of the gradient and one of its items.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "core/args.h"
#include "core/tile_schedule.h"

namespace flash_ext {

struct BiasGradientItem {
  uint32_t part = 0, m_block = 0, n_block = 0;  // blocks of the scores
  uint32_t head = 0, b = 0;
  uint32_t batch[kMaxBatchDims] = {};  // the digits of b
  bool last = false;                   // of its unit
};

// Divisions are of 32-bit numbers, see TileSchedule::at.
struct BiasGradientPlan {
  bool own_batch[kMaxBatchDims] = {};
  bool own_head = false, own_rows = false, own_cols = false;
  uint32_t m_blocks = 1, n_blocks = 1;  // of the scores
  uint32_t tiles = 1;                   // of the gradient
  uint32_t items = 1;                   // of a tile
  uint32_t parts = 1;                   // that share them
  uint32_t part_items = 1;              // of each part but the last
  uint32_t run = 1;                     // successive units of a block of threads
  int64_t part_elements = 0;            // of one partial gradient
  float* partial = nullptr;             // [parts, part_elements]; null with one part

  FLASH_DEVICE uint32_t units() const { return tiles * parts; }
  FLASH_DEVICE uint32_t blocks() const { return (units() + run - 1) / run; }
  FLASH_DEVICE uint32_t items_of(uint32_t unit) const {
    const uint32_t left = items - unit / tiles * part_items;
    return left < part_items ? left : part_items;
  }

  // Item `index` of a unit, 0 <= index < items_of(unit).
  FLASH_DEVICE BiasGradientItem at(const Problem& problem, uint32_t unit, uint32_t index) const {
    BiasGradientItem item;
    const uint32_t count = items_of(unit);
    item.part = unit / tiles;
    item.last = index + 1 == count;
    uint32_t tile = unit % tiles, member = item.part * part_items + (unit % 2 == 0 ? index : count - 1 - index);
    const auto take = [&](bool own, uint32_t size) {
      const uint32_t number = own ? tile : member, rest = number / size;
      tile = own ? rest : tile;
      member = own ? member : rest;
      return number - rest * size;
    };
    item.m_block = take(own_rows, m_blocks);
    item.n_block = take(own_cols, n_blocks);
    item.head = take(own_head, static_cast<uint32_t>(problem.heads_q));
    uint32_t weight = 1;
    for (int i = kMaxBatchDims - 1; i >= 0; --i) {
      if (i >= problem.batch_rank) continue;
      const uint32_t size = static_cast<uint32_t>(problem.batch_size[i]);
      item.batch[i] = take(own_batch[i], size);
      item.b += item.batch[i] * weight;
      weight *= size;
    }
    return item;
  }
};

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
  const int64_t parts = std::max<int64_t>(1, std::min({wanted, items, room}));
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
  const int64_t run = std::min(kLongRun / part_items, int64_t{plan.units()} / (kWaves * places));
  plan.run = static_cast<uint32_t>(std::max<int64_t>(1, run));
  return plan;
}

}  // namespace flash_ext
