// core/fold_heads.h: one query of a group of heads as queries of one head, element by element.
#include "core/fold_heads.h"

#include <gtest/gtest.h>

namespace flash_ext {
namespace {

ForwardArgs decode() {
  ForwardArgs args;
  Problem& p = args.problem;
  p.dtype = DType::kBFloat16;
  p.batch_rank = 1;
  p.batch = p.batch_size[0] = 3;
  p.heads_q = 8;
  p.heads_k = p.heads_v = 2;
  p.len_q = 1;
  p.len_k = 100;
  p.head_dim = p.head_dim_v = 16;
  args.q = {nullptr, {8 * 16}, 16, 16, 1};
  args.out = {nullptr, {8 * 24}, 24, 24, 1};
  args.k = args.v = {nullptr, {2 * 100 * 16}, 100 * 16, 16, 1};
  return args;
}

int64_t offset(const TensorView& view, int64_t head, int64_t row) {
  return head * view.head_stride + row * view.row_stride;
}

TEST(FoldHeads, QueriesAreTheHeadsOfAGroup) {
  const ForwardArgs before = decode();
  ForwardArgs args = before;
  fold_heads(args);
  EXPECT_EQ(args.problem.heads_q, 2);
  EXPECT_EQ(args.problem.heads_k, 2);
  EXPECT_EQ(args.problem.len_q, 4);
  EXPECT_EQ(args.problem.len_k, 100);
  for (int head = 0; head < 8; ++head) {
    EXPECT_EQ(offset(args.q, head / 4, head % 4), offset(before.q, head, 0));
    EXPECT_EQ(offset(args.out, head / 4, head % 4), offset(before.out, head, 0));
  }
  EXPECT_EQ(args.k.data, before.k.data);
}

TEST(FoldHeads, TheBandBecomesAnInterval) {
  ForwardArgs args = decode();
  args.problem.causal = args.problem.bottom_right = args.problem.has_mask = args.problem.has_bias = true;
  args.problem.window_left = 9;
  args.problem.bias_dtype = DType::kFloat32;
  args.mask = {nullptr, {0}, 200, 100, 2};
  args.bias = {nullptr, {0}, 0, 0, 1};
  fold_heads(args);
  EXPECT_EQ(args.problem.len_k, 10);  // the last ten keys
  EXPECT_TRUE(make_band(args.problem).unbounded());
  EXPECT_EQ(args.k.data, reinterpret_cast<void*>(90 * 16 * 2));
  EXPECT_EQ(args.mask.data, reinterpret_cast<void*>(90 * 2));
  EXPECT_EQ(args.bias.data, reinterpret_cast<void*>(90 * 4));
  EXPECT_EQ(offset(args.mask, 1, 3), 7 * 200);
  EXPECT_EQ(offset(args.bias, 1, 3), 0);
}

TEST(FoldHeads, LeavesWhatHeadsDoNotShare) {
  const auto stays = [](auto change) {
    ForwardArgs args = decode();
    change(args.problem);
    const int64_t heads = args.problem.heads_q;
    fold_heads(args);
    return args.problem.heads_q == heads && args.q.head_stride == 16;
  };
  EXPECT_FALSE(stays([](Problem&) {}));
  EXPECT_TRUE(stays([](Problem& p) { p.len_q = 2; }));
  EXPECT_TRUE(stays([](Problem& p) { p.heads_k = p.heads_v = 8; }));
  EXPECT_TRUE(stays([](Problem& p) { p.heads_v = 1; }));
  EXPECT_TRUE(stays([](Problem& p) { p.has_alibi = true; }));
  EXPECT_TRUE(stays([](Problem& p) { p.dropout_p = 0.1; }));
  EXPECT_TRUE(stays([](Problem& p) { p.window_right = -1000; }));  // no key
}

}  // namespace
}  // namespace flash_ext
