// Forward of float64, and the plan of both directions: correct and simple, without tensor cores.
//
//   out = softmax(mods(scale * q k^T), masked) v        lse = row_max + log(row_sum)
//
// A block owns 32 queries of one (b, query head) and walks over the keys that its band sees, 32 at a time; eight
// threads share a row of the softmax. Called by rows.cpp through kernels.h.
// Invariant: nothing of size L x S exists; every element of out and lse is written exactly once.
#include <cuda_runtime.h>

#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "kernels/sm80/fp64/parts.cuh"
#include "kernels/sm80/kernels.h"

namespace flash_ext::sm80 {
namespace {

using namespace fp64;

constexpr int kRowThreads = kThreads / kTile;

struct ForwardShared {
  Operands operands;
  Tile32 probs;
  double factor[kTile];
};
static_assert(sizeof(ForwardShared) <= 48 * 1024, "fits every card without asking for more");

__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ ForwardArgs args, const __grid_constant__ TileSchedule schedule) {
  __shared__ ForwardShared smem;
  const Problem& problem = args.problem;
  const auto [b, head, m_block] = schedule.at(blockIdx.x);
  const HeadScores scores = make_head_scores(args, whole_sequence(args.problem), b, head);
  const Rows q = rows_of(problem, args.q, b, head);
  const Rows k = rows_of(problem, args.k, b, head / (problem.heads_q / problem.heads_k));
  const Rows v = rows_of(problem, args.v, b, head / (problem.heads_q / problem.heads_v));
  const int head_dim = static_cast<int>(problem.head_dim);
  const int head_dim_v = static_cast<int>(problem.head_dim_v);
  const Range queries = tile_at(m_block * kTile, problem.len_q);
  const Range seen = scores.band.keys(queries, problem.len_k);

  const int row = static_cast<int>(threadIdx.x) / kRowThreads;
  const int part = static_cast<int>(threadIdx.x) % kRowThreads;
  OnlineSoftmax<double> softmax;  // of `row`, the same in its eight threads
  RowSums out = {};

  for (int64_t key = tile_floor(seen.first); key < seen.last; key += kTile) {
    const Range keys = tile_at(key, problem.len_k);
    TileSums s;
    multiply(s, q, queries, k, keys, head_dim, smem.operands);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int r = thread_row() + i * kLanes;
        const int c = thread_col() + j * kLanes;
        smem.probs[r][c] = scores.score(s[i][j], queries.first + r, keys.first + c);
      }
    }
    __syncthreads();  // all scores are written before any row is read

    double tile_max = OnlineSoftmax<double>::kEmpty;
    for (int c = part; c < kTile; c += kRowThreads) {
      const double score = smem.probs[row][c];
      tile_max = score > tile_max ? score : tile_max;
    }
    for (int lanes = 1; lanes < kRowThreads; lanes *= 2) {
      const double other = __shfl_xor_sync(0xFFFFFFFFu, tile_max, lanes);
      tile_max = other > tile_max ? other : tile_max;
    }
    const double factor = softmax.step(tile_max);
    double tile_sum = 0.0;
    for (int c = part; c < kTile; c += kRowThreads) {
      const double prob = std::exp(smem.probs[row][c] - softmax.shift());
      tile_sum += prob;
      smem.probs[row][c] = prob * scores.keep_factor(queries.first + row, keys.first + c);
    }
    for (int lanes = 1; lanes < kRowThreads; lanes *= 2) tile_sum += __shfl_xor_sync(0xFFFFFFFFu, tile_sum, lanes);
    softmax.add(tile_sum);
    if (part == 0) smem.factor[row] = factor;
    __syncthreads();  // factors are written before they scale the sums

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double rescale = smem.factor[thread_row() + i * kLanes];
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) out[i][j] *= rescale;
    }
    accumulate(out, smem.probs, v, keys, head_dim_v, smem.operands);
  }

  const OnlineSoftmax<double>::Result result =
      softmax.finish(sink_of<double>(args, b, head, min(queries.first + row, queries.last - 1)));
  if (part == 0) {  // all threads have read the last tile's factors: accumulate() ends after a barrier
    smem.factor[row] = result.inverse_sum;
    const int64_t query = queries.first + row;
    if (args.lse != nullptr && query < queries.last) {
      static_cast<double*>(args.lse)[(b * problem.heads_q + head) * problem.len_q + query] = result.lse;
    }
  }
  __syncthreads();  // factors are written before they scale the output
  const double inverse_sum[2] = {smem.factor[thread_row()], smem.factor[thread_row() + kLanes]};
  store_rows(out, inverse_sum, problem, args.out, b, head, queries, head_dim_v);
}

}  // namespace

Plan plan_fp64(const Problem& problem, Pass pass, const DeviceInfo& device) {
  const bool forward = pass == Pass::kForward;
  const int64_t query_tiles = problem.batch * problem.heads_q * block_count(problem.len_q, kTile);
  Plan plan;
  plan.kernel = forward ? "sm80.forward.fp64" : "sm80.backward.fp64";
  plan.block_m = kTile;
  plan.block_n = kTile;
  plan.stages = 1;
  plan.use("operand tiles", static_cast<int64_t>(sizeof(Operands)));
  plan.use(forward ? "probabilities" : "score gradients", static_cast<int64_t>(sizeof(Tile32)));
  plan.use("row factors", static_cast<int64_t>(kTile * sizeof(double)));
  plan.on_chip_limit = device.shared_memory_per_block;
  plan.scratch_bytes = forward ? 0 : BackwardScratch(problem, nullptr).bytes;
  plan.grid = query_tiles;
  const int64_t resident = device.multiprocessors > 0 ? device.multiprocessors : 1;
  plan.waves = static_cast<double>(plan.grid) / static_cast<double>(resident);
  return plan;
}

void forward_fp64(const ForwardArgs& args) {
  const TileSchedule schedule = make_tile_schedule(args.problem, kTile, 0, 0);
  cuda::launch(forward_kernel, cuda::grid_of(schedule.size()), kThreads, 0, args.stream, args, schedule);
}

void inspect_forward_fp64(Plan& plan) { cuda::inspect_static(forward_kernel, kThreads, plan); }

}  // namespace flash_ext::sm80
