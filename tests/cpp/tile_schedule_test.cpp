// attention/tile_schedule.h: every tile once, longest first, sections and groups together.
#include "attention/tile_schedule.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

namespace flash_ext {
namespace {

Problem make_problem(int64_t batch, int64_t heads_k, int64_t group, int64_t len_q, int64_t len_k) {
  Problem problem;
  problem.batch = batch;
  problem.heads_k = problem.heads_v = heads_k;
  problem.heads_q = heads_k * group;
  problem.len_q = len_q;
  problem.len_k = len_k;
  return problem;
}

TEST(TileSchedule, IsABijection) {
  for (int64_t batch = 0; batch < 4; ++batch)
    for (int64_t heads_k = 0; heads_k < 4; ++heads_k)
      for (int64_t group = 1; group < 4; ++group)
        for (int64_t len_q : {0, 1, 4, 5, 23})
          for (int64_t section = 1; section < 11; ++section)
            for (bool causal : {false, true}) {
              Problem problem = make_problem(batch, heads_k, group, len_q, 50);
              problem.causal = causal;
              const TileSchedule schedule = make_tile_schedule(problem, 4, 100, 100 * section);
              ASSERT_EQ(schedule.section, section);
              ASSERT_EQ(schedule.size(), batch * problem.heads_q * ((len_q + 3) / 4));
              std::set<std::tuple<int64_t, int64_t, int64_t>> seen;
              for (int64_t i = 0; i < schedule.size(); ++i) {
                const Tile tile = schedule.at(i);
                ASSERT_TRUE(tile.b >= 0 && tile.b < batch);
                ASSERT_TRUE(tile.head >= 0 && tile.head < problem.heads_q);
                ASSERT_TRUE(tile.block >= 0 && tile.block < schedule.blocks);
                ASSERT_TRUE(seen.insert({tile.b, tile.head, tile.block}).second);
              }
            }
}

TEST(TileSchedule, LargeIndices) {
  TileSchedule schedule;
  schedule.blocks = 1 << 20;
  schedule.heads_k = 1000;
  schedule.group = 8;
  schedule.kv_heads = 1000000;
  schedule.section = 7;
  schedule.last_first = true;
  const Tile last = schedule.at(schedule.size() - 1);
  EXPECT_EQ(last.b, 999);
  EXPECT_EQ(last.head, 7999);
  EXPECT_EQ(last.block, 0);
}

TEST(TileSchedule, LongestFirstWithinASection) {
  for (bool bottom_right : {false, true})
    for (int64_t len_k : {10, 40, 60}) {
      Problem problem = make_problem(2, 3, 2, 40, len_k);
      problem.causal = true;
      problem.bottom_right = bottom_right;
      const Band band = make_band(problem);
      const TileSchedule schedule = make_tile_schedule(problem, 4, 10, 20);
      EXPECT_TRUE(schedule.last_first);
      const int64_t section_tiles = schedule.section * schedule.group * schedule.blocks;
      int64_t before = len_k;
      for (int64_t i = 0; i < schedule.size(); ++i) {
        if (i % section_tiles == 0) before = len_k;
        const int64_t first = schedule.at(i).block * 4;
        const int64_t keys = band.keys({first, first + 4}, len_k).size();
        EXPECT_LE(keys, before);
        before = keys;
      }
    }
}

TEST(TileSchedule, DirectionFollowsTheBand) {
  Problem problem = make_problem(1, 1, 1, 64, 64);
  EXPECT_FALSE(make_tile_schedule(problem, 8, 1, 1).last_first);
  problem.causal = true;
  EXPECT_TRUE(make_tile_schedule(problem, 8, 1, 1).last_first);
  problem.causal = false;
  problem.window_left = 0;  // queries see themselves and what follows: the first blocks are the long ones
  EXPECT_FALSE(make_tile_schedule(problem, 8, 1, 1).last_first);
}

TEST(TileSchedule, HeadsOfAGroupAreNeighboursAndSectionsStayTogether) {
  const Problem problem = make_problem(3, 4, 3, 40, 40);
  const TileSchedule schedule = make_tile_schedule(problem, 8, 100, 550);
  ASSERT_EQ(schedule.section, 5);
  std::vector<std::set<int64_t>> sections;
  for (int64_t i = 0; i < schedule.size(); ++i) {
    const Tile tile = schedule.at(i), leader = schedule.at(i - i % 3);
    EXPECT_EQ(tile.b, leader.b);
    EXPECT_EQ(tile.block, leader.block);
    EXPECT_EQ(tile.head / 3, leader.head / 3);
    EXPECT_EQ(tile.head % 3, i % 3);
    if (i % (5 * 3 * 5) == 0) sections.emplace_back();
    sections.back().insert(tile.b * 4 + tile.head / 3);
  }
  ASSERT_EQ(sections.size(), 3u);
  EXPECT_EQ(sections[0], (std::set<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(sections[1], (std::set<int64_t>{5, 6, 7, 8, 9}));
  EXPECT_EQ(sections[2], (std::set<int64_t>{10, 11}));
}

TEST(TileSchedule, SectionSize) {
  const int64_t budget = int64_t{32} << 20;
  EXPECT_EQ(heads_per_section(int64_t{2} * 4096 * 128 * 2, budget), 16);
  EXPECT_EQ(heads_per_section(budget, budget), 1);
  EXPECT_EQ(heads_per_section(budget + 1, budget), 1);
  EXPECT_EQ(heads_per_section(budget / 2 + 1, budget), 1);
  EXPECT_EQ(heads_per_section(0, budget), 1);
  EXPECT_EQ(heads_per_section(10, 0), 1);
}

TEST(TileSchedule, BlockCount) {
  EXPECT_EQ(block_count(0, 64), 0);
  EXPECT_EQ(block_count(1, 64), 1);
  EXPECT_EQ(block_count(64, 64), 1);
  EXPECT_EQ(block_count(65, 64), 2);
  EXPECT_EQ(block_count(int64_t{1} << 40, 128), int64_t{1} << 33);
}

}  // namespace
}  // namespace flash_ext
