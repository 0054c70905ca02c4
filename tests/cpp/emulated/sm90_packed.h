// Packed sequences on sm90: in forward each has, bit for bit, what a call of its own has with the same tiles, whatever
// stands in its neighbours' rows; backward as check_packed says. Part of sm90_kernels_test.cpp, which has the backend.
#pragma once

#include "packed_call.h"

namespace flash_ext {
namespace {

// The rows of forward with the same tiles in every call, packed or not, however short it is.
class SameTiles {
 public:
  explicit SameTiles(sm90::Tiles tiles) {
    tiles_ = tiles;
    for (const Kernel& kernel : sm90::kernels()) {
      if (kernel.pass != Pass::kForward) continue;
      kernels_.push_back(kernel);
      kernels_.back().limits.least_length = 1;
      kernels_.back().plan = plan;
    }
  }
  Rows rows() const { return Rows(kernels_); }

 private:
  static Plan plan(const Problem& problem, const DeviceInfo& device) {
    Plan plan = sm90::plan_forward(problem, device);
    if (!problem.packed) plan.scratch_bytes = sm90::kCounterBytes;
    const int grid = problem.packed ? plan.chosen<sm90::ForwardLaunch>().grid : device.multiprocessors;
    plan.choose(sm90::ForwardLaunch{sm90::is_scored(problem) ? sm90::Tiles::kScored : tiles_, {}, grid});
    return plan;
  }

  static inline sm90::Tiles tiles_;  // a plan is a function

  std::vector<Kernel> kernels_;
};

template <class T>
void check_packed_forward(PackedCase c, sm90::Tiles tiles) {
  c.options.forward_alone = true;
  const SameTiles table(tiles);
  PackedCall<T> call(c);
  const Results all = call.run(table.rows());
  for (int64_t b = 0; b < call.batch(); ++b) {
    SCOPED_TRACE("sequence " + std::to_string(b));
    const Results own = call.part(all, b);
    const auto [q, k, unused_q, unused_k] = call.lengths(b);
    if (q == 0) continue;
    if (k == 0) {
      for (const float value : own.out) EXPECT_EQ(value, 0.f);
      for (const float value : own.lse) EXPECT_EQ(value, -INFINITY);
      continue;
    }
    const Results alone = call.part_alone(call.run_alone(table.rows(), b), b);
    EXPECT_EQ(own.out, alone.out);
    EXPECT_EQ(own.lse, alone.lse);
  }
  const int64_t middle = call.batch() / 2;  // with NaN in all other rows
  const Results own = call.part(all, middle), only = call.part(call.run(table.rows(), middle), middle);
  EXPECT_EQ(own.out, only.out);
  EXPECT_EQ(own.lse, only.lse);
}

const std::vector<PackedLengths> kLong = {{0, 20}, {1, 1}, {70, 200, 4, 3}, {200, 70}, {5, 0, 2, 0}, {129, 336, 0, 1}};

const PackedCase kPackedForward[] = {
    {{.name = "plain"}, kLong},
    {{.name = "plain_128", .head_dim = 128, .multiprocessors = 3}, kLong},
    {{.name = "a_block_a_tile", .heads_q = 2, .heads_k = 2, .heads_v = 2, .multiprocessors = 100}, kLong},
    {{.name = "causal", .heads_q = 4, .heads_k = 2, .heads_v = 2, .causal = true, .multiprocessors = 4}, kLong},
    {{.name = "bottom_right",
      .head_dim = 128,
      .d = 72,
      .d_v = 104,
      .heads_q = 2,
      .heads_k = 2,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true,
      .multiprocessors = 2},
     kLong},
    {{.name = "window", .causal = true, .bottom_right = true, .window = 40, .multiprocessors = 2}, kLong},
    {{.name = "window_192", .head_dim = 192, .causal = true, .window = 60}, kLong},
    {{.name = "scores",
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .bias = true,
      .mask = true,
      .alibi = true,
      .multiprocessors = 3},
     kLong},
    {{.name = "slopes_bottom_right",
      .head_dim = 128,
      .d_v = 64,
      .heads_q = 2,
      .heads_k = 2,
      .heads_v = 2,
      .causal = true,
      .bottom_right = true,
      .alibi = true},
     kLong},
    {{.name = "mask_softcap_dropout",
      .head_dim = 128,
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .mask = true,
      .softcap = 5,
      .dropout = 0.3,
      .multiprocessors = 3},
     kLong},
    {{.name = "scores_192", .head_dim = 192, .bias = true, .dropout = 0.2}, kLong},
};

class Sm90Packed : public testing::TestWithParam<PackedCase> {};

TEST_P(Sm90Packed, Bf16) { check_packed_forward<__nv_bfloat16>(GetParam(), sm90::Tiles::kMany); }
TEST_P(Sm90Packed, Fp16) { check_packed_forward<__half>(GetParam(), sm90::Tiles::kFew); }

INSTANTIATE_TEST_SUITE_P(All, Sm90Packed, testing::ValuesIn(kPackedForward),
                         [](const auto& info) { return info.param.options.name; });

// More entries than a block has threads, of which most stand for no tile.
TEST(Sm90Packed, ManyShortSequences) {
  PackedCase c{{.name = "many", .heads_q = 2, .heads_k = 1, .heads_v = 1, .multiprocessors = 5}, {}};
  for (int b = 0; b < 700; ++b) c.sequences.push_back({b % 9 == 0 ? 1 + b % 7 : 0, 1 + b % 11});
  c.options.forward_alone = true;
  const SameTiles table(sm90::Tiles::kMany);
  PackedCall<__nv_bfloat16> call(c);
  const Results all = call.run(table.rows());
  for (const int64_t b : {0, 9, 351, 693}) {
    const Results own = call.part(all, b), only = call.part(call.run(table.rows(), b), b);
    EXPECT_EQ(own.out, only.out);
    EXPECT_EQ(own.lse, only.lse);
    const auto is_number = [](float x) { return std::isfinite(x); };
    EXPECT_TRUE(std::all_of(own.lse.begin(), own.lse.end(), is_number));
  }
}

// The rows of both passes, however few keys and however short calls there are.
Rows any_lengths() {
  static const std::vector<Kernel> kernels = [] {
    std::vector<Kernel> rows(sm90::kernels().begin(), sm90::kernels().end());
    for (Kernel& row : rows) row.limits.least_keys = row.limits.least_length = 1;
    return rows;
  }();
  return Rows(kernels);
}

const std::vector<PackedLengths> kFewTiles = {{0, 20}, {1, 1}, {70, 152, 4, 3}, {5, 0, 2, 0}, {130, 40, 0, 1}};

const PackedCase kPackedBackward[] = {
    {{.name = "plain", .d_lse = true}, kFewTiles},
    {{.name = "grouped", .heads_q = 4, .heads_k = 2, .heads_v = 2, .causal = true, .d_lse = true}, kFewTiles},
    {{.name = "bottom_right_128",
      .head_dim = 128,
      .d = 72,
      .d_v = 104,
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true},
     kFewTiles},
    {{.name = "window", .causal = true, .bottom_right = true, .window = 40}, kFewTiles},
    {{.name = "scores", .heads_q = 2, .heads_k = 1, .heads_v = 1, .bias = true, .mask = true, .alibi = true},
     kFewTiles},
    {{.name = "slopes_bottom_right_128",
      .head_dim = 128,
      .d_v = 64,
      .causal = true,
      .bottom_right = true,
      .alibi = true,
      .d_lse = true},
     kFewTiles},
    {{.name = "dropout_and_mask", .causal = true, .mask = true, .dropout = 0.3}, kFewTiles},
    {{.name = "dropout_and_bias_128", .head_dim = 128, .bias = true, .dropout = 0.2, .d_lse = true}, kFewTiles},
};

class Sm90PackedBackward : public testing::TestWithParam<PackedCase> {};

TEST_P(Sm90PackedBackward, Bf16) { check_packed<__nv_bfloat16>(any_lengths(), GetParam()); }
TEST_P(Sm90PackedBackward, Fp16) { check_packed<__half>(any_lengths(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm90PackedBackward, testing::ValuesIn(kPackedBackward),
                         [](const auto& info) { return info.param.options.name; });

}  // namespace
}  // namespace flash_ext
