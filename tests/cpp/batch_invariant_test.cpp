// What decides about bits follows from neither the size of the batch, nor packed sequences' longest, where the call is
// batch-invariant: who computes (core/select.h), tiles and splits (sm90, sm80), the order of sums (a bias's gradient).
#include <gtest/gtest.h>

#include <vector>

#include "core/fold_heads.h"
#include "core/plan_bias_gradient.h"
#include "core/select.h"
#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/cost.h"
#include "kernels/sm90/backward/config.h"
#include "kernels/sm90/cost.h"
#include "kernels/sm90/forward/choose_tiles.h"

namespace flash_ext {
namespace {

const DeviceInfo kH200 = {DeviceType::kCuda, 90, 132, 232448, 233472};
const DeviceInfo kA100 = {DeviceType::kCuda, 80, 108, 166912, 167936};

Problem problem_of(int64_t batch, int64_t length, bool packed, int64_t head_dim, bool causal) {
  Problem problem;
  problem.dtype = problem.bias_dtype = DType::kBFloat16;
  problem.batch_invariant = problem.deterministic = true;
  problem.batch_rank = batch > 1 && !packed ? 1 : 0;
  problem.batch_size[0] = problem.batch = batch;
  problem.heads_q = 16;
  problem.heads_k = problem.heads_v = 4;
  problem.len_q = problem.len_k = length;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.causal = causal;
  problem.packed = packed;
  problem.rows_q = problem.rows_k = packed ? batch * length : 0;
  problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  return problem;
}

// fn(problem) of batches of 1 to 512 elements of 1 to 16384 tokens, dense and packed, or `sequences`.
template <class Fn>
void for_each_size(int64_t head_dim, bool causal, const Fn& fn) {
  for (const int64_t batch : {1, 2, 3, 7, 16, 33, 128, 512})
    for (const int64_t length : {1, 2, 17, 64, 65, 128, 500, 1024, 4096, 16384})
      for (const bool packed : {false, true}) fn(problem_of(batch, length, packed, head_dim, causal));
}

template <class Fn>
void for_each_kind(const Fn& fn) {
  for (const int head_dim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true}) fn(head_dim, causal);
}

// `choice` of each size is that of the first; where the option is off some size has another one.
template <class Choice>
void expect_one_choice(const Choice& choice) {
  bool differs = false;
  for_each_kind([&](int head_dim, bool causal) {
    const auto first = choice(problem_of(1, 1, false, head_dim, causal), head_dim);
    for_each_size(head_dim, causal, [&](Problem problem) {
      EXPECT_EQ(choice(problem, head_dim), first) << head_dim << " " << problem.batch << " " << problem.len_q;
      problem.batch_invariant = false;
      differs = differs || choice(problem, head_dim) != first;
    });
  });
  EXPECT_TRUE(differs);
}

TEST(BatchInvariant, HopperTilesAreThoseOfManyKeysAndKeysAreNotSplit) {
  expect_one_choice([](const Problem& problem, int head_dim) {
    const auto [tiles, splits] = sm90::choose_tiles(problem, head_dim, kH200.multiprocessors);
    return std::vector{static_cast<int>(tiles), splits.count, splits.tiles, splits.head_rows};
  });
}

TEST(BatchInvariant, AmpereTilesAreOfOneSize) {
  for (const DeviceInfo& device : {kA100, kH200}) {
    expect_one_choice([&](const Problem& problem, int head_dim) {
      return sm80::takes_small_tiles(problem, Pass::kForward, head_dim, device);
    });
  }
}

TEST(BatchInvariant, AmpereTilesOfBackwardAndItsWayToExactRows) {
  expect_one_choice([](const Problem& problem, int) {
    Problem drops = problem;
    drops.dropout_p = 0.1;
    return std::vector{sm80::may_be_inexact(problem), sm80::has_dropout_alone(drops), sm80::has_one_float_key(problem)};
  });
}

TEST(BatchInvariant, DqIsAddedInOneOrder) {
  for_each_kind([](int head_dim, bool causal) {
    for_each_size(head_dim, causal, [](const Problem& problem) {
      EXPECT_TRUE(sm90::is_ordered(problem) || sm90::is_dq_stored(problem));
    });
  });
}

// Two rows, of which the first is slower in large calls and faster in small ones.
TEST(BatchInvariant, WhoComputesIsWhoIsFastestInLargeCalls) {
  const auto kernel = [](const char* name, double (*cost)(const Problem&, const DeviceInfo&)) {
    return Kernel{.name = name,
                  .backend = name,
                  .device = DeviceType::kCuda,
                  .pass = Pass::kForward,
                  .supports = kAllFeatures,
                  .cost = cost};
  };
  Kernel rows[] = {kernel("sm80", sm80::forward_cost), kernel("sm90", sm90::forward_cost)};
  const Kernel* const table[] = {&rows[0], &rows[1]};
  rows[1].limits.least_length = 65;
  for_each_kind([&](int head_dim, bool causal) {
    bool differs = false;
    for_each_size(head_dim, causal, [&](const Problem& problem) {
      ForwardArgs args;
      args.problem = problem;
      EXPECT_STREQ(select_forward(table, args, kH200, "")->name, "sm90");
      args.problem.batch_invariant = false;
      differs = differs || select_forward(table, args, kH200, "") != table[1];
    });
    EXPECT_TRUE(differs);
  });
}

TEST(BatchInvariant, ARowWithoutSupportSaysSo) {
  const Kernel kernel{.name = "a",
                      .backend = "a",
                      .device = DeviceType::kCuda,
                      .pass = Pass::kForward,
                      .supports = kAllFeatures.without({Feature::kBatchInvariant})};
  ForwardArgs args;
  args.problem = problem_of(2, 100, false, 64, false);
  const Kernel* const one = &kernel;
  EXPECT_EQ(consider({&one, 1}, Pass::kForward, {args}, kH200)[0].reason, "no support for batch-invariant results");
  args.problem.batch_invariant = false;
  EXPECT_EQ(consider({&one, 1}, Pass::kForward, {args}, kH200)[0].reason, "");
}

TEST(BatchInvariant, HeadsOfAGroupAreNotQueriesOfOne) {
  ForwardArgs args;
  args.problem = problem_of(2, 100, false, 64, false);
  args.problem.len_q = 1;
  fold_heads(args);
  EXPECT_EQ(args.problem.heads_q, 16);
  args.problem.batch_invariant = false;
  fold_heads(args);
  EXPECT_EQ(args.problem.heads_q, 4);
}

// A bias that batch elements have for their own, and heads and queries share: the items of an element's sum, in their
// order.
TEST(BatchInvariant, TheGradientOfABiasIsSummedInOneOrder) {
  const auto order_of = [](bool invariant, int64_t batch, int64_t element) {
    Problem problem = problem_of(batch, 130, false, 64, false);
    problem.batch_invariant = invariant;
    problem.batch_rank = 1;
    TensorView gradient;
    gradient.col_stride = 1;
    gradient.batch_stride[0] = problem.len_k;
    const BiasGradientPlan plan = make_bias_gradient_plan(problem, gradient, 64, 64, 132);
    std::vector<std::vector<uint32_t>> items;
    for (uint32_t unit = 0; unit < plan.units(); ++unit) {
      for (uint32_t index = 0; index < plan.items_of(unit); ++index) {
        const BiasGradientItem item = plan.at(problem, unit, index);
        if (item.b == element) items.push_back({item.part, item.m_block, item.n_block, item.head});
      }
    }
    return items;
  };
  for (const int64_t batch : {1, 2, 3, 64}) {
    for (int64_t element = 0; element < batch; ++element) {
      EXPECT_EQ(order_of(true, batch, element), order_of(true, 1, 0));
    }
  }
  EXPECT_NE(order_of(false, 64, 1), order_of(false, 1, 0));
}

}  // namespace
}  // namespace flash_ext
