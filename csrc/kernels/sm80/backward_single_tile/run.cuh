// The host side of kernel.cuh. Called by rows.cpp through kernels.h; instantiated by generated units
// (backward/unit.cu.in).
#pragma once

#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "kernels/sm80/backward_single_tile/kernel.cuh"
#include "kernels/sm80/one_tile_order.h"
#include "kernels/stages/rows.h"

namespace flash_ext::sm80 {

template <class Element, int kHeadDim, int kBlock>
Plan plan_one_tile_backward(const Problem& problem, const DeviceInfo& device) {
  using Traits = OneTileTraits<Element, kHeadDim, kBlock>;
  constexpr int kOperand = 2 * Traits::Tile::bytes(kBlock);
  const OneTileBackwardSmem smem = one_tile_backward_smem(kHeadDim, kBlock, bias_bytes_of(problem), problem.has_mask);
  Plan plan;
  plan.kernel = kBlock == kOneTile ? "sm80.backward.one_tile" : "sm80.backward.one_tile_144";
  plan.block_m = plan.block_n = kBlock;
  plan.stages = 2;
  for (const char* operand : {"q", "k", "v", "d_out"}) plan.use(operand, kOperand);
  plan.use("p and ds", smem.items - smem.p);
  plan.use("items", smem.bias - smem.items);
  plan.use("bias", smem.mask - smem.bias);
  plan.use("mask", smem.total - smem.mask);
  plan.on_chip_limit = device.shared_memory_per_block;
  plan.grid = problem.batch * problem.heads_q;
  if (const int64_t places = one_tile_places(device, plan.on_chip_bytes(), Traits::kBlocksPerSm); places > 0) {
    plan.grid = std::min(plan.grid, places);
    plan.waves = static_cast<double>(plan.grid) / static_cast<double>(places);
  }
  plan.scratch_bytes = problem.wants_dbias ? one_tile_partial_elements(problem, plan.grid) * 4 : 0;
  plan.choose(OneTileChoice{plan.grid, static_cast<int>(plan.on_chip_bytes())});
  return plan;
}

template <class Element, int kHeadDim, int kBlock>
void run_one_tile_backward(const BackwardArgs& args, const Plan& plan, void* workspace) {
  using Traits = OneTileTraits<Element, kHeadDim, kBlock>;
  const auto [grid, shared_bytes] = plan.chosen<OneTileChoice>();
  const Problem& problem = args.fwd.problem;
  check_one_tile(problem);
  BiasGradientPlan order = problem.wants_dbias ? one_tile_gradient_order(problem, args.dbias, kBlock, grid)
                                               : one_tile_order(args.fwd, kBlock, grid);
  const bool in_parts = problem.wants_dbias && order.parts > 1;
  if (in_parts) order.partial = static_cast<float*>(workspace);
  cuda::launch(one_tile_backward_kernel<Traits>, cuda::grid_of(grid), Traits::kThreads, shared_bytes, args.fwd.stream,
               args, order, problem.wants_dbias, features_of(args.fwd),
               OneTileForm{has_regular_rows(problem, {&args.fwd.q, &args.fwd.k, &args.fwd.v, &args.d_out}),
                           has_band(problem, kBlock)});
  if (in_parts) {
    cuda::sum_parts(args.dbias.data, DType::kFloat32, order.partial, order.part_elements, order.parts, args.fwd.stream);
  }
}

template <class Element, int kHeadDim, int kBlock>
void inspect_one_tile_backward(const Problem&, Plan& plan) {
  using Traits = OneTileTraits<Element, kHeadDim, kBlock>;
  cuda::inspect(one_tile_backward_kernel<Traits>, Traits::kThreads, plan.chosen<OneTileChoice>().shared_bytes, plan);
}

}  // namespace flash_ext::sm80
