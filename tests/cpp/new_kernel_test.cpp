// examples/new_kernel: the row is chosen and refuses like any other, and computes the formula.
#include <gtest/gtest.h>

#include <vector>

#include "../../examples/new_kernel/naive.h"
#include "core/select.h"

namespace flash_ext {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKeyHeads = 2, kQueries = 5, kKeys = 3, kDim = 8, kValueDim = 6;

class NewKernel : public testing::Test {
 protected:
  NewKernel()
      : q_(kBatch * kHeads * kQueries * kDim),
        k_(kBatch * kKeyHeads * kKeys * kDim),
        v_(kBatch * kHeads * kKeys * kValueDim),
        out_(kBatch * kHeads * kQueries * kValueDim, -77.f),
        lse_(kBatch * kHeads * kQueries, -77.f) {
    int number = 0;
    for (std::vector<float>* const tensor : {&q_, &k_, &v_}) {
      for (float& x : *tensor) x = std::sin(static_cast<float>(++number));
    }
    Problem& problem = args_.problem;
    problem.batch_rank = 1;
    problem.batch = problem.batch_size[0] = kBatch;
    problem.heads_q = problem.heads_v = kHeads;
    problem.heads_k = kKeyHeads;
    problem.len_q = kQueries;
    problem.len_k = kKeys;
    problem.head_dim = kDim;
    problem.head_dim_v = kValueDim;
    problem.scale = 0.5;
    problem.causal = problem.bottom_right = true;  // the first two queries see no key
    args_.q = view(q_, kHeads, kQueries, kDim);
    args_.k = view(k_, kKeyHeads, kKeys, kDim);
    args_.v = view(v_, kHeads, kKeys, kValueDim);
    args_.out = view(out_, kHeads, kQueries, kValueDim);
    args_.lse = lse_.data();
  }

  static TensorView view(std::vector<float>& tensor, int64_t heads, int64_t rows, int64_t cols) {
    TensorView view;
    view.data = tensor.data();
    view.batch_stride[0] = heads * rows * cols;
    view.head_stride = rows * cols;
    view.row_stride = cols;
    view.col_stride = 1;
    return view;
  }

  const Kernel* const rows_[1] = {&naive::kForward};
  std::vector<float> q_, k_, v_, out_, lse_;
  ForwardArgs args_;
  DeviceInfo device_;
};

TEST_F(NewKernel, ComputesTheFormula) {
  const Kernel* const kernel = select_forward(rows_, args_, device_, "");
  ASSERT_EQ(kernel, &naive::kForward);
  const Plan plan = kernel->plan(args_.problem, device_);
  std::vector<float> workspace(plan.scratch_bytes / 4);
  kernel->forward(args_, plan, workspace.data());
  for (int64_t bh = 0; bh < kBatch * kHeads; ++bh) {
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t seen = i + kKeys - kQueries + 1;
      double sum = 0, expected[kValueDim] = {};
      for (int64_t j = 0; j < seen; ++j) {
        double s = 0;
        for (int64_t c = 0; c < kDim; ++c) {
          s += double{q_[(bh * kQueries + i) * kDim + c]} * k_[(bh / 2 * kKeys + j) * kDim + c];
        }
        const double p = std::exp(0.5 * s);
        sum += p;
        for (int64_t c = 0; c < kValueDim; ++c) expected[c] += p * v_[(bh * kKeys + j) * kValueDim + c];
      }
      for (int64_t c = 0; c < kValueDim; ++c) {
        EXPECT_NEAR(out_[(bh * kQueries + i) * kValueDim + c], seen > 0 ? expected[c] / sum : 0.0, 1e-6);
      }
      if (seen > 0) {
        EXPECT_NEAR(lse_[bh * kQueries + i], std::log(sum), 1e-6);
      } else {
        EXPECT_EQ(lse_[bh * kQueries + i], -INFINITY);
      }
    }
  }
}

TEST_F(NewKernel, RefusesWhatItsRowDoesNotSay) {
  args_.problem.has_mask = true;
  args_.problem.dropout_p = 0.1;
  EXPECT_EQ(select_forward(rows_, args_, device_, ""), nullptr);
  EXPECT_EQ(consider(rows_, Pass::kForward, {args_}, device_)[0].reason, "no support for a mask and dropout");
}

}  // namespace
}  // namespace flash_ext
