// The float64 backward of csrc/kernels/sm80, run on the host by emulator.h: what sums of numbers cannot show, because a
// formula that is right for numbers takes the place of a sum.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/sm80/fp64/backward.cu"
#include "kernels/sm80/fp64/forward.cu"

namespace flash_ext {
namespace {

// A bias of one number a query: the sum of dS over the keys is dlse, here none, unless one of them is no number.
TEST(Fp64Kernels, GradientOfABiasOfRowsShowsNaN) {
  constexpr int kQueries = 5, kKeys = 40, kCols = 8, kBad = 2;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const auto make = [&](int count) {
    std::vector<double> numbers(count);
    for (double& x : numbers) x = normal(random);
    return numbers;
  };
  std::vector<double> q = make(kQueries * kCols), k = make(kKeys * kCols), v = make(kKeys * kCols);
  std::vector<double> d_out = make(kQueries * kCols), bias = make(kQueries), lse(kQueries), dbias(kQueries, -77.0);
  d_out[kBad * kCols + 1] = INFINITY;
  for (int i = 0; i < kQueries; ++i) {
    double sum = 0;
    for (int j = 0; j < kKeys; ++j) {
      double s = bias[i];
      for (int e = 0; e < kCols; ++e) s += q[i * kCols + e] * k[j * kCols + e];
      sum += std::exp(s);
    }
    lse[i] = std::log(sum);
  }
  const auto view = [](std::vector<double>& numbers, int64_t row_stride, int64_t col_stride) {
    TensorView view;
    view.data = numbers.data();
    view.head_stride = static_cast<int64_t>(numbers.size());
    view.row_stride = row_stride;
    view.col_stride = col_stride;
    return view;
  };
  BackwardArgs args;
  Problem& problem = args.fwd.problem;
  problem.dtype = problem.bias_dtype = DType::kFloat64;
  problem.batch = problem.heads_q = problem.heads_k = problem.heads_v = 1;
  problem.len_q = kQueries;
  problem.len_k = kKeys;
  problem.head_dim = problem.head_dim_v = kCols;
  problem.scale = 1.0;
  problem.has_bias = problem.wants_dbias = true;
  args.fwd.q = view(q, kCols, 1);
  args.fwd.k = view(k, kCols, 1);
  args.fwd.v = view(v, kCols, 1);
  args.fwd.bias = view(bias, 1, 0);
  args.fwd.lse = lse.data();
  args.d_out = view(d_out, kCols, 1);
  args.dbias = view(dbias, 1, 0);
  std::vector<double> workspace(sm80::fp64::BackwardScratch(problem, nullptr).bytes / sizeof(double));
  sm80::backward_fp64(args, workspace.data());
  for (int i = 0; i < kQueries; ++i) {
    if (i == kBad) {
      EXPECT_TRUE(std::isnan(dbias[i]));
    } else {
      EXPECT_EQ(dbias[i], 0.0);
    }
  }
}

}  // namespace
}  // namespace flash_ext
