// Which tiles a forward gets, into how many parts their keys are split and whether heads of a group share them, by a
// model of what each choice takes.
//
// Called by rows.cpp. Invariant: a pure function of the call's sizes and the card's multiprocessors.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "kernels/sm90/forward/splits.h"

namespace flash_ext::sm90 {

// What a call takes in microseconds of an H200: rough, and enough to tell a half empty card from a full one. Of 108
// calls of one batch element (head dim 64 and 128, full and causal, 512 to 2048 tokens, 8 to 128 heads) that have
// kLarge or kSmall it takes the slower one in 9, three of them by 2 % or more: 12, 3 and 3 %.
struct SplitModel {
  // A block's beginning and end; combine's launch, with many queries together with all else that parts of one head of
  // 512 to 2048 tokens took beyond this model; the counter's.
  static constexpr double kBlock = 3.0, kCombine = 3.0, kCombineMany = 7.0, kCounter = 1.0;
  // Bytes a microsecond, of the card and of one multiprocessor.
  static constexpr double kCardBytes = 4.4e6, kOneBytes = 80e3;

  // FLOPs a microsecond and multiprocessor, with many keys.
  static double rate(int head_dim, Tiles tiles) {
    if (tiles == Tiles::kSplit) return head_dim <= 64 ? 3.6e6 : 4.0e6;
    return (head_dim <= 64 ? 4.1e6 : 5.6e6) * (tiles == Tiles::kSmall ? 0.9 : 1.0);
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
    const double counter = blocks > multiprocessors ? kCounter : 0.0;
    return std::max(most * a_key + kBlock, blocks / multiprocessors * (keys * a_key + kBlock) + most * a_key / 2) +
           counter;
  }
};

// Which tiles a call gets, and how many parts their keys.
struct TileChoice {
  Tiles tiles;
  Splits splits;  // of Tiles::kSplit
};

// How long packed sequences are, as if they were all alike. The host knows the mean and the longest, and most tokens
// belong to long ones: halfway between.
inline Problem mean_of_packed(const Problem& problem) {
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const auto middle = [&](int64_t rows, int64_t longest) { return (rows / batch + longest) / 2; };
  Problem mean = problem;
  mean.len_q = middle(problem.rows_q, problem.len_q);
  mean.len_k = middle(problem.rows_k, problem.len_k);
  return mean;
}

// As if V had as many columns as K.
inline TileChoice choose_wide_tiles(const Problem& problem, int head_dim, int multiprocessors) {
  if (problem.fp8) return {Tiles::kFp8, {}};
  if (is_scored(problem)) return {Tiles::kScored, {}};
  if (problem.batch_invariant || head_dim > 256) return {Tiles::kLarge, {}};
  if (problem.packed) {  // in deterministic mode a sequence has the same bits beside any others
    const bool few_keys = !problem.deterministic && has_few_keys(mean_of_packed(problem), head_dim);
    return {few_keys ? Tiles::kSmall : Tiles::kLarge, {}};
  }
  const bool few_keys = has_few_keys(problem, head_dim);
  TileChoice best{few_keys ? Tiles::kSmall : Tiles::kLarge, {}};
  const int64_t heads = problem.heads_q * problem.batch;
  const int64_t split_m = forward_shape(head_dim, Tiles::kSplit).block_m();
  const bool few_queries = problem.len_q <= split_m;
  const int64_t blocks = heads * block_count(problem.len_q, forward_shape(head_dim, best.tiles).block_m());
  if (multiprocessors == 0 || (!few_queries && blocks > 6 * multiprocessors)) return best;

  const Band band = make_band(problem);
  const auto keys_at = [&](int64_t first_query, int64_t queries) {
    return band.keys({first_query, std::min(first_query + queries, problem.len_q)}, problem.len_k);
  };
  // The keys that a tile of queries meets, in whole tiles of block_n: their mean, of some, and the most.
  struct Keys {
    double mean, most;
  };
  const auto keys_of_tiles = [&](int64_t block_m, int64_t block_n) -> Keys {
    const auto size = [&](int64_t tile) {
      const Range range = keys_at(tile * block_m, block_m);
      const int64_t tiles = range.empty() ? 1 : block_count(range.last, block_n) - range.first / block_n;
      return static_cast<double>(tiles * block_n);
    };
    const int64_t count = block_count(problem.len_q, block_m), sample = std::min<int64_t>(count, 8);
    Keys keys{0, std::max(size(0), size(count - 1))};
    for (int64_t i = 0; i < sample; ++i) {
      const double keys_of_one = size((2 * i + 1) * count / (2 * sample));
      keys.mean += keys_of_one;
      keys.most = std::max(keys.most, keys_of_one);
    }
    keys.mean /= static_cast<double>(sample);  // of equal ones exactly what they are
    return keys;
  };
  const SplitModel model{problem, head_dim, multiprocessors};
  const auto time_of = [&](Tiles tiles) {
    const ForwardShape shape = forward_shape(head_dim, tiles);
    const int64_t block_m = shape.block_m();
    const Keys keys = keys_of_tiles(block_m, shape.block_n);
    return model.time(heads * block_count(problem.len_q, block_m), block_m, keys.mean, keys.most, tiles);
  };
  double best_time = time_of(best.tiles);
  if (problem.len_q > 64) {
    // What kSmall takes in a full card, over what it takes by the rate of a block alone.
    const double few = head_dim <= 64 ? (few_keys ? 1.0 : 1.1) : head_dim <= 96 ? 1.0 : 0.9;
    const Tiles other = few_keys ? Tiles::kLarge : Tiles::kSmall;
    const double other_time = time_of(other);
    if (few_keys ? other_time < 0.95 * few * best_time : few * other_time < 0.95 * best_time) {
      best.tiles = other;
      best_time = other_time;
    }
  }

  const int64_t block_n = forward_shape(head_dim, Tiles::kSplit).block_n;
  const auto tiles_of = [&](const Range& range) {
    return range.empty() ? 1 : block_count(range.last, block_n) - range.first / block_n;
  };
  const Keys keys = keys_of_tiles(split_m, 1);  // `consider` rounds to parts
  int64_t most = 1;                             // tiles of keys
  for (const int64_t query : {int64_t{0}, problem.len_q / 2, problem.len_q - 1}) {
    most = std::max(most, tiles_of(keys_at(query / split_m * split_m, split_m)));
  }
  const double part_bytes = 4.0 * heads * problem.len_q * problem.head_dim_v;
  if (few_queries && !few_keys) {
    const auto tiles = static_cast<double>(heads * block_count(problem.len_q, split_m));
    best = {Tiles::kSplit, {1, static_cast<int>(most)}};
    best_time = model.time(tiles, split_m, keys.mean, keys.most, Tiles::kSplit);
  }
  // Takes Tiles::kSplit where it is faster than `limit`; rows: `problem`, or that with shared tiles.
  const auto consider = [&](const Problem& rows, const Keys& of_tile, int64_t most_tiles, int head_rows, double limit) {
    const SplitModel rows_model{rows, head_dim, multiprocessors};
    const auto tiles = static_cast<double>(rows.batch * rows.heads_q * block_count(rows.len_q, split_m));
    const auto take = [&](double time, int64_t count, int64_t per) {
      if (time >= limit) return;
      limit = best_time = time;
      best = {Tiles::kSplit, {static_cast<int>(count), static_cast<int>(per), head_rows}};
    };
    if (head_rows > 0) take(rows_model.time(tiles, split_m, of_tile.mean, of_tile.most, Tiles::kSplit), 1, most_tiles);
    limit *= 0.9;  // what is not clearly faster stays as it is
    const auto fill = static_cast<int64_t>(multiprocessors / tiles);
    for (const int64_t wanted : {fill, 2 * fill, int64_t{2}, int64_t{3}, int64_t{4}, int64_t{6}, int64_t{8},
                                 int64_t{12}, int64_t{16}, int64_t{32}, int64_t{64}, int64_t{128}}) {
      if (wanted < 2 || wanted > std::min<int64_t>(most_tiles, kMaxSplits)) continue;
      const int64_t per = (most_tiles - 1) / wanted + 1, count = (most_tiles - 1) / per + 1;
      if (count < 2 || count * part_bytes > kMaxPartBytes) continue;
      const bool even = of_tile.mean == of_tile.most;
      const auto part_keys = static_cast<double>(per * block_n);
      // Where tiles differ the last part of each is half full.
      const double parts = even ? tiles * count : tiles * std::max(of_tile.mean / part_keys + 0.5, 1.0);
      take(rows_model.time(parts, split_m, part_keys, part_keys, Tiles::kSplit) +
               (few_queries ? SplitModel::kCombine : SplitModel::kCombineMany) +
               2 * count * part_bytes / SplitModel::kCardBytes,
           count, per);
    }
  };
  consider(problem, keys, most, 0, best_time);
  const int64_t group = problem.heads_q / problem.heads_k;
  if (problem.len_q <= kMostHeadRows && group > 1 && problem.heads_k == problem.heads_v) {
    const int head_rows = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(problem.len_q)));
    const Range range = keys_at(0, problem.len_q);
    const auto size = static_cast<double>(std::max<int64_t>(range.size(), 1));
    // NOTE: the model counts what heads of a group read as if memory were asked for each. With 33 to 64 queries, where
    // no row is saved, shared tiles took 0.6 to 1.1 times as long; with fewer 0.3 to 0.98, where it says more, too.
    const double limit = (head_rows < kMostHeadRows ? 1.2 : 0.95) * best_time;
    consider(with_shared_tiles(problem, head_rows), {size, size}, tiles_of(range), head_rows, limit);
  }
  return best;
}

// multiprocessors: 0 where unknown.
inline TileChoice choose_tiles(const Problem& problem, int head_dim, int multiprocessors) {
  TileChoice choice = choose_wide_tiles(problem, head_dim, multiprocessors);
  const bool is_dense = choice.tiles == Tiles::kLarge || choice.tiles == Tiles::kSmall;
  if (is_dense && has_narrow_values(problem, head_dim)) choice.tiles = Tiles::kNarrow;
  return choice;
}

}  // namespace flash_ext::sm90
