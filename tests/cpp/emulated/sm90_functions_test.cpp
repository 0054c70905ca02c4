// A function of a score in the place of the softcap of sm90's kernels.
#include "attention_call.h"
#include "kernels/sm90/backward_two_pass/run.cuh"
#include "kernels/sm90/forward/run.cuh"
#include "score_functions.h"

namespace flash_ext {
namespace {

template <class Base, class F>
struct CallsFunction : Base {
  using Function = F;
};

template <class T, int kHeadDim, class F>
void check_function(const Case& c) {
  using Forward = sm90::ForwardTraits<T, kHeadDim, sm90::forward_shape(kHeadDim, sm90::Tiles::kScored)>;
  using Backward = sm90::TwoPassTraits<T, kHeadDim, ScoreKind::kScores>;
  const auto forward = [](const ForwardArgs& args, const Plan& plan, void* workspace) {
    sm90::launch_forward<CallsFunction<Forward, F>>(args, plan.chosen<sm90::ForwardLaunch>(), workspace);
  };
  const auto backward = [](const BackwardArgs& args, const Plan& plan, void* workspace) {
    sm90::launch_two_pass<CallsFunction<Backward, F>>(args, plan.chosen<sm90::BackwardLaunch>(), workspace);
  };
  const char* const row =
      kHeadDim <= sm90::kSmallHeadDim ? "sm90.backward.two_pass.small_head_dim" : "sm90.backward.two_pass.scored";
  const Kernel rows[] = {row_with(sm90::kernels(), "sm90.forward.scored", &Kernel::forward, +forward),
                         row_with(sm90::kernels(), row, &Kernel::backward, +backward)};
  Case call = with_function<F>(c);
  call.head_dim = kHeadDim;
  call.mask = true;  // which the row above kSmallHeadDim is for
  check<T>(Rows(rows), call);
}

class Sm90Functions : public testing::TestWithParam<Case> {};

TEST_P(Sm90Functions, OfPlace) { check_function<__nv_bfloat16, 64, PlaceScore>(GetParam()); }
TEST_P(Sm90Functions, Bent) { check_function<__half, 192, BentScore>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm90Functions, testing::ValuesIn(kFunctionCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flash_ext
