// Packed sequences on sm90: in forward each has, bit for bit, what a call of its own has with the same tiles, whatever
// stands in its neighbours' rows; backward as check_packed says, and with dQ in one order as a call of its own. Part of
// sm90_kernels_test.cpp, which has the backend.
#pragma once

#include <array>
#include <functional>

#include "packed_call.h"

namespace flash_ext {
namespace {

// The rows of forward with the same tiles in every call, packed or not, however short it is; and rows of backward.
class SameTiles {
 public:
  explicit SameTiles(sm90::Tiles tiles, std::initializer_list<std::string_view> backward = {}) {
    tiles_ = tiles;
    for (const Kernel& kernel : sm90::kernels()) {
      const bool is_forward = kernel.pass == Pass::kForward;
      if (!is_forward && std::find(backward.begin(), backward.end(), kernel.name) == backward.end()) continue;
      kernels_.push_back(kernel);
      kernels_.back().limits.least_length = kernels_.back().limits.least_keys = 1;
      if (is_forward) kernels_.back().plan = plan;
    }
  }
  Rows rows() const { return Rows(kernels_); }

 private:
  static Plan plan(const Problem& problem, const DeviceInfo& device) {
    Plan plan = sm90::plan_forward(problem, device);
    if (!problem.packed) plan.scratch_bytes = sm90::kCounterBytes;
    const int grid = problem.packed ? plan.chosen<sm90::ForwardLaunch>().grid : device.multiprocessors;
    const int head_dim = sm90::instance_of(problem, Pass::kForward).head_dim;
    const sm90::Tiles dense = sm90::has_narrow_values(problem, head_dim) ? sm90::Tiles::kNarrow : tiles_;
    plan.choose(sm90::ForwardLaunch{sm90::is_scored(problem) ? sm90::Tiles::kScored : dense, {}, grid});
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
    {{.name = "narrow_values", .head_dim = 192, .d_v = 128, .causal = true, .multiprocessors = 2}, kLong},
    {{.name = "d_512", .head_dim = 512, .heads_q = 2, .causal = true, .multiprocessors = 2},
     {{70, 200, 4, 3}, {0, 20}}},
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

TEST_P(Sm90Packed, Bf16) { check_packed_forward<__nv_bfloat16>(GetParam(), sm90::Tiles::kLarge); }
TEST_P(Sm90Packed, Fp16) { check_packed_forward<__half>(GetParam(), sm90::Tiles::kSmall); }

INSTANTIATE_TEST_SUITE_P(All, Sm90Packed, testing::ValuesIn(kPackedForward),
                         [](const auto& info) { return info.param.options.name; });

// More entries than a block has threads, of which most stand for no tile.
TEST(Sm90Packed, ManyShortSequences) {
  PackedCase c{{.name = "many", .heads_q = 2, .heads_k = 1, .heads_v = 1, .multiprocessors = 5}, {}};
  for (int b = 0; b < 700; ++b) c.sequences.push_back({b % 9 == 0 ? 1 + b % 7 : 0, 1 + b % 11});
  c.options.forward_alone = true;
  const SameTiles table(sm90::Tiles::kLarge);
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

// ---- dQ in one order

const SameTiles& in_order() {
  static const SameTiles table(sm90::Tiles::kLarge, {"sm90.backward.packed.in_order", "sm90.backward"});
  return table;
}

void expect_equal(const Results& one, const Results& other) {
  EXPECT_EQ(one.out, other.out);
  EXPECT_EQ(one.lse, other.lse);
  EXPECT_EQ(one.dq, other.dq);
  EXPECT_EQ(one.dk, other.dk);
  EXPECT_EQ(one.dv, other.dv);
}

// A sequence has the bits of a dense call of it alone in deterministic mode, of a packed call beside others that have
// no rows, and of one on another card.
template <class T>
void check_in_order(PackedCase c) {
  c.options.deterministic = true;
  PackedCall<T> call(c);
  const Results all = call.run(in_order().rows());
  for (int64_t b = 0; b < call.batch(); ++b) {
    SCOPED_TRACE("sequence " + std::to_string(b));
    const Results own = call.part(all, b);
    const auto [q, k, unused_q, unused_k] = call.lengths(b);
    if (q > 0 && k > 0) {
      expect_equal(own, call.part_alone(call.run_alone(in_order().rows(), b), b));
      continue;
    }
    for (const std::vector<float>* x : {&own.out, &own.dq, &own.dk, &own.dv}) {
      for (const float value : *x) EXPECT_EQ(value, 0.f);
    }
  }
  const int64_t middle = call.batch() / 2;
  expect_equal(call.part(all, middle), call.part(call.run(in_order().rows(), middle), middle));
  c.options.multiprocessors = c.options.multiprocessors == 1 ? 3 : 1;
  expect_equal(all, PackedCall<T>(c).run(in_order().rows()));
}

const std::vector<PackedLengths> kManyTiles = {{0, 20}, {1, 1}, {200, 390, 4, 3}, {5, 0, 2, 0}, {300, 140}, {70, 130}};

const PackedCase kInOrder[] = {
    {{.name = "plain", .d_lse = true, .multiprocessors = 2}, kManyTiles},
    {{.name = "a_block_a_tile", .head_dim = 128, .multiprocessors = 100}, kManyTiles},
    {{.name = "grouped", .heads_q = 4, .heads_k = 2, .heads_v = 2, .causal = true, .multiprocessors = 3}, kManyTiles},
    {{.name = "bottom_right",
      .head_dim = 128,
      .d = 72,
      .d_v = 104,
      .heads_q = 2,
      .heads_k = 1,
      .heads_v = 1,
      .causal = true,
      .bottom_right = true,
      .d_lse = true,
      .multiprocessors = 2},
     kManyTiles},
    {{.name = "window", .causal = true, .bottom_right = true, .window = 60}, kManyTiles},
    {{.name = "window_128", .head_dim = 128, .causal = true, .window = 150}, kManyTiles},
    {{.name = "window_of_the_past", .window = 30, .multiprocessors = 2}, kManyTiles},
    {{.name = "renorm_rows", .heads_q = 2, .heads_k = 2, .heads_v = 2, .causal = true, .scale = 300}, kFewTiles},
};

class Sm90PackedInOrder : public testing::TestWithParam<PackedCase> {};

TEST_P(Sm90PackedInOrder, Bf16) { check_in_order<__nv_bfloat16>(GetParam()); }
TEST_P(Sm90PackedInOrder, Fp16) { check_in_order<__half>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm90PackedInOrder, testing::ValuesIn(kInOrder),
                         [](const auto& info) { return info.param.options.name; });

// Which row takes the backward of `batch` sequences of `length` tokens; "": none.
std::string row_of(
    int64_t batch, int64_t length, const std::function<void(Problem&)>& change = [](Problem&) {}) {
  BackwardArgs args;
  Problem& problem = args.fwd.problem;
  problem.dtype = DType::kBFloat16;
  problem.packed = problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  problem.batch_rank = 1;
  problem.batch_size[0] = problem.batch = batch;
  problem.heads_q = problem.heads_k = problem.heads_v = 16;
  problem.len_q = problem.len_k = length;
  problem.rows_q = problem.rows_k = batch * length;
  problem.head_dim = problem.head_dim_v = 128;
  problem.scale = 0.1;
  change(problem);
  TensorView rows;
  rows.data = &problem;  // anything that is there: nobody reads it
  rows.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(rows.data) / 128 * 128);
  rows.head_stride = problem.head_dim;
  rows.row_stride = 16 * problem.head_dim;
  rows.col_stride = 1;
  args.fwd.q = args.fwd.k = args.fwd.v = args.fwd.out = args.d_out = rows;
  DeviceInfo device;
  device.type = DeviceType::kCuda;
  device.compute_capability = 90;
  device.multiprocessors = 132;
  const Kernel* const kernel = select_backward(Rows(sm90::kernels()), args, device, "").main();
  return kernel == nullptr ? "" : kernel->name;
}

TEST(Sm90PackedInOrder, WhoServes) {
  const std::string in_order = "sm90.backward.packed.in_order", in_any = "sm90.backward.packed";
  const auto causal = [](Problem& problem) { problem.causal = true; };
  const auto strict = [](Problem& problem) { problem.deterministic = true; };
  const auto invariant = [](Problem& problem) { problem.deterministic = problem.batch_invariant = true; };
  EXPECT_EQ(row_of(16, 1024), in_any);
  EXPECT_EQ(row_of(16, 1024, causal), in_order);
  EXPECT_EQ(row_of(3, 1024, causal), in_any) << "few tiles";
  EXPECT_EQ(row_of(16, 4096, causal), in_any) << "long ones";
  for (const int64_t length : {16, 1024, 4096}) EXPECT_EQ(row_of(3, length, strict), in_order);
  EXPECT_EQ(row_of(3, 15, strict), "") << "fewer than 16 keys";
  for (const int64_t length : {1, 15, 1024}) {  // a sequence's kernel does not follow from its neighbours
    for (const int64_t batch : {1, 100}) EXPECT_EQ(row_of(batch, length, invariant), in_order);
  }
  const auto with = [](const std::function<void(Problem&)>& more) {
    return std::array{row_of(4, 1024, more), row_of(4, 1024, [&](Problem& problem) {
                        more(problem);
                        problem.deterministic = true;
                      })};
  };
  const std::array any_alone{in_any, std::string()}, none{std::string(), std::string()};
  EXPECT_EQ(with([](Problem& problem) { problem.has_mask = true; }), any_alone);
  EXPECT_EQ(with([](Problem& problem) { problem.dropout_p = 0.1; }), any_alone);
  EXPECT_EQ(with([](Problem& problem) { problem.softcap = 5; }), none);
  EXPECT_EQ(with([](Problem& problem) { problem.wants_dk = false; }), none);
  EXPECT_EQ(with([](Problem& problem) { problem.head_dim = 136; }), none);
}

// Nearly what a call in any order has.
TEST(Sm90PackedInOrder, SumsAreThoseOfAnyOrder) {
  PackedCase c{{.name = "sums", .heads_q = 2, .heads_k = 1, .heads_v = 1, .causal = true, .multiprocessors = 2},
               kManyTiles};
  const SameTiles any(sm90::Tiles::kLarge, {"sm90.backward.packed"});
  PackedCall<__nv_bfloat16> call(c);
  const Results in_any = call.run(any.rows()), ordered = call.run(in_order().rows());
  EXPECT_EQ(in_any.out, ordered.out);
  EXPECT_LT(error(ordered.dq, in_any.dq), 1e-2);
  EXPECT_LT(error(ordered.dk, in_any.dk), 1e-2);
  EXPECT_LT(error(ordered.dv, in_any.dv), 1e-2);
}

// Whatever the numbers in memory are, a call ends: nobody waits for tiles that a list does not have.
TEST(Sm90PackedInOrder, EndsWhateverIsInMemory) {
  std::mt19937 random(11);
  for (int round = 0; round < 6; ++round) {
    PackedCall<__nv_bfloat16> call({{.name = "garbage", .causal = true, .deterministic = true}, kFewTiles});
    for (std::vector<int32_t>* cu : {&call.cu_q(), &call.cu_k()}) {
      for (int32_t& x : *cu) x = static_cast<int32_t>(random() % 400) - 100;
      if (round % 2 == 0) std::sort(cu->begin(), cu->end());
    }
    call.run_garbage(in_order().rows());
  }
}

}  // namespace
}  // namespace flash_ext
