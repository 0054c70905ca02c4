// From the types of kernels.h to those of the kernels: parameters, tensor maps, which of the shapes of a head
// dimension is launched, and combine behind it.
// Called by backend.cpp through kernels.h; instantiated by generated units (fwd.cu.in).
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/args.h"
#include "cuda/combine.h"
#include "cuda/launch.h"
#include "sm90/fwd.cuh"
#include "sm90/kernels.h"

namespace flash_ext::sm90 {

// NOTE: a memset is a kernel of its own, whose end the next one waits for; behind this one it begins at once.
static __global__ void clear_kernel(uint32_t* counter) {
  cudaTriggerProgrammaticLaunchCompletion();
  *counter = 0;
}

constexpr double kLog2e = 1.4426950408889634;

// element: bytes; zero strides where a dimension has one index, whatever stood there.
inline ScoreView make_score_view(const Problem& problem, const TensorView& view, int element) {
  const auto batch = [&](int from_last) {
    const int dim = problem.batch_rank - 1 - from_last;
    return dim >= 0 && problem.batch_size[dim] > 1 ? view.batch_stride[dim] * element : 0;
  };
  return {static_cast<const char*>(view.data),
          view.col_stride * element,
          problem.len_q > 1 ? view.row_stride * element : 0,
          problem.heads_q > 1 ? view.head_stride * element : 0,
          batch(0),
          batch(1),
          reads_chunks(problem, view, element)};
}

inline ScoreParams make_scores(const ForwardArgs& args, ForwardShape shape, int head_dim) {
  const Problem& problem = args.problem;
  const ForwardSmem smem = forward_smem(shape, head_dim);
  ScoreParams scores = {};
  const auto tile = [&](const ScoreView& view, int element) {
    return (view.row == 0 ? 1 : shape.block_m()) * score_pitch(shape.block_n, element);
  };
  scores.scale = static_cast<float>(problem.scale);
  scores.bias_is_float = problem.bias_dtype == DType::kFloat32;
  if (problem.has_bias) {
    const int element = scores.bias_is_float ? 4 : 2;
    scores.bias = make_score_view(problem, args.bias, element);
    scores.mask_at = tile(scores.bias, element);
  }
  scores.stage_bytes = scores.mask_at;
  if (problem.has_mask) {
    scores.mask = make_score_view(problem, args.mask, 1);
    scores.stage_bytes += tile(scores.mask, 1);
  }
  scores.stages = std::min(kScoreStages, (smem.works - smem.scores) / scores.stage_bytes);
  return scores;
}

// workspace: the counter where the order is counted, the parts where keys are split.
template <class Traits>
void launch_forward(const ForwardArgs& args, const ForwardLaunch& how, void* workspace) {
  constexpr int kFar = 1 << 30;  // lengths from here on are refused
  const Problem& problem = args.problem;
  const Band band = make_band(problem);
  const auto clamp = [](int64_t x) { return static_cast<int>(std::clamp<int64_t>(x, -kFar, kFar)); };
  const ForwardOrder order = how.tiles == Tiles::kSplit ? split_order(problem, Traits::kBlockM, how.splits, how.grid)
                                                        : forward_order(problem, Traits::kBlockM, how.grid);
  typename Traits::Params params;
  const auto map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols, int box_rows) {
    return make_tensor_map(problem, view, heads, rows, cols, box_rows, Promotion::k128);
  };
  params.q = map(args.q, problem.heads_q, problem.len_q, problem.head_dim, 64);
  params.k = map(args.k, problem.heads_k, problem.len_k, problem.head_dim, Traits::kBlockN);
  params.v = map(args.v, problem.heads_v, problem.len_k, problem.head_dim_v, Traits::kBlockN);
  params.out = map(args.out, problem.heads_q, problem.len_q, problem.head_dim_v, 16);
  params.out_view = make_out_view(problem, args.out);
  params.schedule = order.schedule;
  params.band = {clamp(band.lower), clamp(band.upper), static_cast<int>(problem.len_k)};
  params.tiles = cuda::grid_of(order.schedule.size() * std::max(how.splits.count, 1)).x;
  params.len_q = static_cast<int>(problem.len_q);
  params.group_k = static_cast<int>(problem.heads_q / problem.heads_k);
  params.group_v = static_cast<int>(problem.heads_q / problem.heads_v);
  params.heads_q = static_cast<int>(problem.heads_q);
  params.inner_batch = problem.batch_rank > 0 ? static_cast<int>(problem.batch_size[problem.batch_rank - 1]) : 1;
  params.scale = static_cast<float>(problem.scale);
  params.to_log2 = static_cast<float>(problem.scale * kLog2e);
  params.lse = static_cast<float*>(args.lse);
  if constexpr (Traits::kScored) {
    params.schedule.batch_inner = batch_shares_scores(problem, args);
    params.scores = make_scores(args, Traits::kShape, Traits::kHeadDim);
    if (problem.has_bias) {  // scores are in natural units then
      params.scale = 1.f;
      params.to_log2 = kLog2e;
    }
  }
  params.counter = order.counted ? static_cast<uint32_t*>(workspace) : nullptr;
  params.parts = {};
  params.parts.splits = how.splits;
  if (how.splits.count > 1) {
    params.parts.rows = problem.batch * problem.heads_q * problem.len_q;
    params.parts.cols = static_cast<int>(problem.head_dim_v);
    params.parts.out = static_cast<float*>(workspace);
    params.parts.lse = params.parts.out + how.splits.count * part_elements(problem);
  }
  const auto launch = [&](const auto& how_to) {
    how_to(forward_kernel<Traits>, cuda::grid_of(order.grid), Traits::kShape.threads(), Traits::kSmem.total,
           args.stream, params);
  };
  if (!order.counted) return launch([](const auto&... x) { cuda::launch(x...); });
  cuda::launch(clear_kernel, dim3(1), 1, 0, args.stream, params.counter);
  launch([](const auto&... x) { cuda::launch_dependent(x...); });
}

template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, const ForwardLaunch& how, void* workspace) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  constexpr ForwardShape kFew = forward_shape(kHeadDim, Tiles::kFew), kMany = forward_shape(kHeadDim, Tiles::kMany),
                         kSplit = forward_shape(kHeadDim, Tiles::kSplit);
  if (how.tiles == Tiles::kScored) {
    return launch_forward<ForwardTraits<T, kHeadDim, forward_shape(kHeadDim, Tiles::kScored)>>(args, how, workspace);
  }
  if (how.tiles == Tiles::kSplit) {
    launch_forward<ForwardTraits<T, kHeadDim, kSplit>>(args, how, workspace);
    if (how.splits.count > 1) {
      const auto* const out = static_cast<const float*>(workspace);
      cuda::combine(args, out, out + how.splits.count * part_elements(args.problem), how.splits.count);
    }
    return;
  }
  if constexpr (kFew != kMany) {
    if (how.tiles == Tiles::kFew) return launch_forward<ForwardTraits<T, kHeadDim, kFew>>(args, how, workspace);
  }
  launch_forward<ForwardTraits<T, kHeadDim, kMany>>(args, how, workspace);
}

}  // namespace flash_ext::sm90
