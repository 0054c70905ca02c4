// From the types of kernels.h to those of the backward's kernels, as forward/run.cuh does for the forward.
// Called by rows.cpp through kernels.h; instantiated by generated units (bwd.cu.in). Invariant: the scratch that is
// asked for is the one that launch_backward and launch_two_pass use.
#pragma once

#include <type_traits>

#include "kernels/sm90/backward/run.cuh"
#include "kernels/sm90/backward_two_pass/run.cuh"
#include "kernels/sm90/config.h"
#include "kernels/sm90/kernels.h"

namespace flash_ext::sm90 {

template <DType kDType>
using BackwardElement = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;

template <DType kDType, int kHeadDim>
int64_t backward_scratch_bytes(const Problem& problem, bool two_pass) {
  if (two_pass) return two_pass_scratch_bytes(problem);
  if constexpr (kHeadDim <= kNarrow) {
    using T = BackwardElement<kDType>;
    if (is_scored(added_of(problem))) {
      return backward_scratch<BackwardTraits<T, kHeadDim, Walk::kEvery, Added::kScores>>(problem, nullptr).bytes;
    }
    return backward_scratch<BackwardTraits<T, kHeadDim>>(problem, nullptr).bytes;
  }
  return 0;
}

template <DType kDType, int kHeadDim>
void run_two_pass(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  using T = BackwardElement<kDType>;
  const Added added = two_pass_added(args.fwd.problem, kHeadDim);
  if (added == Added::kNothing) {
    return launch_two_pass<TwoPassTraits<T, kHeadDim, Added::kNothing>>(args, how.processors, workspace);
  }
  if constexpr (kHeadDim > kNarrow) {
    if (added == Added::kCap) {
      return launch_two_pass<TwoPassTraits<T, kHeadDim, Added::kCap>>(args, how.processors, workspace);
    }
  }
  if constexpr (kHeadDim <= kMostScores) {  // rows.cpp refuses scores above
    launch_two_pass<TwoPassTraits<T, kHeadDim, Added::kScores>>(args, how.processors, workspace);
  }
}

template <DType kDType, int kHeadDim>
void run_backward(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  using T = BackwardElement<kDType>;
  if (how.two_pass) return run_two_pass<kDType, kHeadDim>(args, how, workspace);
  if constexpr (kHeadDim <= kNarrow) {
    static_assert(backward_smem(backward_shape(kHeadDim), kHeadDim, kPackedKeyWorkBytes).total <= kSharedMemoryLimit);
    const Added added = added_of(args.fwd.problem);
    const auto launch_packed = [&]<Added kAdded>(std::integral_constant<Added, kAdded>) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kOne, kAdded, true>>(args, how, workspace);
    };
    if (args.fwd.problem.packed) {
      if (is_ordered(args.fwd.problem)) {
        return launch_backward<BackwardTraits<T, kHeadDim, Walk::kOrdered, Added::kNothing, true>>(args, how,
                                                                                                   workspace);
      }
      if (added == Added::kDrops) return launch_packed(std::integral_constant<Added, Added::kDrops>());
      if (added == Added::kScores) return launch_packed(std::integral_constant<Added, Added::kScores>());
      return launch_packed(std::integral_constant<Added, Added::kNothing>());
    }
    if (added == Added::kDrops) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kEvery, Added::kDrops>>(args, how, workspace);
    } else if (added == Added::kCap) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kEvery, Added::kCap>>(args, how, workspace);
    } else if (added == Added::kScores) {
      if constexpr (kHeadDim <= kMostStoredScores) {
        if (is_dq_stored(args.fwd.problem)) {
          return launch_backward<BackwardTraits<T, kHeadDim, Walk::kStored, Added::kScores>>(args, how, workspace);
        }
      }
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kEvery, Added::kScores>>(args, how, workspace);
    } else if (is_dq_stored(args.fwd.problem)) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kStored>>(args, how, workspace);
    } else if (is_ordered(args.fwd.problem)) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kOrdered>>(args, how, workspace);
    } else if (is_backward_persistent(args.fwd.problem, how.processors)) {
      launch_backward<BackwardTraits<T, kHeadDim, Walk::kEvery>>(args, how, workspace);
    } else {
      launch_backward<BackwardTraits<T, kHeadDim>>(args, how, workspace);
    }
  }
}

}  // namespace flash_ext::sm90
