// From the types of kernels.h to those of the kernels: parameters, tensor maps, which of the two shapes of a head
// dimension is launched.
// Called by backend.cpp through kernels.h; instantiated by generated units (fwd.cu.in).
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/args.h"
#include "cuda/launch.h"
#include "sm90/fwd.cuh"
#include "sm90/kernels.h"

namespace flash_ext::sm90 {

// grid: forward_order's, blocks of which all run at once. counter: kCounterBytes where the order is counted.
template <class Traits>
void launch_forward(const ForwardArgs& args, int grid, void* counter) {
  constexpr int kFar = 1 << 30;  // lengths from here on are refused
  const Problem& problem = args.problem;
  const Band band = make_band(problem);
  const auto clamp = [](int64_t x) { return static_cast<int>(std::clamp<int64_t>(x, -kFar, kFar)); };
  const ForwardOrder order = forward_order(problem, Traits::kBlockM, grid);
  ForwardParams params;
  params.q = make_tensor_map(problem, args.q, problem.heads_q, problem.len_q, problem.head_dim, 64);
  params.k = make_tensor_map(problem, args.k, problem.heads_k, problem.len_k, problem.head_dim, Traits::kBlockN);
  params.v = make_tensor_map(problem, args.v, problem.heads_v, problem.len_k, problem.head_dim_v, Traits::kBlockN);
  params.out = make_tensor_map(problem, args.out, problem.heads_q, problem.len_q, problem.head_dim_v, 16);
  params.out_view = make_out_view(problem, args.out);
  params.schedule = order.schedule;
  params.band = {clamp(band.lower), clamp(band.upper), static_cast<int>(problem.len_k)};
  params.tiles = cuda::grid_of(order.schedule.size()).x;
  params.len_q = static_cast<int>(problem.len_q);
  params.group_k = static_cast<int>(problem.heads_q / problem.heads_k);
  params.group_v = static_cast<int>(problem.heads_q / problem.heads_v);
  params.heads_q = static_cast<int>(problem.heads_q);
  params.inner_batch = problem.batch_rank > 0 ? static_cast<int>(problem.batch_size[problem.batch_rank - 1]) : 1;
  params.scale = static_cast<float>(problem.scale);
  params.to_log2 = static_cast<float>(problem.scale * 1.4426950408889634);
  params.lse = static_cast<float*>(args.lse);
  params.counter = order.counted ? static_cast<uint32_t*>(counter) : nullptr;
  if (order.counted) {
    cuda::check(cudaMemsetAsync(counter, 0, sizeof(uint32_t), static_cast<cudaStream_t>(args.stream)), "memset");
  }
  cuda::launch(forward_kernel<Traits>, cuda::grid_of(order.grid), Traits::kShape.threads(), Traits::kSmem.total,
               args.stream, params);
}

template <DType kDType, int kHeadDim>
void run_forward(const ForwardArgs& args, int grid, void* counter) {
  using T = std::conditional_t<kDType == DType::kFloat16, __half, __nv_bfloat16>;
  constexpr ForwardShape kFew = forward_shape(kHeadDim, true), kMany = forward_shape(kHeadDim, false);
  if constexpr (kFew != kMany) {
    if (has_few_keys(args.problem, kHeadDim))
      return launch_forward<ForwardTraits<T, kHeadDim, kFew>>(args, grid, counter);
  }
  launch_forward<ForwardTraits<T, kHeadDim, kMany>>(args, grid, counter);
}

}  // namespace flash_ext::sm90
