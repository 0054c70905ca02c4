// Which scores each block of threads sums up to the gradient of a bias, and in which order: a pure function of the
// shapes.
//
//   unit = (part, tile of the gradient)      item = one tile of scores that is summed into a unit
//
// The gradient has some of the dimensions (batch, head, query, key) for its own; over the others it is summed. A unit's
// items run over those, queries fastest, then keys, then heads, so that successive items share K and V, or Q and dO,
// and odd units run backwards, so that the first item of a unit shares what it can with the last one before. Where the
// gradient has fewer tiles than the card has places, several parts share a tile's items. Made by
// plan_bias_gradient.h, read by the kernels of a bias's gradient and by those of heads of one tile (sm80/one_tile.cuh),
// whose parts sm80/one_tile_order.h counts anew. Invariant: at() is a bijection from (unit,
// index) to all pairs of a tile of the gradient and one of its items.
#pragma once

#include <cstdint>

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
  uint32_t turning = 1;                 // 1: odd units run backwards; 0: none, and the order of a sum knows no place
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
    uint32_t tile = unit % tiles, member = item.part * part_items + ((unit & turning) == 0 ? index : count - 1 - index);
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

}  // namespace flash_ext
