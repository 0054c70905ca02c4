// core/tile_schedule.h: every tile once, longest first, sections and groups together.
#include "core/tile_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>
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

TEST(TileSchedule, IsABijectionWithATail) {
  for (int64_t kv_heads = 1; kv_heads < 8; ++kv_heads)
    for (int64_t section = 1; section < 10; ++section)
      for (int64_t tail = 0; tail <= kv_heads; ++tail) {
        TileSchedule schedule;
        schedule.blocks = 5;
        schedule.heads_k = schedule.kv_heads = kv_heads;
        schedule.group = 2;
        schedule.section = section;
        schedule.tail = tail;
        std::set<std::pair<int64_t, int64_t>> seen;
        for (int64_t i = 0; i < schedule.size(); ++i) {
          const Tile tile = schedule.at<uint32_t>(i);
          ASSERT_TRUE(tile.head >= 0 && tile.head < 2 * kv_heads && tile.block >= 0 && tile.block < 5);
          ASSERT_TRUE(seen.insert({tile.head, tile.block}).second);
          ASSERT_EQ(tile.head >= 2 * (kv_heads - tail), i >= 10 * (kv_heads - tail));
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

// Tiles of keys of a causal backward as blocks of 128, and when the last of them ends, over the best possible: each is
// taken by whoever is free first.
TileSchedule causal_schedule(int64_t kv_heads, int64_t length, int64_t l2_heads, int64_t resident) {
  TileSchedule schedule;
  schedule.blocks = block_count(length, 128);
  schedule.heads_k = schedule.kv_heads = kv_heads;
  set_sections(schedule, l2_heads, resident, [&](int64_t block) { return length - block * 128; });
  return schedule;
}
double end_of(const TileSchedule& schedule, int64_t length, int64_t resident) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int64_t i = 0; i < resident; ++i) free_at.push(0);
  int64_t sum = 0, end = 0;
  for (int64_t i = 0; i < schedule.size(); ++i) {
    const int64_t time = length - schedule.at(i).block * 128;
    end = std::max(end, free_at.top() + time);
    free_at.push(free_at.top() + time);
    free_at.pop();
    sum += time;
  }
  return static_cast<double>(end) / std::max(static_cast<double>(sum) / resident, static_cast<double>(length));
}

TEST(TileSchedule, TheLastTileEndsAboutWhenAllDo) {
  double before = 0, sum = 0;
  int count = 0;
  for (int64_t heads : {8, 12, 16, 24, 32, 40, 64, 96, 128})
    for (int64_t length : {1024, 2048, 3000, 4096, 5000, 8192, 16384}) {
      const int64_t l2_heads = heads_per_section(length * 1024, int64_t{24} << 20);
      const double end = end_of(causal_schedule(heads, length, l2_heads, 132), length, 132);
      EXPECT_LE(end, 1.13) << heads << " " << length;
      sum += end;
      before += end_of(causal_schedule(heads, length, l2_heads, 0), length, 132);
      ++count;
    }
  EXPECT_LE(sum / count, 1.02);
  EXPECT_GE(before / count, 1.05);
}

TEST(TileSchedule, SectionsThatEndTogether) {
  // 8 key heads of 4 query heads, whose Q, dO and dQ fill L2 alone: 4 heads of 32 tiles run at a time.
  const TileSchedule grouped = causal_schedule(32, 4096, 1, 132);
  EXPECT_EQ(grouped.section, 4);
  EXPECT_EQ(grouped.tail, 16);  // of 9 that are needed; 16 before it are four sections
  EXPECT_LE(end_of(grouped, 4096, 132), 1.01);
  EXPECT_GE(end_of(causal_schedule(8, 4096, 1, 0), 4096, 132), 1.5);
  EXPECT_LE(end_of(causal_schedule(8, 4096, 1, 132), 4096, 132), 1.01);
  // L2 holds six: one round. Where it holds nine, two rounds are even by themselves.
  EXPECT_EQ(causal_schedule(64, 4096, 6, 132).section, 4);
  EXPECT_EQ(causal_schedule(64, 4096, 9, 132).section, 8);
  EXPECT_EQ(causal_schedule(64, 4096, 9, 132).tail % 8, 0);
  // Longer than a round: one head.
  EXPECT_EQ(causal_schedule(16, 1 << 20, 1, 132).section, 1);
  // Tiles of one length, and a number of resident that nobody knows.
  TileSchedule even = causal_schedule(64, 4096, 6, 0);
  EXPECT_EQ(std::make_pair(even.section, even.tail), std::make_pair(int64_t{6}, int64_t{0}));
  set_sections(even, 6, 132, [](int64_t) { return 7; });
  EXPECT_EQ(std::make_pair(even.section, even.tail), std::make_pair(int64_t{6}, int64_t{0}));
  TileSchedule none;
  set_sections(none, 6, 132, [](int64_t) { return 7; });
  EXPECT_EQ(none.tail, 0);
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
