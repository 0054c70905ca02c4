// A function of a score in the place of the softcap of sm80's kernels.
#include "attention_call.h"
#include "kernels/sm80/backward/run.cuh"
#include "kernels/sm80/forward/run.cuh"
#include "score_functions.h"

namespace flash_ext {
namespace {

template <class Base, class F>
struct WithFunction : Base {
  using Mods = typename Base::Mods::template With<F>;
};

template <class Element, class F>
void check_function(const Case& c) {
  const auto forward = [](const ForwardArgs& args, const Plan& plan, void* workspace) {
    sm80::launch_forward<WithFunction<sm80::ForwardTraits<Element, 64, false, false>, F>>(
        args, plan.chosen<sm80::ForwardChoice>(), workspace);
  };
  const auto backward = [](const BackwardArgs& args, const Plan& plan, void* workspace) {
    sm80::launch_backward<WithFunction<sm80::BackwardTraits<Element, 64, false, ScoreKind::kAny>, F>>(
        args, plan.chosen<sm80::BackwardChoice>(), workspace);
  };
  const Kernel rows[] = {row_with(sm80::kernels(), "sm80.forward", &Kernel::forward, +forward),
                         row_with(sm80::kernels(), "sm80.backward", &Kernel::backward, +backward)};
  check<StorageOf<Element>>(Rows(rows), with_function<F>(c));
}

class Sm80Functions : public testing::TestWithParam<Case> {};

TEST_P(Sm80Functions, OfPlace) { check_function<Bf16, PlaceScore>(GetParam()); }
TEST_P(Sm80Functions, Bent) { check_function<Fp16, BentScore>(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Sm80Functions, testing::ValuesIn(kFunctionCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flash_ext
