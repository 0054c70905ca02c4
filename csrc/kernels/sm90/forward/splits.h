// Over how many blocks the keys of one tile of queries are split, so that few queries (decoding, one head alone) keep
// every multiprocessor loading. Each part leaves float rows, their maximum and sum; combine (kernels/stages/combine.h)
// joins them. Flash-decoding is the idea (https://pytorch.org/blog/flash-decoding). And whether the query heads of a
// group share tiles, so that few queries read each key once, not once a head.
//
// Called by choose_tiles.h, which decides, by rows.cpp and the kernels. Invariant: the parts of a tile cover its
// keys once; an order of parts is fixed, so results are the same bits in every run on the same card.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/sm90/config.h"

namespace flash_ext::sm90 {

struct Splits {
  int count = 0;  // 1: the keys of a tile are one block's; 0: of tiles that are never split
  int tiles = 0;  // of keys a part; the last has what is left
  // Of a tile that each query head of a group gets: a power of two that holds all its queries; 0: heads share no tile.
  int head_rows = 0;
};

constexpr int kMostHeadRows = 64;  // what a warpgroup takes

// The same call with a row for each query of a group, padded; its band is the caller's. Splits::head_rows.
inline Problem with_shared_tiles(Problem problem, int head_rows) {
  if (head_rows == 0) return problem;
  problem.len_q = problem.heads_q / problem.heads_k * head_rows;
  problem.heads_q = problem.heads_k;
  return problem;
}

// Of the tiles of keys [first, last) of one tile of queries, those of one part; equal ends where it has none.
FLASH_DEVICE void take_part(int& first, int& last, int part, const Splits& splits) {
  const int begin = first + part * splits.tiles;
  first = begin < last ? begin : last;
  if (part < splits.count - 1 && first + splits.tiles < last) last = first + splits.tiles;
}

constexpr int kMaxSplits = 128;              // combine's
constexpr int64_t kMaxPartBytes = 40 << 20;  // scratch

// Floats of one part's out.
inline int64_t part_elements(const Problem& problem) {
  return problem.batch * problem.heads_q * problem.len_q * problem.head_dim_v;
}

// Of all parts' out, maxima and sums.
inline int64_t split_scratch_bytes(const Problem& problem, const Splits& splits) {
  if (splits.count <= 1) return 0;
  return 4 * splits.count * (part_elements(problem) + 2 * problem.batch * problem.heads_q * problem.len_q);
}

// A block a part, so that the card deals out what is uneven; where every tile of a head sees the same keys, all parts
// have some and a block for each multiprocessor walks them.
inline ForwardOrder split_order(const Problem& problem, int block_m, const Splits& splits, int64_t multiprocessors) {
  ForwardOrder order{make_tile_schedule(with_shared_tiles(problem, splits.head_rows), block_m, 0, 0), false, 0};
  order.grid = order.schedule.size() * splits.count;
  if (problem.len_q <= block_m) order.grid = std::min(order.grid, multiprocessors);
  return order;
}

}  // namespace flash_ext::sm90
