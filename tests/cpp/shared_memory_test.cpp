// kernels/sm80/choose_tiles.h: every card gets tiles that fit, or none do.
#include <gtest/gtest.h>

#include <utility>

#include "kernels/sm80/choose_tiles.h"

namespace flash_ext::sm80 {
namespace {

constexpr int kBuckets[] = {32, 64, 96, 128, 192, 256};

DeviceInfo card(int compute_capability, int64_t shared_memory) {
  return {DeviceType::kCuda, compute_capability, 100, shared_memory, shared_memory + 1024};
}
const DeviceInfo kCards[] = {card(80, 166912), card(86, 101376), card(90, 232448), card(120, 101376)};

Problem make_problem(DType dtype, int head_dim) {
  Problem problem;
  problem.dtype = dtype;
  problem.len_q = problem.len_k = 1000;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  return problem;
}

template <class Fn>
void for_each_problem(const Fn& fn) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32})
    for (const int head_dim : kBuckets)
      for (const bool has_mask : {false, true})
        for (const int bias : {0, 1, 2, 3}) {  // none, of the dtype, float32, float32 with its gradient
          Problem problem = make_problem(dtype, head_dim);
          problem.has_mask = has_mask;
          problem.has_bias = bias > 0;
          problem.bias_dtype = bias == 1 ? dtype : DType::kFloat32;
          problem.wants_dbias = bias == 3;
          fn(problem, head_dim);
        }
}

// On every card, in both passes.
TEST(SharedMemory, TheTilesOfAPlanFitOrTheProblemIsRefused) {
  for_each_problem([](Problem problem, int head_dim) {
    for (const DeviceInfo& device : kCards)
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        const auto bytes = [&](bool small) { return shared_bytes(problem, pass, head_dim, small, device); };
        EXPECT_LE(bytes(true), bytes(false));
        const bool may_be_refused =
            problem.dtype == DType::kFloat32 && device.compute_capability != 90 && head_dim > 128;
        EXPECT_TRUE(may_be_refused || bytes(true) <= device.shared_memory_per_block);
        for (const int heads : {1, 64}) {  // fewer tiles than multiprocessors, and more
          problem.heads_q = problem.heads_k = problem.heads_v = heads;
          const bool small = takes_small_tiles(problem, pass, head_dim, device);
          EXPECT_EQ(bytes(small) <= device.shared_memory_per_block, bytes(true) <= device.shared_memory_per_block);
        }
      }
  });
}

TEST(SharedMemory, TheStageOfDqTakesOnlyWhatIsLeft) {
  int staged = 0;
  for_each_problem([&](const Problem& problem, int head_dim) {
    if (problem.dtype == DType::kFloat32) return;
    for (const bool plain : {true, false}) {
      const BackwardShape shape = backward_shape(2, head_dim, false, plain);
      BackwardNeeds needs = backward_needs(problem, head_dim, false);
      if (plain) needs = {.p_apart = true};
      const BackwardSmem without = backward_smem(shape, head_dim, 2, needs);
      needs.has_bulk = true;
      const BackwardSmem with = backward_smem(shape, head_dim, 2, needs);
      EXPECT_EQ(without.dq_rows, 0);
      EXPECT_EQ(without.total, with.dq);  // the stage is last
      EXPECT_LE(with.total, std::max(without.total, kBulkLimit));
      EXPECT_EQ(with.total - with.dq, with.dq_rows * shape.dq_warps_m * head_dim * 16 * 4);
      staged += with.dq_rows > 0;
    }
  });
  EXPECT_GT(staged, 20);
}

TEST(SharedMemory, PLiesWhereDsWillBeSoThatAllOfDqIsStagedBesideABias) {
  const BackwardShape shape = backward_shape(2, 128, false, false);
  const int all_rows = shape.tile.block_m / shape.dq_warps_m / 16;
  Problem problem = make_problem(DType::kBFloat16, 128);
  const auto smem = [&] { return backward_smem(shape, 128, 2, backward_needs(problem, 128, true)); };
  EXPECT_NE(smem().p, smem().ds);
  problem.has_bias = true;
  problem.bias_dtype = problem.dtype;
  EXPECT_EQ(smem().p, smem().ds);
  EXPECT_EQ(smem().p_stage, 64 * 128 * 2);
  EXPECT_EQ(smem().dq_rows, all_rows);
  problem.wants_dbias = true;  // takes the place of P
  EXPECT_NE(smem().p, smem().ds);
  EXPECT_EQ(smem().p_stage, 0);
  EXPECT_LT(smem().dq_rows, all_rows);
  problem.wants_dbias = false;
  problem.softcap = 1.0;  // that of dS
  EXPECT_NE(smem().p, smem().ds);
  EXPECT_TRUE(backward_needs(problem, 64, true).p_apart);
}

TEST(SharedMemory, DropoutAloneIsNothingElse) {
  Problem problem = make_problem(DType::kBFloat16, 128);
  EXPECT_FALSE(has_dropout_alone(problem));
  problem.dropout_p = 0.1;
  problem.causal = true;
  EXPECT_TRUE(has_dropout_alone(problem));
  for (const auto& add :
       {+[](Problem& p) { p.has_mask = true; }, +[](Problem& p) { p.has_bias = true; },
        +[](Problem& p) { p.wants_dalibi = p.has_alibi = true; }, +[](Problem& p) { p.softcap = 1.0; },
        +[](Problem& p) { p.scale = -1.0; }, +[](Problem& p) { p.len_k = 1; }}) {
    Problem other = problem;
    add(other);
    EXPECT_FALSE(has_dropout_alone(other));
  }
}

TEST(SharedMemory, FewTilesAreSmallWhereEachHasAMultiprocessor) {
  const DeviceInfo device = card(90, 232448);  // 100 multiprocessors
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    Problem problem = make_problem(dtype, 64);
    for (const auto& [heads, small] : {std::pair{1, true}, {6, true}, {7, false}, {64, false}}) {
      problem.heads_q = heads;  // 8 large tiles each
      EXPECT_EQ(takes_small_tiles(problem, Pass::kForward, 64, device), small) << heads;
      EXPECT_FALSE(takes_small_tiles(problem, Pass::kBackward, 64, device));
    }
    problem.heads_q = 64;
    problem.len_q = 64;
    EXPECT_TRUE(takes_small_tiles(problem, Pass::kForward, 64, device));
  }
}

TEST(SharedMemory, TwoSmallTilesInsteadOfALargeOneThatIsAlone) {
  for (const auto& [head_dim, small_on_h200] : {std::pair{96, false}, {128, false}, {192, true}, {256, true}}) {
    Problem problem = make_problem(DType::kBFloat16, head_dim);
    problem.heads_q = problem.heads_k = problem.heads_v = 64;
    const auto small_on = [&](int compute_capability, int64_t shared_memory) {
      return takes_small_tiles(problem, Pass::kForward, head_dim, card(compute_capability, shared_memory));
    };
    EXPECT_EQ(small_on(90, 232448), small_on_h200);
    EXPECT_FALSE(small_on(80, 166912));
    EXPECT_EQ(small_on(120, 101376), head_dim == 256);  // the large one does not fit
    problem.softcap = 1.0;
    EXPECT_FALSE(small_on(90, 232448));
  }
}

TEST(SharedMemory, KeysHaveTwoStagesWhereTheyCostNoBlock) {
  const auto stages = [](const Problem& problem, const DeviceInfo& device) {
    const int head_dim = static_cast<int>(problem.head_dim), blocks = head_dim <= 128 ? 2 : 1;
    return forward_stages(problem, forward_tile(2, head_dim, false, is_plain(problem)), head_dim, 2, blocks, device);
  };
  const DeviceInfo h200 = card(90, 232448);
  for (const int head_dim : {64, 128, 192, 256}) {
    Problem problem = make_problem(DType::kBFloat16, head_dim);
    EXPECT_EQ(stages(problem, h200), 1);  // plain
    problem.softcap = 1.0;
    EXPECT_EQ(stages(problem, h200), 2);
    EXPECT_EQ(stages(problem, card(80, 166912)), 1);                         // no TMA
    EXPECT_EQ(stages(problem, card(120, 101376)), head_dim <= 128 ? 2 : 1);  // one block either way
    problem.has_mask = true;
    EXPECT_EQ(stages(problem, h200), 1);
  }
  Problem problem = make_problem(DType::kBFloat16, 96);  // no panels
  problem.softcap = 1.0;
  EXPECT_EQ(stages(problem, h200), 1);
  problem = make_problem(DType::kBFloat16, 128);
  problem.softcap = 1.0;
  EXPECT_EQ(stages(problem, card(90, 180000)), 1);  // two blocks with one stage, one with two
}

TEST(SharedMemory, CountsTheKernelsBesideTheMainOne) {
  Problem problem = make_problem(DType::kFloat32, 256);
  problem.has_bias = true;
  const BackwardShape shape = backward_shape(4, 256, true, false);
  const DeviceInfo device = card(90, 232448);
  const auto bytes = [&] { return shared_bytes(problem, Pass::kBackward, 256, true, device) - kStaticSharedBytes; };
  EXPECT_GE(bytes(), backward_smem(shape, 256, 4, backward_needs(problem, 256, true)).total);
  EXPECT_GE(bytes(), renormalise_shared_bytes(256, 4));
  problem.wants_dbias = true;
  EXPECT_GE(bytes(), bias_gradient_smem(bias_gradient_shape(4, 256, true).tile, 256, 4, 4, false).total);
}

}  // namespace
}  // namespace flash_ext::sm80
