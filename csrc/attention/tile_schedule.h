// The order in which tiles run: a pure function from a linear index to (b, head, block), so that a grid, a persistent
// loop with an atomic counter and a thread pool all walk the same order.
//
//   section of key heads (their K and V stay in L2)  >  block, longest first  >  key head  >  query head of its group
//
// Longest first (LPT): under a causal band the last queries see the most keys, and starting with them leaves only short
// tiles for the end of the grid. Query heads of one key head are neighbours, so they read its K and V together.
// Called by every backend on the host to size the grid and on the device to find the tile.
// Invariant: at() is a bijection from [0, size()) to all tiles, whatever the sizes.
#pragma once

#include <cstdint>

#include "attention/args.h"
#include "attention/band.h"
#include "attention/portable.h"

namespace flash_ext {

struct Tile {
  int64_t b = 0;
  int64_t head = 0;   // query head
  int64_t block = 0;  // m_block; n_block in a kernel that is parallel over keys
};

struct TileSchedule {
  int64_t blocks = 0;
  int64_t heads_k = 0;
  int64_t group = 1;        // query heads of a key head
  int64_t kv_heads = 0;     // batch * heads_k
  int64_t section = 1;      // of them, how many share the L2 cache
  bool last_first = false;  // from the last block to the first
  int64_t batch = 1;
  bool batch_inner = false;  // key heads of all batch elements follow each other, to share a bias or mask tile in L2

  FLASH_DEVICE int64_t size() const { return blocks * group * kv_heads; }

  // Index: what the divisions are done in. A GPU takes uint32_t, because its grids are smaller than 2^31 and a division
  // of 64-bit numbers is a function call there.
  template <class Index = int64_t>
  FLASH_DEVICE Tile at(Index linear) const {
    const Index all = static_cast<Index>(kv_heads), per_head = static_cast<Index>(group);
    const Index in_section = section < kv_heads ? static_cast<Index>(section) : all;
    const Index section_tiles = in_section * per_head * static_cast<Index>(blocks);
    const Index section_first = linear / section_tiles * in_section;
    const Index rest = linear % section_tiles;
    const Index left = all - section_first;
    const Index heads = (in_section < left ? in_section : left) * per_head;  // query heads of this section
    const Index index = rest / heads;
    const Index head = rest % heads;
    const Index kv_head = section_first + head / per_head;
    const Index inner = static_cast<Index>(batch_inner ? batch : heads_k), low = kv_head % inner,
                high = kv_head / inner;
    const int64_t block = static_cast<int64_t>(index);
    return {static_cast<int64_t>(batch_inner ? low : high),
            static_cast<int64_t>((batch_inner ? high : low) * per_head + head % per_head),
            last_first ? blocks - 1 - block : block};
  }
};

FLASH_DEVICE int64_t block_count(int64_t len, int64_t block) { return (len + block - 1) / block; }

// Key heads whose K and V (kv_head_bytes each) fit the budget together; at least one.
FLASH_DEVICE int64_t heads_per_section(int64_t kv_head_bytes, int64_t l2_budget) {
  return kv_head_bytes > 0 && l2_budget > kv_head_bytes ? l2_budget / kv_head_bytes : 1;
}

// True where batch elements, but not heads, share a bias or mask.
inline bool batch_shares_scores(const Problem& problem, const ForwardArgs& args) {
  const auto shares = [&](const TensorView& view) {
    bool shared = view && view.head_stride != 0 && problem.heads_q > 1;
    for (int i = 0; i < problem.batch_rank; ++i) shared = shared && view.batch_stride[i] == 0;
    return shared;
  };
  return shares(args.bias) || shares(args.mask);
}

// Tiles of block_m queries. A packed batch is scheduled by its longest sequence, problem.len_q and problem.len_k.
FLASH_DEVICE TileSchedule make_tile_schedule(const Problem& problem, int64_t block_m, int64_t kv_head_bytes,
                                             int64_t l2_budget) {
  TileSchedule schedule;
  schedule.blocks = block_count(problem.len_q, block_m);
  schedule.heads_k = problem.heads_k;
  schedule.group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 0;
  schedule.kv_heads = problem.batch * problem.heads_k;
  schedule.batch = problem.batch;
  schedule.section = heads_per_section(kv_head_bytes, l2_budget);

  const Band band = make_band(problem);
  const int64_t last_begin = (schedule.blocks - 1) * block_m;
  const Range first{0, block_m < problem.len_q ? block_m : problem.len_q};
  const Range last{last_begin, problem.len_q};
  schedule.last_first = band.keys(last, problem.len_k).size() > band.keys(first, problem.len_k).size();
  return schedule;
}

}  // namespace flash_ext
