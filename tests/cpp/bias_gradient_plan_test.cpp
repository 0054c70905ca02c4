// core/plan_bias_gradient.h: every score tile is summed once into the tile of the gradient that it belongs to.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <tuple>

#include "core/plan_bias_gradient.h"

namespace flash_ext {
namespace {

constexpr int kBlockM = 64, kBlockN = 32;

Problem make_problem(int64_t outer, int64_t inner, int64_t heads, int64_t len_q, int64_t len_k) {
  Problem problem;
  problem.batch_rank = 2;
  problem.batch_size[0] = outer;
  problem.batch_size[1] = inner;
  problem.batch = outer * inner;
  problem.heads_q = problem.heads_k = problem.heads_v = heads;
  problem.len_q = len_q;
  problem.len_k = len_k;
  return problem;
}

// Dense, with the dimensions whose bits are set: key, query, head, inner and outer batch.
TensorView make_gradient(const Problem& problem, int own) {
  TensorView view;
  int64_t stride = 1;
  const auto set = [&](int bit, int64_t& to, int64_t size) {
    if ((own >> bit & 1) == 0) return;
    to = stride;
    stride *= size;
  };
  set(0, view.col_stride, problem.len_k);
  set(1, view.row_stride, problem.len_q);
  set(2, view.head_stride, problem.heads_q);
  set(3, view.batch_stride[1], problem.batch_size[1]);
  set(4, view.batch_stride[0], problem.batch_size[0]);
  return view;
}

TEST(BiasGradientPlan, SumsEveryTileOnceIntoItsOwn) {
  for (const Problem& problem : {make_problem(1, 1, 1, 1, 1), make_problem(3, 2, 5, 130, 97),
                                 make_problem(1, 40, 3, 49, 49), make_problem(2, 1, 4, 1, 300)}) {
    for (int own = 0; own < 32; ++own) {
      for (int64_t places : {1, 7, 132}) {
        const TensorView gradient = make_gradient(problem, own);
        const BiasGradientPlan plan = make_bias_gradient_plan(problem, gradient, kBlockM, kBlockN, places);
        using Place = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // of a score tile, or of one of the gradient
        std::set<Place> seen;
        std::map<uint32_t, Place> tile_of_unit;
        for (uint32_t unit = 0; unit < plan.units(); ++unit) {
          ASSERT_GT(plan.items_of(unit), 0u);
          for (uint32_t index = 0; index < plan.items_of(unit); ++index) {
            const BiasGradientItem item = plan.at(problem, unit, index);
            ASSERT_EQ(item.last, index + 1 == plan.items_of(unit));
            ASSERT_EQ(item.part, unit / plan.tiles);
            ASSERT_EQ(item.b, item.batch[0] * problem.batch_size[1] + item.batch[1]);
            ASSERT_TRUE(item.b < problem.batch && item.head < problem.heads_q);
            ASSERT_TRUE(item.m_block < plan.m_blocks && item.n_block < plan.n_blocks);
            ASSERT_TRUE(seen.insert({item.b, item.head, item.m_block, item.n_block}).second);
            const auto kept = [&](int bit, int64_t x) { return own >> bit & 1 ? x : 0; };
            const Place tile{kept(4, item.batch[0]) * 1000 + kept(3, item.batch[1]), kept(2, item.head),
                             kept(1, item.m_block), kept(0, item.n_block)};
            ASSERT_EQ(tile_of_unit.emplace(unit % plan.tiles, tile).first->second, tile);
          }
        }
        ASSERT_EQ(static_cast<int64_t>(seen.size()),
                  problem.batch * problem.heads_q * int64_t{plan.m_blocks} * plan.n_blocks);
        if (plan.parts > 1) {
          ASSERT_LE(plan.parts * plan.part_elements, bias_partial_elements(problem));
        }
      }
    }
  }
}

TEST(BiasGradientPlan, NeighboursShareTiles) {
  const Problem problem = make_problem(1, 4, 2, 4096, 4096);
  const BiasGradientPlan plan =
      make_bias_gradient_plan(problem, make_gradient(problem, 0b00111), kBlockM, kBlockN, 132);
  ASSERT_GT(plan.run, 1u);
  for (uint32_t unit = 1; unit < plan.run; ++unit) {  // the next block of queries, from the same batch element on
    const BiasGradientItem before = plan.at(problem, unit - 1, plan.items - 1), after = plan.at(problem, unit, 0);
    EXPECT_EQ(before.b, after.b);
    EXPECT_EQ(before.n_block, after.n_block);
    EXPECT_EQ(before.m_block + 1, after.m_block);
  }
}

TEST(BiasGradientPlan, FillsTheCard) {
  constexpr int64_t kPlaces = 132;
  const auto waves = [&](const Problem& problem, int own) {
    const BiasGradientPlan plan = make_bias_gradient_plan(problem, make_gradient(problem, own), 128, 128, kPlaces);
    return static_cast<double>(plan.blocks()) / kPlaces;
  };
  const Problem problem = make_problem(1, 4, 16, 4096, 4096);
  for (const int own : {0b00111, 0b01001, 0b00101, 0b00001, 0}) EXPECT_GT(waves(problem, own), 7) << own;
  EXPECT_GT(waves(make_problem(1, 4096, 3, 49, 49), 0b00111), 1.9);
}

}  // namespace
}  // namespace flash_ext
