// core/select.h: who runs a call is the cheapest row that accepts it, and what refuses says all that is missing.
#include "core/select.h"

#include <gtest/gtest.h>

namespace flash_ext {
namespace {

constexpr Features kBFloat16 = {Feature::kBFloat16};
double cheap(const Problem&, const DeviceInfo&) { return 1; }
double dear(const Problem&, const DeviceInfo&) { return 2; }
double dearest(const Problem&, const DeviceInfo&) { return 5; }

Kernel row(const char* name, const char* backend, Pass pass, Features supports,
           double (*cost)(const Problem&, const DeviceInfo&)) {
  return {
      .name = name, .backend = backend, .device = DeviceType::kCuda, .pass = pass, .supports = supports, .cost = cost};
}

class Select : public testing::Test {
 protected:
  Select() {
    device_ = {DeviceType::kCuda, 90, 132, 232448, 233472};
    Problem& problem = args_.fwd.problem;
    problem.dtype = problem.bias_dtype = DType::kBFloat16;
    problem.len_q = problem.len_k = 1000;
    problem.head_dim = problem.head_dim_v = 64;
    problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  }

  Table table(std::vector<Kernel> rows) {
    rows_ = std::move(rows);
    table_.clear();
    for (const Kernel& kernel : rows_) table_.push_back(&kernel);
    return table_;
  }
  std::string forward(Table table, const char* name = "") {
    const Kernel* const kernel = select_forward(table, args_.fwd, device_, name);
    return kernel == nullptr ? "" : kernel->name;
  }
  std::string backward(Table table, const char* name = "") {
    const Stages stages = select_backward(table, args_, device_, name);
    std::string names;
    for (int i = 0; i < stages.size(); ++i) names += (i > 0 ? ", " : "") + std::string(stages[i].name);
    return names;
  }
  std::string reason(Kernel kernel) {
    const Asked asked = kernel.pass == Pass::kForward ? Asked{args_.fwd} : Asked{args_.fwd, &args_};
    const Kernel* const one = &kernel;
    return consider({&one, 1}, kernel.pass, asked, device_)[0].reason;
  }
  Problem& problem() { return args_.fwd.problem; }

  BackwardArgs args_;
  DeviceInfo device_;

 private:
  std::vector<Kernel> rows_;
  std::vector<const Kernel*> table_;
};

TEST_F(Select, TheCheapestThatAcceptsRuns) {
  const Table rows = table({row("a.forward", "a", Pass::kForward, kBFloat16, dear),
                            row("b.forward", "b", Pass::kForward, kBFloat16, cheap),
                            row("c.forward", "c", Pass::kForward, kAllFeatures, dearest)});
  EXPECT_EQ(forward(rows), "b.forward");
  problem().has_mask = true;
  EXPECT_EQ(forward(rows), "c.forward");
  problem().has_mask = false;
  problem().dtype = DType::kFloat64;
  EXPECT_EQ(forward(rows), "c.forward");
}

TEST_F(Select, OfEqualOnesTheFirst) {
  EXPECT_EQ(forward(table({row("a.forward", "a", Pass::kForward, kBFloat16, dear),
                           row("b.forward", "b", Pass::kForward, kBFloat16, dear)})),
            "a.forward");
}

TEST_F(Select, ANameIsABackendsOrAKernels) {
  const Table rows = table({row("a.forward", "a", Pass::kForward, kBFloat16, cheap),
                            row("b.forward", "b", Pass::kForward, kBFloat16, dear),
                            row("b.forward.other", "b", Pass::kForward, kAllFeatures, dearest),
                            row("b.backward", "b", Pass::kBackward, kBFloat16, dear)});
  EXPECT_EQ(forward(rows, "b"), "b.forward");
  EXPECT_EQ(forward(rows, "b.forward.other"), "b.forward.other");
  EXPECT_EQ(forward(rows, "b.backward"), "b.forward");  // of the same backend, in the pass that the name does not mean
  EXPECT_EQ(backward(rows, "b.forward.other"), "b.backward");
  EXPECT_EQ(backward(rows, "a"), "");
}

TEST_F(Select, TheGradientOfABiasMayBeAnothers) {
  const Features with_bias = {Feature::kBFloat16, Feature::kBias};
  const Features apart = {Feature::kBFloat16, Feature::kBias, Feature::kBiasGradient};
  const Table rows = table({row("a.backward", "a", Pass::kBackward, with_bias, cheap),
                            row("b.backward", "b", Pass::kBackward, kAllFeatures, dearest),
                            row("b.bias_gradient", "b", Pass::kBiasGradient, apart, dear)});
  problem().has_bias = true;
  EXPECT_EQ(backward(rows), "a.backward");
  problem().wants_dbias = true;
  EXPECT_EQ(backward(rows), "a.backward, b.bias_gradient");  // 1 + 2 < 5
  EXPECT_EQ(backward(rows, "a"), "a.backward, b.bias_gradient");
  EXPECT_EQ(backward(rows, "b"), "b.backward");
  problem().whole_dbias = true;
  EXPECT_EQ(backward(rows), "b.backward");
  problem().whole_dbias = false;
  problem().wants_dq = problem().wants_dk = problem().wants_dv = false;
  EXPECT_EQ(backward(rows), "b.backward");  // alone, it is the main kernel's
  const auto considered = consider(rows, Pass::kBackward, {args_.fwd, &args_}, device_);
  const Considered* const refused = nearest(rows, Pass::kBackward, "a", considered);
  ASSERT_NE(refused, nullptr);
  EXPECT_EQ(refused->reason.find("no support for the gradient of a bias, "), 0U) << refused->reason;
}

TEST_F(Select, TheArgumentsOfAStage) {
  problem().has_bias = problem().wants_dbias = problem().whole_dbias = true;
  args_.dbias.data = args_.dq.data = &args_;
  args_.dq.row_stride = 5;
  args_.dk.head_stride = 7;
  args_.dbias.row_stride = 9;
  const Kernel whole = row("a.backward", "a", Pass::kBackward, kBFloat16, cheap);
  const Kernel of_bias = row("b.bias_gradient", "b", Pass::kBiasGradient, kBFloat16, cheap);
  const auto part = [&](const Stages& stages, int stage) {
    BackwardArgs args = args_;
    stages.narrow(stage, args);
    return args;
  };
  EXPECT_TRUE(Stages(nullptr).empty());
  EXPECT_TRUE(part(Stages(&whole), 0).dbias);
  const Stages stages(&whole, &of_bias);
  const BackwardArgs main = part(stages, 0), apart = part(stages, 1);
  EXPECT_TRUE(main.dq && !main.dbias && main.fwd.problem.wants_dq && !main.fwd.problem.wants_dbias);
  EXPECT_FALSE(main.fwd.problem.whole_dbias);
  EXPECT_EQ(main.dq.row_stride, 5);
  EXPECT_EQ(main.dk.head_stride, 7);
  EXPECT_EQ(apart.dbias.row_stride, 9);
  EXPECT_TRUE(!apart.dq && apart.dbias && !apart.fwd.problem.wants_dq && apart.fwd.problem.wants_dbias);
}

TEST_F(Select, ReasonsAreSentencesOfWhatIsMissing) {
  Kernel kernel = row("a.backward", "a", Pass::kBackward, kBFloat16, cheap);
  EXPECT_EQ(reason(kernel), "");
  problem().has_mask = problem().deterministic = problem().has_alibi = true;
  EXPECT_EQ(reason(kernel), "no support for a mask, alibi_slopes and deterministic results");
  problem().has_mask = problem().deterministic = false;
  problem().wants_dk = false;
  EXPECT_EQ(reason(kernel), "no support for alibi_slopes and a backward without the gradient of key");
  problem().wants_dk = true;
  problem().has_alibi = false;
  kernel.serves_only = {Feature::kMask, Feature::kDropout};
  EXPECT_EQ(reason(kernel), "made for calls with a mask or dropout");
  kernel.device = DeviceType::kCpu;
  EXPECT_EQ(reason(kernel), "the tensors are not on the CPU");
  problem().batch_rank = 5;
  kernel.device = DeviceType::kCuda;
  EXPECT_EQ(reason(kernel), "the leading dimensions do not merge into 4");
  problem().batch_rank = 0;
  problem().head_dim_v = 0;
  EXPECT_EQ(reason(kernel), "head_dim_v is 0");
}

TEST_F(Select, LimitsAreSentencesOfWhatWasSeen) {
  Kernel kernel = row("a.forward", "a", Pass::kForward, kAllFeatures, cheap);
  const auto check = [&](const auto& limit, const auto& change, const char* expected) {
    const Kernel before = kernel;
    const Problem whole = problem();
    const DeviceInfo card = device_;
    limit(kernel.limits);
    EXPECT_EQ(reason(kernel), "") << expected;
    change();
    EXPECT_EQ(reason(kernel), expected);
    kernel = before;
    problem() = whole;
    device_ = card;
  };
  check([](Limits& l) { l.least_compute_capability = l.compute_capability = 90; },
        [&] { device_.compute_capability = 86; }, "compute capability 8.6 is less than 9.0");
  check([](Limits& l) { l.compute_capability = 90; }, [&] { device_.compute_capability = 120; },
        "compute capability 12.0 is more than 9.0");
  check([](Limits& l) { l.head_dim = 64; }, [&] { problem().head_dim_v = 65; }, "head_dim_v 65 is more than 64");
  check([](Limits& l) { l.least_head_dim = 64; }, [&] { problem().head_dim = problem().head_dim_v = 63; },
        "head_dim 63 is less than 64");
  check([](Limits& l) { l.head_dim_multiple = 8; }, [&] { problem().head_dim = problem().head_dim_v = 60; },
        "head_dim 60 is not a multiple of 8");
  check([](Limits& l) { l.length = int64_t{1} << 30; }, [&] { problem().len_k = (int64_t{1} << 30) + 1; },
        "len_k 1073741825 is more than 1073741824");
  check([](Limits& l) { l.least_length = 65; }, [&] { problem().len_q = problem().len_k = 64; },
        "len_q 64 is less than 65");
  check([](Limits& l) { l.least_keys = 16; }, [&] { problem().len_k = 15; },
        "all queries together see 15 keys, fewer than 16");
  check([](Limits& l) { l.softcap = 4096; }, [&] { problem().softcap = 4096.5; }, "softcap 4096.5 is more than 4096");
  check([](Limits& l) { l.dropout_p = 0.75; }, [&] { problem().dropout_p = 1; }, "dropout_p 1 is more than 0.75");
  check([](Limits& l) { l.least_scale = 1e-30; }, [&] { problem().scale = -2; }, "scale -2 is less than 1e-30");
  kernel.shared_bytes = [](const Problem& asked, const DeviceInfo&) { return asked.len_k * 1000; };
  EXPECT_EQ(reason(kernel), "a block needs 1,000,000 bytes of shared memory, the device has 232,448");
  kernel.shared_bytes = nullptr;
  kernel.refuses_views = [](const ForwardArgs&, const BackwardArgs*) { return std::string("query is odd"); };
  EXPECT_EQ(reason(kernel), "query is odd");
}

TEST_F(Select, TheNearestOfThoseThatRefuse) {
  const Features masks = {Feature::kBFloat16, Feature::kMask};
  const Table rows = table({row("a.backward", "a", Pass::kBackward, kBFloat16, cheap),
                            row("a.backward.masks", "a", Pass::kBackward, masks, cheap),
                            row("b.backward", "b", Pass::kBackward, kAllFeatures, dear)});
  problem().has_mask = problem().deterministic = true;
  const std::vector<Considered> considered = consider(rows, Pass::kBackward, {args_.fwd, &args_}, device_);
  const Considered* const nearest_row = nearest(rows, Pass::kBackward, "a", considered);
  ASSERT_NE(nearest_row, nullptr);
  EXPECT_STREQ(nearest_row->kernel->name, "a.backward.masks");
  EXPECT_EQ(nearest_row->reason, "no support for deterministic results");
  EXPECT_EQ(nearest(rows, Pass::kBackward, "b", considered), nullptr);
  EXPECT_EQ(nearest(rows, Pass::kBackward, "", considered), nullptr);
  EXPECT_EQ(considered[2].cost, 2);
}

}  // namespace
}  // namespace flash_ext
