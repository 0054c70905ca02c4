// From the types of kernels.h to those of the backward's kernels, as forward/run.cuh does for the forward.
// Called by rows.cpp through kernels.h; instantiated by generated units (unit.cu.in). Invariant: the scratch that is
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
  if constexpr (kHeadDim <= kSmallHeadDim) {
    using T = BackwardElement<kDType>;
    if (is_scored(score_kind_of(problem))) {
      return backward_scratch<BackwardTraits<T, kHeadDim, Persistence::kEvery, ScoreKind::kScores>>(problem, nullptr)
          .bytes;
    }
    return backward_scratch<BackwardTraits<T, kHeadDim>>(problem, nullptr).bytes;
  }
  return 0;
}

template <DType kDType, int kHeadDim>
void run_two_pass(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  using T = BackwardElement<kDType>;
  const ScoreKind kind = two_pass_score_kind(args.fwd.problem, kHeadDim);
  if constexpr (kHeadDim == 192) {
    if (is_two_pass_narrow(args.fwd.problem, kHeadDim)) {
      return launch_two_pass<TwoPassTraits<T, kHeadDim, ScoreKind::kNone, true>>(args, how, workspace);
    }
  }
  if (kind == ScoreKind::kNone) {
    return launch_two_pass<TwoPassTraits<T, kHeadDim, ScoreKind::kNone>>(args, how, workspace);
  }
  if constexpr (kHeadDim > kSmallHeadDim && kHeadDim <= kMostSoftcap) {
    if (kind == ScoreKind::kSoftcap) {
      return launch_two_pass<TwoPassTraits<T, kHeadDim, ScoreKind::kSoftcap>>(args, how, workspace);
    }
  }
  launch_two_pass<TwoPassTraits<T, kHeadDim, ScoreKind::kScores>>(args, how, workspace);
}

template <DType kDType, int kHeadDim>
void run_backward(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  using T = BackwardElement<kDType>;
  if (how.two_pass) return run_two_pass<kDType, kHeadDim>(args, how, workspace);
  if constexpr (kHeadDim <= kSmallHeadDim) {
    static_assert(backward_smem(backward_shape(kHeadDim), kHeadDim, kPackedKeyWorkBytes).total <= kSharedMemoryLimit);
    const ScoreKind kind = score_kind_of(args.fwd.problem);
    const auto launch_packed = [&]<ScoreKind kScoreKind>(std::integral_constant<ScoreKind, kScoreKind>) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kOne, kScoreKind, true>>(args, how, workspace);
    };
    if (args.fwd.problem.packed) {
      if (is_ordered(args.fwd.problem)) {
        return launch_backward<BackwardTraits<T, kHeadDim, Persistence::kOrdered, ScoreKind::kNone, true>>(args, how,
                                                                                                           workspace);
      }
      if (kind == ScoreKind::kDropout) return launch_packed(std::integral_constant<ScoreKind, ScoreKind::kDropout>());
      if (kind == ScoreKind::kScores) return launch_packed(std::integral_constant<ScoreKind, ScoreKind::kScores>());
      return launch_packed(std::integral_constant<ScoreKind, ScoreKind::kNone>());
    }
    if (kind == ScoreKind::kDropout) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kEvery, ScoreKind::kDropout>>(args, how, workspace);
    } else if (kind == ScoreKind::kSoftcap) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kEvery, ScoreKind::kSoftcap>>(args, how, workspace);
    } else if (kind == ScoreKind::kScores) {
      if (how.finds_ranges && !is_dq_stored(args.fwd.problem)) {
        return launch_backward<BackwardTraits<T, kHeadDim, Persistence::kRanged, ScoreKind::kScores>>(args, how,
                                                                                                      workspace);
      }
      if constexpr (kHeadDim <= kMostStoredScores) {
        if (is_dq_stored(args.fwd.problem)) {
          return launch_backward<BackwardTraits<T, kHeadDim, Persistence::kStored, ScoreKind::kScores>>(args, how,
                                                                                                        workspace);
        }
      }
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kEvery, ScoreKind::kScores>>(args, how, workspace);
    } else if (is_dq_stored(args.fwd.problem)) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kStored>>(args, how, workspace);
    } else if (is_ordered(args.fwd.problem)) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kOrdered>>(args, how, workspace);
    } else if (is_backward_persistent(args.fwd.problem, how.sms)) {
      launch_backward<BackwardTraits<T, kHeadDim, Persistence::kEvery>>(args, how, workspace);
    } else {
      launch_backward<BackwardTraits<T, kHeadDim>>(args, how, workspace);
    }
  }
}

}  // namespace flash_ext::sm90
