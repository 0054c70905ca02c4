// Over how many blocks the keys of one tile of queries are split, so that few queries (decoding, one head alone) keep
// every multiprocessor loading. Each part leaves float rows and their log-sum-exp; combine (cuda/combine.h) joins them.
// Flash-decoding is the idea (https://pytorch.org/blog/flash-decoding).
//
// Called by backend.cpp. Invariant: the parts of a tile cover its keys once; an order of parts is fixed, so results are
// the same bits in every run on the same card.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "sm90/config.h"

namespace flash_ext::sm90 {

struct Splits {
  int count = 0;  // 1: the keys of a tile are one block's; 0: of tiles that are never split
  int tiles = 0;  // of keys a part; the last has what is left
};

// Of the tiles of keys [first, last) of one tile of queries, those of one part; equal ends where it has none.
FLASH_DEVICE void take_part(int& first, int& last, int part, const Splits& splits) {
  const int begin = first + part * splits.tiles;
  first = begin < last ? begin : last;
  if (part < splits.count - 1 && first + splits.tiles < last) last = first + splits.tiles;
}

constexpr int kMaxSplits = 128;              // combine's
constexpr int64_t kMaxPartBytes = 40 << 20;  // scratch

// What a call takes in microseconds of an H200: rough, and enough to tell a half empty card from a full one.
struct SplitModel {
  // A block's beginning and end; combine's launch.
  static constexpr double kBlock = 3.0, kCombine = 3.0;
  // Bytes a microsecond, of the card and of one multiprocessor.
  static constexpr double kCardBytes = 4.4e6, kOneBytes = 80e3;

  // FLOPs a microsecond and multiprocessor, with many keys.
  static double rate(int head_dim, Tiles tiles) {
    if (tiles == Tiles::kSplit) return head_dim <= 64 ? 3.6e6 : 4.0e6;
    return (head_dim <= 64 ? 4.1e6 : 5.6e6) * (tiles == Tiles::kFew ? 0.9 : 1.0);
  }

  const Problem& problem;
  int head_dim, multiprocessors;

  // Of blocks that take `keys` each; where they differ a counter deals them out and `most` is what the longest takes.
  double time(double blocks, int64_t block_m, double keys, double most, Tiles tiles) const {
    const double bytes = 2.0 * (problem.head_dim + problem.head_dim_v);
    const double at_once = std::min<double>(blocks, multiprocessors);
    const auto rows = static_cast<double>(problem.len_q <= 64 ? 64 : block_m);  // other warpgroups see no query
    const double a_key = std::max({4.0 * rows * head_dim / rate(head_dim, tiles), bytes / kOneBytes,
                                   problem.len_q <= block_m ? bytes * at_once / kCardBytes : 0.0});
    if (keys == most) return std::ceil(blocks / multiprocessors) * (keys * a_key + kBlock);
    return std::max(most * a_key + kBlock, blocks / multiprocessors * (keys * a_key + kBlock) + most * a_key / 3);
  }
};

// Which tiles a call gets, and how many parts their keys.
struct TileChoice {
  Tiles tiles;
  Splits splits;  // of Tiles::kSplit
};

// multiprocessors: 0 where unknown.
inline TileChoice choose_tiles(const Problem& problem, int head_dim, int multiprocessors) {
  if (is_scored(problem)) return {Tiles::kScored, {}};
  const bool few_keys = has_few_keys(problem, head_dim);
  TileChoice best{few_keys ? Tiles::kFew : Tiles::kMany, {}};
  const int64_t heads = problem.heads_q * problem.batch;
  const int64_t split_m = forward_shape(head_dim, Tiles::kSplit).block_m();
  const bool few_queries = problem.len_q <= split_m;
  const int64_t blocks = heads * block_count(problem.len_q, forward_shape(head_dim, best.tiles).block_m());
  if (multiprocessors == 0 || (!few_queries && blocks > 3 * multiprocessors)) return best;

  const Band band = make_band(problem);
  const auto keys_at = [&](int64_t first_query, int64_t queries) {
    return band.keys({first_query, std::min(first_query + queries, problem.len_q)}, problem.len_k);
  };
  // The keys that a tile of queries meets, its mean and the most.
  struct Keys {
    double mean, most;
  };
  const auto keys_of_tiles = [&](int64_t block_m) -> Keys {
    const auto size = [&](int64_t query) {
      return static_cast<double>(std::max<int64_t>(keys_at(query / block_m * block_m, block_m).size(), 1));
    };
    const double first = size(0), middle = size(problem.len_q / 2), last = size(problem.len_q - 1);
    return {(first + 2 * middle + last) / 4, std::max({first, middle, last})};
  };
  const SplitModel model{problem, head_dim, multiprocessors};
  double best_time = 0;
  for (const Tiles tiles : {best.tiles, few_keys ? Tiles::kMany : Tiles::kFew}) {
    const int64_t block_m = forward_shape(head_dim, tiles).block_m();
    const Keys keys = keys_of_tiles(block_m);
    const double time = model.time(heads * block_count(problem.len_q, block_m), block_m, keys.mean, keys.most, tiles);
    if (best_time == 0 || time < 0.95 * best_time) {
      best = {tiles, {}};
      best_time = time;
    }
  }

  const int64_t block_n = forward_shape(head_dim, Tiles::kSplit).block_n;
  const Keys keys = keys_of_tiles(split_m);
  int64_t most = 1;  // tiles of keys
  for (const int64_t query : {int64_t{0}, problem.len_q / 2, problem.len_q - 1}) {
    const Range range = keys_at(query / split_m * split_m, split_m);
    if (!range.empty()) most = std::max(most, block_count(range.last, block_n) - range.first / block_n);
  }
  const double tiles = static_cast<double>(heads * block_count(problem.len_q, split_m));
  const double part_bytes = 4.0 * heads * problem.len_q * problem.head_dim_v;
  if (few_queries && !few_keys) {
    best = {Tiles::kSplit, {1, static_cast<int>(most)}};
    best_time = model.time(tiles, split_m, keys.mean, keys.most, Tiles::kSplit);
  }
  best_time *= 0.9;  // what is not clearly faster stays as it is
  const auto fill = static_cast<int64_t>(multiprocessors / tiles);
  for (const int64_t wanted : {fill, 2 * fill, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{6}, int64_t{8}, int64_t{12},
                               int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}}) {
    if (wanted < 2 || wanted > std::min<int64_t>(most, kMaxSplits)) continue;
    const int64_t per = (most - 1) / wanted + 1, count = (most - 1) / per + 1;
    if (count < 2 || count * part_bytes > kMaxPartBytes) continue;
    const bool even = keys.mean == keys.most;
    const auto part_keys = static_cast<double>(per * block_n);
    // Where tiles differ the last part of each is half full.
    const double parts = even ? tiles * count : tiles * std::max(keys.mean / part_keys + 0.5, 1.0);
    const double time = model.time(parts, split_m, part_keys, part_keys, Tiles::kSplit) + SplitModel::kCombine +
                        2 * count * part_bytes / SplitModel::kCardBytes;
    if (time < best_time) {
      best_time = time;
      best = {Tiles::kSplit, {static_cast<int>(count), static_cast<int>(per)}};
    }
  }
  return best;
}

// Floats of one part's out.
inline int64_t part_elements(const Problem& problem) {
  return problem.batch * problem.heads_q * problem.len_q * problem.head_dim_v;
}

// Of all parts' out and log-sum-exp.
inline int64_t split_scratch_bytes(const Problem& problem, const Splits& splits) {
  if (splits.count <= 1) return 0;
  return 4 * splits.count * (part_elements(problem) + problem.batch * problem.heads_q * problem.len_q);
}

// A block a part, so that the card deals out what is uneven; where every head is one tile, all parts have keys and a
// block for each multiprocessor walks them.
inline ForwardOrder split_order(const Problem& problem, int block_m, const Splits& splits, int64_t multiprocessors) {
  ForwardOrder order{make_tile_schedule(problem, block_m, 0, 0), false, 0};
  order.grid = order.schedule.size() * splits.count;
  if (problem.len_q <= block_m) order.grid = std::min(order.grid, multiprocessors);
  return order;
}

}  // namespace flash_ext::sm90
