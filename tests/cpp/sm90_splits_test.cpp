// kernels/sm90/forward/splits.h and choose_tiles.h: parts cover a tile's keys once, and which calls are split.
#include <gtest/gtest.h>

#include <initializer_list>
#include <utility>

#include "kernels/sm90/forward/choose_tiles.h"

namespace flash_ext::sm90 {
namespace {

constexpr int kSms = 132;

Problem problem(int64_t batch, int64_t heads, int64_t len_q, int64_t len_k, bool causal = false) {
  Problem p;
  p.dtype = DType::kBFloat16;
  p.batch = batch;
  p.heads_q = p.heads_k = p.heads_v = heads;
  p.len_q = len_q;
  p.len_k = len_k;
  p.head_dim = p.head_dim_v = 128;
  p.causal = causal;
  return p;
}

int parts_of(const Problem& p) { return choose_tiles(p, 128, kSms).splits.count; }

TEST(Splits, PartsCoverEveryTileOnce) {
  for (int count = 1; count < 6; ++count)
    for (int tiles = 1; tiles < 5; ++tiles)
      for (int first = 0; first < 3; ++first)
        for (int last = first + 1; last < first + 30; ++last) {
          int next = first;
          for (int part = 0; part < count; ++part) {
            int begin = first, end = last;
            take_part(begin, end, part, {count, tiles});
            ASSERT_LE(begin, end);
            if (begin == end) continue;
            ASSERT_EQ(begin, next);
            next = end;
          }
          ASSERT_EQ(next, last);
        }
}

TEST(Splits, FillTheCardWithFewTiles) {
  for (const int64_t heads : {1, 2, 8, 16, 32}) {
    const int parts = parts_of(problem(1, heads, 8, 65536));
    EXPECT_GT(parts * heads, kSms * 3 / 4) << heads;
    EXPECT_LE(parts, kMaxSplits);
  }
  EXPECT_EQ(parts_of(problem(1, 8, 8, 2048)), 16);
  EXPECT_GT(parts_of(problem(1, 1, 8192, 8192, true)), 1);
  EXPECT_EQ(parts_of(problem(16, 8, 8, 16384)), 1);                          // 128 tiles
  EXPECT_EQ(parts_of(problem(1, 8, 8, 128)), 0);                             // one tile of keys
  EXPECT_EQ(parts_of(problem(4, 16, 4096, 4096)), 0);                        // enough tiles
  EXPECT_EQ(choose_tiles(problem(1, 8, 8, 65536), 128, 0).splits.count, 0);  // an unknown card
}

// Where every head is one tile a block walks several parts, none of which may be without keys.
TEST(Splits, NoPartIsEmptyWhereHeadsAreOneTile) {
  for (const int64_t heads : {1, 3, 8, 40, 100, 131, 150, 300})
    for (int64_t len_k = 1; len_k < 9000; len_k += 127)
      for (const int64_t len_q : {1, 8, 128})
        for (const int64_t window : {kUnbounded, int64_t{700}}) {
          Problem p = problem(1, heads, len_q, len_k);
          p.window_left = window;
          p.bottom_right = true;
          const Splits splits = choose_tiles(p, 128, kSms).splits;
          if (splits.count == 0) continue;
          const Range keys = make_band(p).keys({0, len_q}, len_k);
          const int block_n = forward_shape(128, Tiles::kSplit).block_n;
          int first = static_cast<int>(keys.first) / block_n;
          int last = static_cast<int>(block_count(keys.last, block_n));
          take_part(first, last, splits.count - 1, splits);
          ASSERT_LT(first, last) << heads << " " << len_q << " " << len_k;
          EXPECT_LE(split_scratch_bytes(p, splits), kMaxPartBytes * 129 / 128);
        }
}

// Few queries of grouped heads share tiles, each head in a power of two of rows.
TEST(Splits, HeadsOfAGroupShareTiles) {
  const auto plan = [](int64_t heads, int64_t heads_k, int64_t len_q, int64_t batch = 1) {
    Problem p = problem(batch, heads, len_q, 4096);
    p.heads_k = p.heads_v = heads_k;
    return choose_tiles(p, 128, kSms).splits;
  };
  for (const auto& [len_q, rows] : {std::pair{2, 2}, {3, 4}, {5, 8}, {8, 8}, {31, 32}}) {
    const Splits splits = plan(32, 8, len_q);
    EXPECT_EQ(splits.head_rows, rows) << len_q;
    Problem p = problem(1, 32, len_q, 4096);
    p.heads_k = 8;
    const Problem shared = with_shared_tiles(p, splits.head_rows);
    EXPECT_EQ(shared.len_q, 4 * rows);
    EXPECT_EQ(split_order(p, 128, splits, 1000).schedule.size(), 8);
  }
  EXPECT_EQ(plan(32, 32, 8).head_rows, 0);     // no group
  EXPECT_EQ(plan(32, 8, 65).head_rows, 0);     // more than a warpgroup's
  EXPECT_EQ(plan(16, 1, 64, 1).head_rows, 0);  // as many rows either way
  Problem p = problem(1, 32, 8, 4096);
  p.heads_k = 8;  // and 32 of values
  EXPECT_EQ(choose_tiles(p, 128, kSms).splits.head_rows, 0);
}

// A last round that is nearly empty costs as much as a full one.
TEST(Splits, TilesFillTheLastRound) {
  const auto tiles_of = [](int64_t heads, int head_dim) {
    Problem p = problem(1, heads, 4096, 4096);
    p.head_dim = p.head_dim_v = head_dim;
    return choose_tiles(p, head_dim, kSms).tiles;
  };
  EXPECT_EQ(tiles_of(8, 64), Tiles::kSmall);   // 128 of 256 queries, 176 of 192
  EXPECT_EQ(tiles_of(8, 128), Tiles::kSmall);  // 256 of 128 queries
  EXPECT_EQ(tiles_of(64, 128), Tiles::kLarge);
}

TEST(Splits, UnevenTilesAreABlockAPart) {
  const Problem p = problem(1, 1, 8192, 8192, true);
  const Splits splits = choose_tiles(p, 128, kSms).splits;
  const ForwardOrder order = split_order(p, 128, splits, kSms);
  EXPECT_EQ(order.grid, order.schedule.size() * splits.count);
  EXPECT_FALSE(order.counted);
  EXPECT_TRUE(order.schedule.last_first);
  EXPECT_EQ(split_order(p, 128, splits, order.grid).grid, order.grid);  // as the launch asks
}

}  // namespace
}  // namespace flash_ext::sm90
