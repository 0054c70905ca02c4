// The host side of the gradient of a bias: which tiles, the order of items, the launches. Called by backward/run.cuh.
#pragma once

#include "core/plan_bias_gradient.h"
#include "gpu/host/launch.h"
#include "kernels/sm90/bias_gradient/kernel.cuh"
#include "kernels/sm90/run_scores.cuh"
#include "kernels/stages/rows.h"

namespace flash_ext::sm90 {

// stats: prepare_kernel's, of this shape with scores. partial: of bias_partial_elements() floats.
template <class Traits>
void run_bias_gradient(const BackwardArgs& args, const float* stats, float* partial) {
  constexpr int kBlock = Traits::kBlock;
  const Problem& problem = args.fwd.problem;
  const Band band = make_band(problem);
  const auto map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols) {
    return make_tensor_map(problem, view, heads, rows, cols, kBlock, Promotion::k256);
  };
  int device = 0, multiprocessors = 0;
  cuda::check(cudaGetDevice(&device), "device");
  cuda::check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  BiasGradientParams params;
  params.q = map(args.fwd.q, problem.heads_q, problem.len_q, problem.head_dim);
  params.k = map(args.fwd.k, problem.heads_k, problem.len_k, problem.head_dim);
  params.v = map(args.fwd.v, problem.heads_k, problem.len_k, problem.head_dim_v);
  params.d_out = map(args.d_out, problem.heads_q, problem.len_q, problem.head_dim_v);
  params.args = args;
  params.plan = make_bias_gradient_plan(problem, args.dbias, kBlock, kBlock, multiprocessors);
  if (params.plan.parts > 1) params.plan.partial = partial;
  params.stats = stats;
  params.padded = static_cast<int>(block_count(problem.len_q, Traits::kStatsBlock) * Traits::kStatsBlock);
  params.band = TileBand::make(band, static_cast<int>(problem.len_k));
  params.group = static_cast<int>(problem.heads_q / problem.heads_k);
  params.inner_batch = inner_batch_of(problem);
  params.reads_chunks = reads_chunks(problem, args.fwd.bias, 2);
  // A part begins where the one before it ends, whatever the strides: of one query, at an odd number of keys.
  params.stores_wide = reads_chunks(problem, args.dbias, 2) && params.plan.part_elements % 2 == 0;
  params.scale = static_cast<float>(problem.scale);
  params.to_log2 = static_cast<float>(problem.scale * kLog2e);
  params.inverse_scale = static_cast<float>(1.0 / problem.scale);
  cuda::launch(bias_gradient_kernel<Traits>, cuda::grid_of(params.plan.blocks()), Traits::kThreads, Traits::kSmem.total,
               args.fwd.stream, params);
  if (params.plan.parts > 1) {
    cuda::sum_parts(args.dbias.data, problem.bias_dtype, partial, params.plan.part_elements, params.plan.parts,
                    args.fwd.stream);
  }
}

}  // namespace flash_ext::sm90
