// The host side of the two-pass backward: prepare (backward/rows.cuh), keys.cuh, queries.cuh.
//
// Called by rows.cpp through kernels.h. Invariant: two_pass_scratch_bytes is what plan() asks for and what is used.
#pragma once

#include "gpu/host/launch.h"
#include "kernels/sm90/backward/rows.cuh"
#include "kernels/sm90/backward_two_pass/keys.cuh"
#include "kernels/sm90/backward_two_pass/queries.cuh"
#include "kernels/sm90/kernels.h"
#include "kernels/sm90/run_scores.cuh"
#include "kernels/stages/mask_ranges.h"

namespace flash_ext::sm90 {

// largest [b, h_k], zeros before: of |V|; fp16. 16 bytes a lane, a block 64 rows.
static __global__ void __launch_bounds__(kRowThreads)
    largest_kernel(const __grid_constant__ BackwardArgs args, float* largest, int n_blocks) {
  const Problem& problem = args.fwd.problem;
  const unsigned n_block = blockIdx.x % n_blocks, flat = blockIdx.x / n_blocks;
  const int64_t b = flat / problem.heads_k, head = flat % problem.heads_k;
  const TensorView& v = args.fwd.v;
  const __half* const rows = static_cast<const __half*>(v.data) + batch_offset(problem, v, b) + head * v.head_stride;
  __half2 most = __float2half2_rn(0.f);
  for (int64_t row = n_block * 64 + threadIdx.x / 32; row < min(int64_t{n_block + 1} * 64, problem.len_k); row += 8) {
    for (int64_t col = threadIdx.x % 32 * 8; col < problem.head_dim_v; col += 256) {
      const uint4 words = *reinterpret_cast<const uint4*>(rows + row * v.row_stride + col);
      for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
        most = __hmax2(most, __habs2(reinterpret_cast<const __half2&>(word)));
      }
    }
  }
  float x = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(largest) + flat, __float_as_int(x));
}

// Queries of a head, padded to the tiles of the queries' kernel.
inline int64_t two_pass_padded(const Problem& problem) { return block_count(problem.len_q, 128) * 128; }

inline int64_t two_pass_bounds(const Problem& problem) {
  return problem.dtype == DType::kFloat16 ? problem.batch * (2 * problem.heads_q + problem.heads_k) : 0;
}

// Bytes of the stats, of the ranges of a mask, for tiles of 64 at least, and of the bounds, one behind the other.
struct TwoPassScratch {
  int64_t stats, query_ranges, key_ranges, bounds;
};
inline TwoPassScratch two_pass_scratch(const Problem& problem) {
  const auto ranges = [&](cuda::RangesOf of) { return cuda::mask_ranges_bytes(problem, of, 64); };
  return {problem.batch * problem.heads_q * kQueryStats * two_pass_padded(problem) * 4,
          ranges(cuda::RangesOf::kQueries), ranges(cuda::RangesOf::kKeys), two_pass_bounds(problem) * 4};
}

inline int64_t two_pass_scratch_bytes(const Problem& problem) {
  const TwoPassScratch scratch = two_pass_scratch(problem);
  return scratch.stats + scratch.query_ranges + scratch.key_ranges + scratch.bounds;
}

template <class Traits>
void launch_two_pass(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  constexpr int kBlock = Traits::kBlock;
  const Problem& problem = args.fwd.problem;
  const Band band = make_band(problem);
  typename Traits::Params params;
  const auto map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols, int box_rows) {
    return make_tensor_map(problem, view, heads, rows, cols, box_rows, Promotion::k256);
  };
  params.q = map(args.fwd.q, problem.heads_q, problem.len_q, problem.head_dim, Traits::kQueryBox);
  params.d_out = map(args.d_out, problem.heads_q, problem.len_q, problem.head_dim_v, Traits::kQueryBox);
  params.k = map(args.fwd.k, problem.heads_k, problem.len_k, problem.head_dim, Traits::kKeyBox);
  params.v = map(args.fwd.v, problem.heads_k, problem.len_k, problem.head_dim_v, Traits::kKeyBox);
  params.wants_dk = problem.wants_dk;
  params.wants_dv = problem.wants_dv;
  if (problem.wants_dq) params.dq = map(args.dq, problem.heads_q, problem.len_q, problem.head_dim, 16);
  if (problem.wants_dk) params.dk = map(args.dk, problem.heads_k, problem.len_k, problem.head_dim, 16);
  if (problem.wants_dv) params.dv = map(args.dv, problem.heads_k, problem.len_k, problem.head_dim_v, 16);
  float* const stats = static_cast<float*>(workspace);
  params.stats = stats;
  const TwoPassScratch bytes = two_pass_scratch(problem);
  char* const query_ranges = static_cast<char*>(workspace) + bytes.stats;
  char* const key_ranges = query_ranges + bytes.query_ranges;
  float* const bounds = reinterpret_cast<float*>(key_ranges + bytes.key_ranges);
  params.bounds = bounds;
  params.batch = static_cast<int>(problem.batch);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.keys = backward_schedule(problem, Traits::kKeys, how.sms);
  params.queries = two_pass_queries(problem, Traits::kShape, how.sms);
  params.band = TileBand::make(band, static_cast<int>(problem.len_k));
  params.len_q = static_cast<int>(problem.len_q);
  params.padded = static_cast<int>(two_pass_padded(problem));
  params.heads_q = static_cast<int>(problem.heads_q);
  params.group_size = static_cast<int>(problem.heads_q / problem.heads_k);
  params.inner_batch = inner_batch_of(problem);
  params.scale = gradient_scale(problem);
  params.softcap = SoftcapParams::of(problem, problem.scale);
  const bool is_natural = Traits::kScored && (problem.has_bias || problem.has_alibi || problem.softcap != 0.0);
  const double natural = is_natural ? 1.0 : problem.scale;
  params.natural = static_cast<float>(natural);
  params.to_log2 = static_cast<float>(natural * kLog2e);
  params.inverse_scale = static_cast<float>(1.0 / natural);
  if constexpr (Traits::kScored) {
    params.keys.batch_inner = params.queries.batch_inner = batch_shares_scores(problem, args.fwd);
    params.keys_scores = make_scores(args.fwd, Traits::kQueries, Traits::kKeys, 0, Traits::kKeysSmem.score_bytes);
    params.queries_scores = make_scores(args.fwd, kBlock, Traits::kWalkedKeys, 0, Traits::kQueriesSmem.score_bytes);
    const auto find = [&](bool wanted, ScoreParams& scores, cuda::RangesOf of, int block, void* to) {
      if (how.finds_ranges && wanted) scores.ranges = cuda::find_mask_ranges(args.fwd, of, block, to);
    };
    find(problem.wants_dk || problem.wants_dv, params.keys_scores, cuda::RangesOf::kKeys, Traits::kKeys, key_ranges);
    find(problem.wants_dq, params.queries_scores, cuda::RangesOf::kQueries, Traits::kQueryRows, query_ranges);
  }

  using Prepare = PrepareTraits<typename Traits::T, Traits::kHeadDim, kBlock, Traits::kScored>;
  const int64_t heads = problem.batch * problem.heads_q;
  const int m_blocks = params.padded / kBlock;
  if (Traits::kScaled) {
    const auto stream = static_cast<cudaStream_t>(args.fwd.stream);
    cuda::check(cudaMemsetAsync(bounds, 0, two_pass_bounds(problem) * 4, stream), "memset");
    const int n_blocks = static_cast<int>(block_count(problem.len_k, 64));
    cuda::launch(largest_kernel, cuda::grid_of(problem.batch * problem.heads_k * n_blocks), kRowThreads, 0,
                 args.fwd.stream, args, bounds + 2 * heads, n_blocks);
  }
  cuda::launch(prepare_kernel<Prepare>, cuda::grid_of(heads * m_blocks), kRowThreads, 0, args.fwd.stream, args, stats,
               bounds, static_cast<float*>(nullptr), m_blocks);
  if (problem.wants_dk || problem.wants_dv) {
    cuda::launch_dependent(keys_kernel<Traits>, cuda::grid_of(params.keys.size() * Traits::kKeysBlocks),
                           Traits::kThreads, Traits::kKeysSmem.total, args.fwd.stream, params);
  }
  if (problem.wants_dq) {
    cuda::launch_dependent(queries_kernel<Traits>, cuda::grid_of(params.queries.size()), Traits::kThreads,
                           Traits::kQueriesSmem.total, args.fwd.stream, params);
  }
}

}  // namespace flash_ext::sm90
