// Backward of float64: correct and simple, always deterministic.
//
//   dP = d_out v^T (dropout applied)      delta = sum P dP - d_lse (that is rowsum(d_out * out) - d_lse)
//   P = e^(score - lse) / its own sum     dS = P * (dP - delta)
//   dq = scale dS k      dk = scale dS^T q      dv = P^T d_out      d_bias = sum dS      d_slope = sum -|distance| dS
//
// A kernel per output, each with its own owner of an output tile, which recomputes S and dP and sums in a fixed order:
// no atomics, no scratch beyond two numbers a query and, for slopes, one a tile. Called by rows.cpp through kernels.h.
// Invariant: every element of a wanted gradient is written exactly once; an absent one costs nothing.
#include <cuda_runtime.h>

#include "gpu/host/inspect.h"
#include "gpu/host/launch.h"
#include "kernels/sm80/fp64/parts.cuh"
#include "kernels/sm80/kernels.h"

namespace flash_ext::sm80 {
namespace {

using namespace fp64;

constexpr int kWarpLanes = 32;

struct BackwardShared {
  Operands operands;
  Tile32 weights;
  double row[kTile];
};
static_assert(sizeof(BackwardShared) <= 48 * 1024, "fits every card without asking for more");

// Everything that the tiles of one (b, query head) read.
struct HeadInputs {
  HeadScores scores;
  Rows q, k, v, d_out;
  const double* lse;
  const double* delta;
  const double* inverse_sum;
  int head_dim;
  int head_dim_v;

  __device__ HeadInputs(const BackwardArgs& args, const BackwardScratch& scratch, int64_t b, int64_t head)
      : scores(make_head_scores(args.fwd, whole_sequence(args.fwd.problem), b, head)) {
    const Problem& problem = args.fwd.problem;
    q = rows_of(problem, args.fwd.q, b, head);
    k = rows_of(problem, args.fwd.k, b, head / (problem.heads_q / problem.heads_k));
    v = rows_of(problem, args.fwd.v, b, head / (problem.heads_q / problem.heads_v));
    d_out = rows_of(problem, args.d_out, b, head);
    const int64_t first = (b * problem.heads_q + head) * problem.len_q;
    lse = static_cast<const double*>(args.fwd.lse) + first;
    delta = scratch.delta + first;
    inverse_sum = scratch.inverse_sum + first;
    head_dim = static_cast<int>(problem.head_dim);
    head_dim_v = static_cast<int>(problem.head_dim_v);
  }

  __device__ double lse_of(int64_t query) const {
    return query < scores.len_q ? lse[query] : OnlineSoftmax<double>::kEmpty;
  }

  __device__ RowStats stats(int64_t query) const {
    if (query >= scores.len_q) return {};
    return {lse[query], delta[query], inverse_sum[query]};
  }

  // visit(row, column, gradient) for this thread's pairs of a tile. d_prob is needed for all but PairGradient::prob.
  template <bool kScoreGradients, class Visit>
  __device__ void each_pair(Range queries, Range keys, Operands& smem, const Visit& visit) const {
    TileSums dot;
    TileSums d_prob = {};
    multiply(dot, q, queries, k, keys, head_dim, smem);
    if constexpr (kScoreGradients) multiply(d_prob, d_out, queries, v, keys, head_dim_v, smem);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = thread_row() + i * kLanes;
      const RowStats row_stats = stats(queries.first + row);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int col = thread_col() + j * kLanes;
        visit(row, col,
              scores.differentiate(dot[i][j], d_prob[i][j], queries.first + row, keys.first + col, row_stats));
      }
    }
  }
};

// Sum over the block in a fixed order, valid in thread 0. `partials` holds a number a warp.
__device__ double block_sum(double value, double (&partials)[kTile]) {
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, lanes);
  __syncthreads();  // all threads have left what partials held before
  if (threadIdx.x % kWarpLanes == 0) partials[threadIdx.x / kWarpLanes] = value;
  __syncthreads();  // every warp's sum is written
  double sum = 0.0;
  for (int warp = 0; warp < kThreads / kWarpLanes; ++warp) sum += partials[warp];
  return sum;
}

// delta and inverse_sum of 32 queries, measured on the very P and dP that the other kernels recompute.
// NOTE: rowsum(d_out * out) and e^(score - lse) alone would save two products of ten, but each carries forward's
// roundings: lse loses log(row_sum) where it is large, and dS of a row with one key would not be 0.
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                   const __grid_constant__ TileSchedule schedule) {
  __shared__ Operands smem;
  const Problem& problem = args.fwd.problem;
  const auto [b, head, m_block] = schedule.at(blockIdx.x);
  const HeadInputs in(args, scratch, b, head);
  const Range queries = tile_at(m_block * kTile, problem.len_q);
  const Range seen = in.scores.band.keys(queries, problem.len_k);
  const int64_t first = queries.first + thread_row();
  const double lse[2] = {in.lse_of(first), in.lse_of(first + kLanes)};

  double sum[2] = {0.0, 0.0};
  double product_sum[2] = {0.0, 0.0};
  for (int64_t key = tile_floor(seen.first); key < seen.last; key += kTile) {
    const Range keys = tile_at(key, problem.len_k);
    TileSums dot;
    TileSums d_prob;
    multiply(dot, in.q, queries, in.k, keys, in.head_dim, smem);
    multiply(d_prob, in.d_out, queries, in.v, keys, in.head_dim_v, smem);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        in.scores.renormalise(dot[i][j], d_prob[i][j], first + i * kLanes, key + thread_col() + j * kLanes, lse[i],
                              sum[i], product_sum[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], lanes);
      product_sum[i] += __shfl_xor_sync(0xFFFFFFFFu, product_sum[i], lanes);
    }
    const int64_t query = first + i * kLanes;
    if (thread_col() != 0 || query >= queries.last) continue;
    const int64_t place = (b * problem.heads_q + head) * problem.len_q + query;
    const bool empty = lse[i] == OnlineSoftmax<double>::kEmpty;
    const double d_lse = args.d_lse != nullptr ? static_cast<const double*>(args.d_lse)[place] : 0.0;
    sum[i] += std::exp(sink_of<double>(args.fwd, b, head, query) - lse[i]);
    const bool keeps_sum = problem.constant_lse && !renormalises_constant(lse[i]);
    const double inverse_sum = empty ? 0.0 : keeps_sum ? 1.0 : 1.0 / sum[i];
    scratch.inverse_sum[place] = inverse_sum;
    scratch.delta[place] = empty ? 0.0 : (problem.constant_lse ? 0.0 : product_sum[i] * inverse_sum) - d_lse;
  }
}

// dq, and each tile's part of the slope's gradient.
__global__ void __launch_bounds__(kThreads)
    query_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch,
                 const __grid_constant__ TileSchedule schedule) {
  __shared__ BackwardShared smem;
  const Problem& problem = args.fwd.problem;
  const auto [b, head, m_block] = schedule.at(blockIdx.x);
  const HeadInputs in(args, scratch, b, head);
  const Range queries = tile_at(m_block * kTile, problem.len_q);
  const Range seen = in.scores.band.keys(queries, problem.len_k);

  RowSums dq = {};
  double slope = 0.0;
  for (int64_t key = tile_floor(seen.first); key < seen.last; key += kTile) {
    const Range keys = tile_at(key, problem.len_k);
    in.each_pair<true>(queries, keys, smem.operands, [&](int row, int col, const PairGradient& pair) {
      smem.weights[row][col] = pair.d_score;
      slope += pair.d_slope;
    });
    if (args.dq) accumulate(dq, smem.weights, in.k, keys, in.head_dim, smem.operands);
  }
  if (args.dq) store_rows(dq, {problem.scale, problem.scale}, problem, args.dq, b, head, queries, in.head_dim);
  if (args.dalibi != nullptr) {
    slope = block_sum(slope, smem.row);
    if (threadIdx.x == 0) scratch.slope[(b * problem.heads_q + head) * schedule.blocks + m_block] = slope;
  }
}

// dalibi of one (b, query head) a thread.
__global__ void __launch_bounds__(kThreads)
    slope_kernel(const double* parts, double* dalibi, int64_t heads, int64_t tiles) {
  const int64_t head = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (head >= heads) return;
  double sum = 0.0;
  for (int64_t tile = 0; tile < tiles; ++tile) sum += parts[head * tiles + tile];
  dalibi[head] = sum;
}

// dv (kValues) or dk of 32 keys of one (b, value or key head), over the query heads of its group.
template <bool kValues>
__global__ void __launch_bounds__(kThreads)
    key_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch) {
  __shared__ BackwardShared smem;
  const Problem& problem = args.fwd.problem;
  const int64_t heads = kValues ? problem.heads_v : problem.heads_k;
  const int64_t group = problem.heads_q / heads;
  const int64_t n_blocks = block_count(problem.len_k, kTile);
  const int64_t head = blockIdx.x / n_blocks % heads;
  const int64_t b = blockIdx.x / n_blocks / heads;
  const Range keys = tile_at(blockIdx.x % n_blocks * kTile, problem.len_k);
  const Range seen = make_band(problem).queries(keys, problem.len_q);
  const bool has_gradient = args.d_out || (!kValues && args.d_lse != nullptr);

  RowSums sums = {};
  for (int64_t query_head = head * group; has_gradient && query_head < (head + 1) * group; ++query_head) {
    const HeadInputs in(args, scratch, b, query_head);
    for (int64_t query = tile_floor(seen.first); query < seen.last; query += kTile) {
      const Range queries = tile_at(query, problem.len_q);
      in.each_pair<!kValues>(queries, keys, smem.operands, [&](int row, int col, const PairGradient& pair) {
        smem.weights[col][row] = kValues ? pair.prob : pair.d_score;
      });
      if constexpr (kValues) {
        accumulate(sums, smem.weights, in.d_out, queries, in.head_dim_v, smem.operands);
      } else {
        accumulate(sums, smem.weights, in.q, queries, in.head_dim, smem.operands);
      }
    }
  }
  if constexpr (kValues) {
    store_rows(sums, {1.0, 1.0}, problem, args.dv, b, head, keys, problem.head_dim_v);
  } else {
    store_rows(sums, {problem.scale, problem.scale}, problem, args.dk, b, head, keys, problem.head_dim);
  }
}

// Which (b, query head) share an element of dbias: those that differ in a dimension of stride 0.
struct BiasOwners {
  int64_t batches = 1, batch_repeats = 1;
  int64_t heads = 1, head_repeats = 1;

  FLASH_DEVICE BiasOwners(const Problem& problem, const TensorView& dbias) {
    for (int i = 0; i < problem.batch_rank; ++i) {
      (dbias.batch_stride[i] == 0 ? batch_repeats : batches) *= problem.batch_size[i];
    }
    (dbias.head_stride == 0 ? head_repeats : heads) = problem.heads_q;
  }

  // The flat batch index of repeat `repeat` of owner `owner`.
  FLASH_DEVICE static int64_t batch(const Problem& problem, const TensorView& dbias, int64_t owner, int64_t repeat) {
    int64_t b = 0;
    int64_t place = 1;
    for (int i = problem.batch_rank - 1; i >= 0; --i) {
      const int64_t size = problem.batch_size[i];
      int64_t& rest = dbias.batch_stride[i] == 0 ? repeat : owner;
      b += rest % size * place;
      rest /= size;
      place *= size;
    }
    return b;
  }
};

FLASH_DEVICE int64_t bias_tiles(int64_t len, int64_t stride, int64_t size) {
  return stride == 0 ? 1 : block_count(len, size);
}

// dbias where keys have elements of their own: a block owns 32 keys of it, and 32 queries or all.
__global__ void __launch_bounds__(kThreads)
    bias_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch) {
  __shared__ BackwardShared smem;
  const Problem& problem = args.fwd.problem;
  const TensorView& dbias = args.dbias;
  const BiasOwners owners(problem, dbias);
  const bool sums_rows = dbias.row_stride == 0;
  const int64_t n_blocks = block_count(problem.len_k, kTile);
  const int64_t m_blocks = bias_tiles(problem.len_q, dbias.row_stride, kTile);
  const Range keys = tile_at(blockIdx.x % n_blocks * kTile, problem.len_k);
  int64_t rest = blockIdx.x / n_blocks;
  const int64_t first_query = rest % m_blocks * kTile;
  rest /= m_blocks;
  const int64_t head = rest % owners.heads;
  const int64_t batch_owner = rest / owners.heads;
  const int64_t last_query = sums_rows ? problem.len_q : tile_at(first_query, problem.len_q).last;
  const Band band = make_band(problem);

  TileSums sums = {};
  for (int64_t i = 0; i < owners.batch_repeats * owners.head_repeats; ++i) {
    const int64_t b = BiasOwners::batch(problem, dbias, batch_owner, i / owners.head_repeats);
    const HeadInputs in(args, scratch, b, head + i % owners.head_repeats);
    for (int64_t query = first_query; query < last_query; query += kTile) {
      const Range queries = tile_at(query, problem.len_q);
      const Range seen = band.keys(queries, problem.len_k);
      if (seen.first >= keys.last || seen.last <= keys.first) continue;
      in.each_pair<true>(queries, keys, smem.operands, [&](int row, int col, const PairGradient& pair) {
        sums[row / kLanes][col / kLanes] += pair.d_bias;
      });
    }
  }

  double* gradient = static_cast<double*>(dbias.data) +
                     head_offset(problem, dbias, BiasOwners::batch(problem, dbias, batch_owner, 0), head);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = thread_row() + i / 2 * kLanes;
    const int col = thread_col() + i % 2 * kLanes;
    const bool inside = first_query + row < last_query && keys.first + col < keys.last;
    if (sums_rows) {
      smem.weights[row][col] = sums[i / 2][i % 2];
    } else if (inside) {
      gradient[(first_query + row) * dbias.row_stride + (keys.first + col) * dbias.col_stride] = sums[i / 2][i % 2];
    }
  }
  if (!sums_rows) return;
  __syncthreads();  // all sums are written before columns are added
  const int col = static_cast<int>(threadIdx.x);
  if (col >= keys.size()) return;
  double sum = 0.0;
  for (int row = 0; row < kTile; ++row) sum += smem.weights[row][col];
  gradient[(keys.first + col) * dbias.col_stride] = sum;
}

// dbias of a bias that is the same for all keys: it moves lse and nothing else, so the sum of dS over the keys is
// d_lse, exactly, or, where delta is no number, is none; a sink of probability p adds p delta. A block owns 256 queries
// of it, or all.
__global__ void __launch_bounds__(kThreads)
    row_bias_kernel(const __grid_constant__ BackwardArgs args, const __grid_constant__ BackwardScratch scratch) {
  __shared__ double partials[kTile];
  const Problem& problem = args.fwd.problem;
  const TensorView& dbias = args.dbias;
  const BiasOwners owners(problem, dbias);
  const bool sums_rows = dbias.row_stride == 0;
  const int64_t blocks = bias_tiles(problem.len_q, dbias.row_stride, kThreads);
  const int64_t head = blockIdx.x / blocks % owners.heads;
  const int64_t batch_owner = blockIdx.x / blocks / owners.heads;
  const int64_t first = blockIdx.x % blocks * kThreads + threadIdx.x;
  const int64_t last = sums_rows || first + 1 > problem.len_q ? problem.len_q : first + 1;
  const double* lse = static_cast<const double*>(args.fwd.lse);
  const double* d_lse = static_cast<const double*>(args.d_lse);

  double sum = 0.0;
  for (int64_t i = 0; i < owners.batch_repeats * owners.head_repeats; ++i) {
    const int64_t b = BiasOwners::batch(problem, dbias, batch_owner, i / owners.head_repeats);
    const int64_t place = (b * problem.heads_q + head + i % owners.head_repeats) * problem.len_q;
    for (int64_t query = first; query < last; query += kThreads) {
      if (lse[place + query] == OnlineSoftmax<double>::kEmpty) continue;
      const double of_sink =
          probability(sink_of<double>(args.fwd, b, head + i % owners.head_repeats, query), lse[place + query]);
      sum += (d_lse != nullptr ? d_lse[place + query] : 0.0) + of_sink * scratch.delta[place + query];
    }
  }
  if (sums_rows) sum = block_sum(sum, partials);
  if (sums_rows ? threadIdx.x != 0 : first >= problem.len_q) return;
  const int64_t offset = head_offset(problem, dbias, BiasOwners::batch(problem, dbias, batch_owner, 0), head);
  static_cast<double*>(dbias.data)[offset + (sums_rows ? 0 : first) * dbias.row_stride] = sum;
}

void launch_bias(const BackwardArgs& args, const BackwardScratch& scratch) {
  const Problem& problem = args.fwd.problem;
  const BiasOwners owners(problem, args.dbias);
  const int64_t items = owners.batches * owners.heads;
  if (args.dbias.col_stride == 0) {
    const int64_t blocks = items * bias_tiles(problem.len_q, args.dbias.row_stride, kThreads);
    cuda::launch(row_bias_kernel, cuda::grid_of(blocks), kThreads, 0, args.fwd.stream, args, scratch);
  } else {
    const int64_t tiles = bias_tiles(problem.len_q, args.dbias.row_stride, kTile) * block_count(problem.len_k, kTile);
    cuda::launch(bias_kernel, cuda::grid_of(items * tiles), kThreads, 0, args.fwd.stream, args, scratch);
  }
}

}  // namespace

void backward_fp64(const BackwardArgs& args, void* workspace) {
  const Problem& problem = args.fwd.problem;
  const BackwardScratch scratch(problem, workspace);
  const TileSchedule schedule = make_tile_schedule(problem, kTile, 0, 0);
  const dim3 query_grid = cuda::grid_of(schedule.size());
  const int64_t key_tiles = problem.batch * block_count(problem.len_k, kTile);
  void* stream = args.fwd.stream;

  cuda::launch(prepare_kernel, query_grid, kThreads, 0, stream, args, scratch, schedule);
  if (args.dq || args.dalibi != nullptr) {
    cuda::launch(query_kernel, query_grid, kThreads, 0, stream, args, scratch, schedule);
  }
  if (args.dalibi != nullptr) {
    const int64_t heads = problem.batch * problem.heads_q;
    cuda::launch(slope_kernel, cuda::grid_of(block_count(heads, kThreads)), kThreads, 0, stream, scratch.slope,
                 static_cast<double*>(args.dalibi), heads, schedule.blocks);
  }
  if (args.dk) {
    const dim3 grid = cuda::grid_of(key_tiles * problem.heads_k);
    cuda::launch(key_kernel<false>, grid, kThreads, 0, stream, args, scratch);
  }
  if (args.dv) {
    const dim3 grid = cuda::grid_of(key_tiles * problem.heads_v);
    cuda::launch(key_kernel<true>, grid, kThreads, 0, stream, args, scratch);
  }
  if (args.dbias) launch_bias(args, scratch);
}

// Of the kernel of dq; the others are its like.
void inspect_backward_fp64(Plan& plan) {
  cuda::inspect_static(query_kernel, kThreads, plan);
  cuda::inspect_beside(prepare_kernel, plan);
  cuda::inspect_beside(key_kernel<false>, plan);
  cuda::inspect_beside(key_kernel<true>, plan);
  cuda::inspect_beside(bias_kernel, plan);
}

}  // namespace flash_ext::sm80
