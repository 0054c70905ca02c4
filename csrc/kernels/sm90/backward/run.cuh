// The host side of backward: scratch, tensor maps, and the three launches.
//
//   prepare -> main kernel -> finish (rows.cuh) -> the gradient of a bias (bias_gradient/kernel.cuh)
//
// Called by rows.cpp through kernels.h. Invariant: backward_scratch is what plan() asks for and what is used.
#pragma once

#include <algorithm>

#include "gpu/host/launch.h"
#include "kernels/sm90/backward/kernel.cuh"
#include "kernels/sm90/backward/rows.cuh"
#include "kernels/sm90/bias_gradient/run.cuh"
#include "kernels/sm90/kernels.h"
#include "kernels/sm90/run_scores.cuh"
#include "kernels/stages/mask_ranges.h"
#include "kernels/stages/sequences.h"

namespace flash_ext::sm90 {

struct BackwardScratch {
  int m_blocks = 0;              // tiles of queries of a head; of packed sequences of all of them, and b is 1 then:
  float* stats = nullptr;        // [b, h_q, m_blocks, kQueryStats, block_m]
  float* dq = nullptr;           // [b, h_q, padded queries, head dim of the instance], in the order of the fragments
  float* bounds = nullptr;       // [b, h_q, 2], fp16; b: of packed sequences how many
  void* packed_tiles = nullptr;  // of keys, and what prepare_packed needs
  uint32_t* dq_semaphore = nullptr;  // [b, h_q, m_blocks] and one more, in one order
  float* bias_partial = nullptr;     // bias_partial_elements(), with dbias
  MaskRange* ranges = nullptr;       // mask_ranges_bytes() of tiles of keys
  int64_t zeros = 0;                 // from here on it must be zero before the kernels run
  int64_t bytes = 0;
};

// The same for every Persistence.
template <class Traits>
BackwardScratch backward_scratch(const Problem& problem, void* workspace) {
  BackwardScratch scratch;
  const int64_t elements = problem.batch * problem.heads_q, heads = problem.packed ? problem.heads_q : elements;
  const int64_t m_blocks = problem.packed ? most_packed_tiles(problem, problem.rows_q, Traits::kBlockM)
                                          : block_count(problem.len_q, Traits::kBlockM);
  const int64_t padded = m_blocks * Traits::kBlockM;
  scratch.m_blocks = static_cast<int>(m_blocks);
  const auto take = [&]<class T>(T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(workspace) + scratch.bytes);
    scratch.bytes += (count * 4 + 127) / 128 * 128;
  };
  take(scratch.stats, heads * kQueryStats * padded);
  if (!is_dq_stored(problem)) take(scratch.dq, heads * padded * Traits::kHeadDim);
  if (has_bias_gradient(problem)) take(scratch.bias_partial, bias_partial_elements(problem));
  take(scratch.ranges, cuda::mask_ranges_bytes(problem, cuda::RangesOf::kKeys, Traits::kBlockN) / 4);
  if (problem.packed) {
    scratch.packed_tiles = static_cast<char*>(workspace) + scratch.bytes;
    scratch.bytes += cuda::packed_tiles_bytes(problem, cuda::TilesOf::kKeys, Traits::kBlockN);
  }
  scratch.zeros = scratch.bytes;
  if (Traits::kScaled) take(scratch.bounds, elements * 2);
  if (is_ordered(problem)) take(scratch.dq_semaphore, heads * padded / Traits::kBlockM + 1);
  return scratch;
}

// The tiles of keys of packed sequences, and zeros in the rows of gradients that no tile has.
inline const PackedTile* prepare_packed(const BackwardArgs& args, int block_n, void* scratch) {
  using cuda::TilesOf;
  const Problem& problem = args.fwd.problem;
  const cuda::PackedResults results = {.rows = {{args.dq, TilesOf::kQueries, problem.heads_q, problem.head_dim, 2},
                                                {args.dk, TilesOf::kKeys, problem.heads_k, problem.head_dim, 2},
                                                {args.dv, TilesOf::kKeys, problem.heads_k, problem.head_dim_v, 2}}};
  return cuda::prepare_packed(problem, args.fwd.sequences, TilesOf::kKeys, block_n, scratch, results, args.fwd.stream);
}

// Of the blocks, those beyond one a tile are left out.
template <class Traits>
void launch_backward(const BackwardArgs& args, const BackwardLaunch& how, void* workspace) {
  using Prepare =
      PrepareTraits<typename Traits::T, Traits::kHeadDim, Traits::kBlockM, Traits::kScored, Traits::kPacked>;
  // The same for every Persistence and with scores.
  using Rows =
      BackwardTraits<typename Traits::T, Traits::kHeadDim, Persistence::kOne, ScoreKind::kNone, Traits::kPacked>;
  const Problem& problem = args.fwd.problem;
  const BackwardScratch scratch = backward_scratch<Traits>(problem, workspace);
  const Band band = Traits::kPacked ? make_band(problem, 0, 0) : make_band(problem);
  typename Traits::Params params;
  const auto map = [&](const TensorView& view, int64_t heads, int64_t rows, int64_t cols, int box_rows) {
    if constexpr (Traits::kPacked) {
      return make_packed_map(problem, view, heads, rows, cols, box_rows, Promotion::k256);
    } else {
      return make_tensor_map(problem, view, heads, rows, cols, box_rows, Promotion::k256);
    }
  };
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  const int64_t rows_q = Traits::kPacked ? problem.rows_q : problem.len_q;
  const int64_t rows_k = Traits::kPacked ? problem.rows_k : problem.len_k;
  params.q = map(args.fwd.q, problem.heads_q, rows_q, problem.head_dim, kBlockM);
  params.d_out = map(args.d_out, problem.heads_q, rows_q, problem.head_dim_v, kBlockM);
  params.k = map(args.fwd.k, problem.heads_k, rows_k, problem.head_dim, kBlockN);
  params.v = map(args.fwd.v, problem.heads_k, rows_k, problem.head_dim_v, kBlockN);
  params.dk = map(args.dk, problem.heads_k, rows_k, problem.head_dim, 16);
  params.dv = map(args.dv, problem.heads_k, rows_k, problem.head_dim_v, 16);
  if constexpr (Traits::kStored) {
    params.dq_rows = map(args.dq, problem.heads_q, problem.len_q, problem.head_dim, 16);
  }
  params.stats = scratch.stats;
  params.bounds = scratch.bounds;
  params.dq = scratch.dq;
  params.dq_semaphore = scratch.dq_semaphore;
  params.schedule = key_schedule(problem, kBlockN, how.sms);
  params.band = TileBand::make(band, static_cast<int>(problem.len_k));
  const int64_t tiles = params.schedule.size();
  const dim3 blocks = cuda::grid_of(Traits::kPersistence == Persistence::kOne ? tiles : std::min(tiles, how.grid));
  params.walks = how.grid < tiles;
  params.tiles = static_cast<int>(tiles);
  params.len_q = static_cast<int>(problem.len_q);
  params.m_blocks = scratch.m_blocks;
  params.heads_q = static_cast<int>(problem.heads_q);
  params.group_size = static_cast<int>(problem.heads_q / problem.heads_k);
  params.inner_batch = inner_batch_of(problem);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.scale = gradient_scale(problem);
  params.to_log2 = static_cast<float>(problem.scale * kLog2e);
  params.inverse_scale = static_cast<float>(1.0 / problem.scale);
  if constexpr (Traits::kScored) {
    constexpr BackwardSmem kSmem = Traits::kSmem;
    params.schedule.batch_inner = !Traits::kPacked && batch_shares_scores(problem, args.fwd);
    params.scores = make_scores(args.fwd, kScoreRows, kBlockN, kMaskBytes, kSmem.drops - kSmem.scores);
    if constexpr (Traits::kHasRanges) {
      params.scores.ranges = cuda::find_mask_ranges(args.fwd, cuda::RangesOf::kKeys, kBlockN, scratch.ranges);
    }
  }
  if constexpr (Traits::kSoftcap) params.softcap = SoftcapParams::of(problem, problem.scale);

  const int64_t query_tiles = (Traits::kPacked ? 1 : problem.batch) * problem.heads_q * params.m_blocks;
  params.dq_semaphore_count = static_cast<int>(query_tiles);
  if (scratch.zeros < scratch.bytes) {
    cuda::check(cudaMemsetAsync(static_cast<char*>(workspace) + scratch.zeros, 0, scratch.bytes - scratch.zeros,
                                static_cast<cudaStream_t>(args.fwd.stream)),
                "memset");
  }
  if constexpr (Traits::kPacked) {
    params.tiles_of_keys = prepare_packed(args, kBlockN, scratch.packed_tiles);
    params.tile_count = cuda::packed_tile_count(problem, cuda::TilesOf::kKeys, kBlockN, params.tiles_of_keys);
    params.diagonal_mask = problem.bottom_right ? -1 : 0;
  }
  // In order, the first tile of keys stores dQ; only tiles of queries that meet none need zeros, and of packed
  // sequences finish knows them.
  constexpr bool kPackedInOrder = Traits::kPacked && Traits::kOrdered;
  const TileRanges<kBlockM, kBlockN> tile_ranges{params.band.lower, params.band.upper, params.len_q, params.band.len_k};
  const bool is_stored =
      kPackedInOrder || (Traits::kOrdered && tile_ranges.meets_keys(0) && tile_ranges.meets_keys(params.m_blocks - 1));
  cuda::launch(prepare_kernel<Prepare>, cuda::grid_of(query_tiles), kRowThreads, 0, args.fwd.stream, args,
               scratch.stats, scratch.bounds, is_stored || Traits::kStored ? nullptr : scratch.dq, params.m_blocks);
  cuda::launch_dependent(backward_kernel<Traits>, blocks, Traits::kShape.threads, Traits::kSmem.total, args.fwd.stream,
                         params);
  const int64_t rooms = is_stored ? int64_t{kFinishBlocks} * how.sms : query_tiles;
  if constexpr (kPackedInOrder) {
    const PackedFinish finish = {params.tile_count,    scratch.dq_semaphore,
                                 params.band.lower,    params.band.upper,
                                 params.diagonal_mask, params.m_blocks,
                                 params.heads_q,       static_cast<int>(params.schedule.section) * params.group_size};
    cuda::launch_dependent(finish_in_order_kernel<Rows>, cuda::grid_of(std::min(query_tiles, rooms)), kRowThreads, 0,
                           args.fwd.stream, args, scratch.dq, finish);
  } else if constexpr (!Traits::kStored) {
    cuda::launch_dependent(finish_kernel<Rows>, cuda::grid_of(std::min(query_tiles, rooms)), kRowThreads, 0,
                           args.fwd.stream, args, scratch.dq, is_stored ? scratch.dq_semaphore : nullptr, tile_ranges,
                           params.m_blocks, static_cast<unsigned>(query_tiles));
  }
  if constexpr (Traits::kScored) {
    if (has_bias_gradient(problem)) {
      run_bias_gradient<BiasGradientTraits<typename Traits::T, Traits::kHeadDim>>(args, scratch.stats,
                                                                                  scratch.bias_partial);
    }
  }
}

}  // namespace flash_ext::sm90
