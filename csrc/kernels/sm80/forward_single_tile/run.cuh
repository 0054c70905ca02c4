// The host side of kernel.cuh. Called by rows.cpp through kernels.h; instantiated by generated units
// (forward/unit.cu.in).
#pragma once

#include <algorithm>

#include "core/device.h"
#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "kernels/sm80/choose_tiles.h"
#include "kernels/sm80/forward_single_tile/kernel.cuh"
#include "kernels/sm80/one_tile_order.h"

namespace flash_ext::sm80 {

template <class Element, int kHeadDim, int kBlock>
Plan plan_one_tile_forward(const Problem& problem, const DeviceInfo& device) {
  using Traits = OneTileForwardTraits<Element, kHeadDim, kBlock>;
  constexpr int kOperand = 2 * Traits::Tile::bytes(kBlock);
  const OneTileForwardSmem smem = one_tile_forward_smem(kHeadDim, kBlock, bias_bytes_of(problem), problem.has_mask);
  Plan plan;
  plan.kernel = kBlock == kOneTile ? "sm80.forward.one_tile" : "sm80.forward.one_tile_144";
  plan.block_m = plan.block_n = kBlock;
  plan.stages = 2;
  for (const char* operand : {"q", "k", "v"}) plan.use(operand, kOperand);
  plan.use("items", smem.bias - smem.items);
  plan.use("bias", smem.mask - smem.bias);
  plan.use("mask", smem.total - smem.mask);
  plan.on_chip_limit = device.shared_memory_per_block;
  plan.grid = problem.batch * problem.heads_q;
  if (const int64_t places = one_tile_places(device, plan.on_chip_bytes(), Traits::kBlocksPerSm); places > 0) {
    plan.grid = std::min(plan.grid, places);
    plan.waves = static_cast<double>(plan.grid) / static_cast<double>(places);
  }
  plan.choose(OneTileChoice{plan.grid, static_cast<int>(plan.on_chip_bytes())});
  return plan;
}

template <class Element, int kHeadDim, int kBlock>
void run_one_tile_forward(const ForwardArgs& args, const Plan& plan) {
  using Traits = OneTileForwardTraits<Element, kHeadDim, kBlock>;
  const auto [grid, shared_bytes] = plan.chosen<OneTileChoice>();
  check_one_tile(args.problem);
  cuda::launch(
      one_tile_forward_kernel<Traits>, cuda::grid_of(grid), Traits::kThreads, shared_bytes, args.stream, args,
      one_tile_order(args, kBlock, grid), ScoreOptions::of(args, true),
      OneTileForm{has_regular_rows(args.problem, {&args.q, &args.k, &args.v}), has_band(args.problem, kBlock)});
}

template <class Element, int kHeadDim, int kBlock>
void inspect_one_tile_forward(const Problem&, Plan& plan) {
  using Traits = OneTileForwardTraits<Element, kHeadDim, kBlock>;
  cuda::inspect(one_tile_forward_kernel<Traits>, Traits::kThreads, plan.chosen<OneTileChoice>().shared_bytes, plan);
}

}  // namespace flash_ext::sm80
