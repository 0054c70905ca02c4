// kernels/sm80/one_tile_order.h: blocks of threads find every head once, and end at about the same time.
#include "kernels/sm80/one_tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace flash_ext::sm80 {
namespace {

Problem windows(int64_t batch, int64_t heads) {
  Problem problem;
  problem.batch_rank = 1;
  problem.batch = problem.batch_size[0] = batch;
  problem.heads_q = problem.heads_k = problem.heads_v = heads;
  problem.len_q = problem.len_k = 49;
  problem.head_dim = problem.head_dim_v = 32;
  return problem;
}

// Heads of each of `grid` blocks, by the numbers that one_tile.cuh takes: n is item n % part_items of the block's unit
// n / part_items.
std::vector<int> walk(const Problem& problem, const BiasGradientPlan& order, uint32_t grid) {
  std::vector<int> of_block(grid, 0);
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (uint32_t block = 0; block < grid && block < order.units(); ++block) {
    const auto count = static_cast<uint32_t>(block_count(order.units() - block, grid)) * order.part_items;
    for (uint32_t n = 0; n < count; ++n) {
      const uint32_t unit = block + n / order.part_items * grid, index = n % order.part_items;
      if (unit >= order.units() || index >= order.items_of(unit)) continue;
      const BiasGradientItem item = order.at(problem, unit, index);
      EXPECT_TRUE(seen.emplace(item.b, item.head).second);
      ++of_block[block];
    }
  }
  EXPECT_EQ(seen.size(), static_cast<size_t>(problem.batch * problem.heads_q));
  return of_block;
}

TEST(OneTileOrder, EveryHeadOnceAndBlocksEndTogether) {
  for (const auto& [batch, heads] : {std::pair<int64_t, int64_t>{4096, 3}, {1024, 6}, {256, 12}, {700, 3}, {1, 5}}) {
    const Problem problem = windows(batch, heads);
    for (const bool own_head : {false, true}) {
      for (const bool own_batch : {false, true}) {
        ForwardArgs args;
        args.problem = problem;
        args.problem.has_bias = own_head || own_batch;
        args.bias.row_stride = args.bias.col_stride = 1;
        args.bias.head_stride = own_head ? 1 : 0;
        args.bias.batch_stride[0] = own_batch ? 1 : 0;
        const int64_t grid = std::min<int64_t>(660, batch * heads);
        const std::vector<int> of_block =
            walk(problem, one_tile_order(args, kOneTile, grid), static_cast<uint32_t>(grid));
        const int most = *std::max_element(of_block.begin(), of_block.end());
        const double mean = static_cast<double>(batch * heads) / static_cast<double>(grid);
        EXPECT_LE(most, 1.1 * mean + 1) << batch << " " << heads << " " << own_head << own_batch;
      }
    }
  }
}

TEST(OneTileOrder, PartsOfAGradientFitTheirPlaceAndBlocksEndTogether) {
  for (const auto& [batch, heads] : {std::pair<int64_t, int64_t>{4096, 3}, {1024, 3}, {128, 3}, {16, 3}, {700, 24}}) {
    const Problem problem = windows(batch, heads);
    for (const bool own_head : {false, true}) {
      for (const bool own_batch : {false, true}) {
        TensorView gradient;
        gradient.row_stride = 49;
        gradient.col_stride = 1;
        gradient.head_stride = own_head ? 49 * 49 : 0;
        gradient.batch_stride[0] = own_batch ? heads * 49 * 49 : 0;
        const int64_t grid = std::min<int64_t>(132, batch * heads);
        const BiasGradientPlan order = one_tile_gradient_order(problem, gradient, kOneTile, grid);
        if (order.parts > 1) {
          EXPECT_LE(order.parts * order.part_elements, one_tile_partial_elements(problem, grid));
        }
        const std::vector<int> of_block = walk(problem, order, static_cast<uint32_t>(grid));
        const int most = *std::max_element(of_block.begin(), of_block.end());
        const double mean = static_cast<double>(batch * heads) / static_cast<double>(grid);
        EXPECT_LE(most, 1.15 * mean + 1) << batch << " " << heads << " " << own_head << own_batch;
      }
    }
  }
}

TEST(OneTileOrder, ABandIsOneThatHidesPairsOfTheTile) {
  Problem problem = windows(2, 2);
  EXPECT_FALSE(has_band(problem, kOneTile));
  problem.window_left = problem.window_right = kOneTile - 1;
  EXPECT_FALSE(has_band(problem, kOneTile));
  EXPECT_TRUE(has_band(problem, kLargeTile));
  problem.window_left = kOneTile - 2;
  EXPECT_TRUE(has_band(problem, kOneTile));
  problem.window_left = kUnbounded;
  problem.causal = true;
  EXPECT_TRUE(has_band(problem, kLargeTile));
}

TEST(OneTileOrder, RowsAreRegularWhereAllOfThemAre) {
  alignas(16) static uint16_t data[64];
  Problem problem = windows(2, 2);
  TensorView view;
  view.data = data;
  view.row_stride = 32;
  view.col_stride = 1;
  view.head_stride = view.batch_stride[0] = 64;
  const TensorView absent;
  EXPECT_TRUE(has_regular_rows(problem, {&view, &absent}));
  for (int64_t TensorView::*stride : {&TensorView::row_stride, &TensorView::col_stride, &TensorView::head_stride}) {
    TensorView odd = view;
    odd.*stride += 4;
    EXPECT_FALSE(has_regular_rows(problem, {&view, &odd}));
  }
  TensorView odd = view;
  odd.batch_stride[0] = 4;
  EXPECT_FALSE(has_regular_rows(problem, {&odd}));
  odd = view;
  odd.data = data + 1;
  EXPECT_FALSE(has_regular_rows(problem, {&odd}));
  problem.head_dim_v = 20;
  EXPECT_FALSE(has_regular_rows(problem, {&view}));
}

}  // namespace
}  // namespace flash_ext::sm80
