// The host side of forward: which instance, its plan, its launch. Called by rows.cpp through kernels.h; instantiated by
// generated units (unit.cu.in).
#pragma once

#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "gpu/host/tensor_map.h"
#include "kernels/sm80/forward/kernel.cuh"
#include "kernels/stages/mask_ranges.h"
#include "kernels/stages/sequences.h"

namespace flash_ext::sm80 {

// A view and what of it is copied.
struct BoxedView {
  const TensorView& view;
  int64_t heads, rows, cols;
};

// NOTE: what TMA refuses (rows or columns that are not 16 bytes apart, a third batch dimension) is copied as on 8.0.
inline BoxCopies box_copies(const Problem& problem, const BoxedView& first, const BoxedView& second, int box_rows,
                            bool has_tma, int stages) {
  BoxCopies copies{};
  copies.stages = stages;
  const auto fits = [&](const BoxedView& x) {
    return static_cast<bool>(x.view) && cuda::tma_refuses(problem, x.view, x.heads, x.rows) == nullptr;
  };
  copies.by_tma = has_tma && fits(first) && fits(second);
  if (copies.by_tma) {
    const auto map = [&](const BoxedView& x) {
      return cuda::make_tensor_map(problem, x.view, x.heads, x.rows, x.cols, box_rows, cuda::Promotion::k256);
    };
    copies.first = map(first);
    copies.second = map(second);
  }
  return copies;
}

// fn(Traits) of the instance that serves the problem.
template <class Element, int kHeadDim, class Fn>
auto with_forward_traits(const Problem& problem, bool small, const Fn& fn) {
  constexpr int kBytes = sizeof(StorageOf<Element>);
  constexpr auto kHasSmall = [](bool plain) {  // else both are one instance
    return forward_tile(kBytes, kHeadDim, true, plain) != forward_tile(kBytes, kHeadDim, false, plain);
  };
  const bool plain = is_plain(problem);
  if (small) {
    return plain ? fn(ForwardTraits<Element, kHeadDim, kHasSmall(true), true>())
                 : fn(ForwardTraits<Element, kHeadDim, kHasSmall(false), false>());
  }
  return plain ? fn(ForwardTraits<Element, kHeadDim, false, true>())
               : fn(ForwardTraits<Element, kHeadDim, false, false>());
}

template <class Traits>
ForwardSmem forward_smem_of(const Problem& problem, int stages) {
  constexpr TileShape kTile = Traits::kTile;
  return forward_smem(kTile, Traits::kHeadDim, sizeof(typename Traits::T), bias_bytes_of(problem), problem.has_mask,
                      stages);
}

inline TileSchedule forward_schedule(const Problem& problem, int block_m, int element_bytes, int64_t resident) {
  const int64_t rows = problem.packed ? problem.rows_k : problem.len_k;
  const int64_t kv_head_bytes = rows * (problem.head_dim + problem.head_dim_v) * element_bytes;
  if (problem.packed) {
    TileSchedule schedule =
        packed_schedule(problem, problem.rows_q, block_m, problem.heads_k, heads_per_section(kv_head_bytes, kL2Budget));
    schedule.group = problem.heads_q / problem.heads_k;
    return schedule;
  }
  return make_tile_schedule(problem, block_m, kv_head_bytes, kL2Budget, resident);
}

template <class Element, int kHeadDim>
Plan plan_forward(const Problem& problem, const DeviceInfo& device) {
  const bool small = takes_small_tiles(problem, Pass::kForward, kHeadDim, device);
  const auto make = [&]<class Traits>(Traits) {
    constexpr int kBytes = sizeof(typename Traits::T);
    Plan plan;
    plan.stages = forward_stages(problem, Traits::kTile, kHeadDim, kBytes, Traits::kMinBlocks, device);
    const ForwardSmem smem = forward_smem_of<Traits>(problem, plan.stages);
    if constexpr (kBytes == 2) {
      plan.kernel = Traits::kPlain ? "sm80.forward.plain" : "sm80.forward.general";
    } else if constexpr (std::is_same_v<Element, Tf32>) {
      plan.kernel = Traits::kPlain ? "sm80.forward.fp32.plain.tf32" : "sm80.forward.fp32.general.tf32";
    } else {
      plan.kernel = Traits::kPlain ? "sm80.forward.fp32.plain" : "sm80.forward.fp32.general";
    }
    plan.block_m = Traits::kBlockM;
    plan.block_n = Traits::kBlockN;
    plan.use("q", smem.k);
    plan.use("k", (smem.bias - smem.k) / 2);
    plan.use("v", (smem.bias - smem.k) / 2);
    plan.use("bias", smem.mask - smem.bias);
    plan.use("mask", smem.total - smem.mask);
    plan.on_chip_limit = device.shared_memory_per_block;
    plan.grid = query_tiles(problem, Traits::kBlockM) * elements_of(problem) * problem.heads_q;
    if (problem.packed) {
      plan.scratch_bytes = cuda::packed_tiles_bytes(problem, cuda::TilesOf::kQueries, Traits::kBlockM);
    }
    if (problem.has_mask && !problem.packed) {
      plan.scratch_bytes = cuda::mask_ranges_bytes(problem, cuda::RangesOf::kQueries, Traits::kBlockM);
    }
    const int64_t resident = int64_t{device.multiprocessors} * Traits::kMinBlocks;
    if (resident > 0) plan.waves = static_cast<double>(plan.grid) / static_cast<double>(resident);
    // A box would have rows of the next sequence.
    const bool has_boxes = !problem.packed && has_tensor_maps(device, kBytes, kHeadDim);
    const bool finds_ranges = finds_mask_ranges(problem, device.multiprocessors);
    plan.choose(ForwardChoice{small, has_boxes, plan.stages, resident, finds_ranges});
    return plan;
  };
  return with_forward_traits<Element, kHeadDim>(problem, small, make);
}

template <class Traits>
void launch_forward(const ForwardArgs& args, const ForwardChoice& choice, void* workspace) {
  const Problem& problem = args.problem;
  const PackedTile* tiles = nullptr;
  if (problem.packed) {
    constexpr int kBytes = sizeof(typename Traits::T);
    const cuda::PackedResults results = {
        .rows = {{args.out, cuda::TilesOf::kQueries, problem.heads_q, problem.head_dim_v, kBytes}},
        .lse = static_cast<float*>(args.lse)};
    tiles = cuda::prepare_packed(problem, args.sequences, cuda::TilesOf::kQueries, Traits::kBlockM, workspace, results,
                                 args.stream);
  }
  TileSchedule schedule = forward_schedule(problem, Traits::kBlockM, sizeof(typename Traits::T), choice.resident);
  schedule.batch_inner = batch_shares_scores(problem, args);
  MaskRanges ranges;
  if (choice.finds_ranges) {
    ranges = cuda::find_mask_ranges(args, cuda::RangesOf::kQueries, Traits::kBlockM, workspace);
  }
  cuda::launch(forward_kernel<Traits>, cuda::grid_of(schedule.size()), Traits::kThreads,
               forward_smem_of<Traits>(problem, choice.stages).total, args.stream, args, schedule, tiles,
               ScoreOptions::of(args, Traits::kPlain || sizeof(typename Traits::T) == 2),
               box_copies(problem, {args.k, problem.heads_k, problem.len_k, problem.head_dim},
                          {args.v, problem.heads_v, problem.len_k, problem.head_dim_v}, Traits::kBlockN,
                          choice.tensor_maps, choice.stages),
               ranges);
}

template <class Element, int kHeadDim>
void run_forward(const ForwardArgs& args, const Plan& plan, void* workspace) {
  const auto choice = plan.chosen<ForwardChoice>();
  with_forward_traits<Element, kHeadDim>(
      args.problem, choice.small_tiles, [&]<class Traits>(Traits) { launch_forward<Traits>(args, choice, workspace); });
}

template <class Element, int kHeadDim>
void inspect_forward(const Problem& problem, Plan& plan) {
  const auto choice = plan.chosen<ForwardChoice>();
  with_forward_traits<Element, kHeadDim>(problem, choice.small_tiles, [&]<class Traits>(Traits) {
    cuda::inspect(forward_kernel<Traits>, Traits::kThreads, forward_smem_of<Traits>(problem, choice.stages).total,
                  plan);
  });
}

}  // namespace flash_ext::sm80
