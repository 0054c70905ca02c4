// The host side of the gradient of a bias: which tiles, the order of items, the launches. Called by backward/run.cuh.
#pragma once

#include "core/plan_bias_gradient.h"
#include "gpu/host/launch.h"
#include "kernels/sm80/bias_gradient/kernel.cuh"
#include "kernels/stages/rows.h"

namespace flash_ext::sm80 {

template <class Element, int kHeadDim>
void run_bias_gradient(const BackwardArgs& args, const BackwardScratch& scratch, int64_t shared_limit, bool narrow) {
  const Problem& problem = args.fwd.problem;
  const auto bytes = [&]<class Traits>(Traits) -> int64_t {
    constexpr TileShape kTile = Traits::kTile;
    return bias_gradient_smem(kTile, kHeadDim, sizeof(typename Traits::T), bias_bytes_of(problem), problem.has_mask)
        .total;
  };
  const auto run = [&]<class Traits>(Traits traits) {
    constexpr TileShape kTile = Traits::kTile;
    int device = 0, multiprocessors = 0;
    cuda::check(cudaGetDevice(&device), "device");
    cuda::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
    BiasGradientPlan plan = make_bias_gradient_plan(problem, args.dbias, kTile.block_m, kTile.block_n,
                                                    int64_t{multiprocessors} * Traits::kBlocksPerSm);
    if (plan.parts > 1) plan.partial = scratch.bias_partial;
    cuda::launch(bias_gradient_kernel<Traits>, cuda::grid_of(plan.blocks()), Traits::kThreads, bytes(traits),
                 args.fwd.stream, args, scratch.delta, scratch.d_lse, scratch.inverse, plan,
                 features_of(args.fwd) | (narrow && plan.parts == 1 ? kNarrowDbias : 0u));
    if (plan.parts > 1) {
      cuda::sum_parts(args.dbias.data, narrow ? problem.dtype : DType::kFloat32, scratch.bias_partial,
                      plan.part_elements, plan.parts, args.fwd.stream);
    }
  };
  using Large = BiasGradientTraits<Element, kHeadDim, false>;
  using Small = BiasGradientTraits<Element, kHeadDim, true>;
  constexpr int kStatic = 1024;  // at most, beside the layout
  const bool covers = problem.len_q <= Small::kBlockM || problem.len_k <= Small::kBlockN;
  if (covers || bytes(Large()) + kStatic > shared_limit) {
    run(Small());
  } else {
    run(Large());
  }
}

}  // namespace flash_ext::sm80
