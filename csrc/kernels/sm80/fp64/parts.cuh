// What the float64 kernels share: tiles of 32 x 32 in shared memory, products on the plain units, and everything that
// happens to one (query, key) pair between q k^T and the sums over it.
//
//   score = mods(scale * dot)     P = e^(score - lse)     d_score = mods'(P * (keep * d_prob - delta))
//
// Correct and simple: a block of 256 threads owns a tile of the output and walks over the other dimension; a thread
// holds rows ty, ty + 16 and columns tx, tx + 16 of each 32 x 32 tile. Included by forward.cu, backward.cu
// and, for what happens to one pair, forward/restore_rows.cuh. Invariant: strides are always used, offsets are 64-bit,
// and what lies outside a matrix is a zero in shared memory. A product starts with a barrier, so its callers may write
// the tile it reads without one.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/band.h"
#include "core/dropout.h"
#include "core/online_softmax.h"
#include "core/score_mod.h"
#include "core/tile_schedule.h"
#include "kernels/sm80/sequence.h"

namespace flash_ext::sm80::fp64 {

constexpr int kTile = 32;      // queries, keys and columns of one step
constexpr int kThreads = 256;  // 16 x 16, each 2 x 2 elements of a tile
constexpr int kLanes = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kChunks = kMaxHeadDim / kTile;

// NOTE: 33 doubles a row, so that 16 threads reading one column meet 32 different banks.
using Tile32 = double[kTile][kTile + 1];

// The two operands of a product.
struct Operands {
  Tile32 a;
  Tile32 b;
};

// Sums over a row's 32 x 32 tiles, [row ty + 16 i][column tx + 16 j], and of a whole output of up to 256 columns.
using TileSums = double[2][2];
using RowSums = double[2][2 * kChunks];

// Rows of one matrix that a tile reads.
struct Rows {
  const double* data = nullptr;  // null: zeros
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

FLASH_DEVICE int64_t head_offset(const Problem& problem, const TensorView& view, int64_t b, int64_t head) {
  return batch_offset(problem, view, b) + head * view.head_stride;
}

FLASH_DEVICE Rows rows_of(const Problem& problem, const TensorView& view, int64_t b, int64_t head) {
  if (!view) return {};
  return {static_cast<const double*>(view.data) + head_offset(problem, view, b, head), view.row_stride,
          view.col_stride};
}

// The 32 positions, or fewer, from `first` on.
FLASH_DEVICE Range tile_at(int64_t first, int64_t len) { return {first, first + kTile < len ? first + kTile : len}; }

FLASH_DEVICE int64_t tile_floor(int64_t position) { return position / kTile * kTile; }

// NOTE: keeps the compiler from contracting the operation that made x into the next one. Forward stores a rounded
// score; backward must subtract lse from the same number, so that a row with one key has P = 1 and dS = 0 exactly.
FLASH_DEVICE double rounded(double x) {
#if defined(__CUDA_ARCH__)
  asm("" : "+d"(x));
#endif
  return x;
}

// What backward knows of a query: P = e^(score - lse) * inverse_sum, delta = sum P dP - d_lse.
struct RowStats {
  double lse = OnlineSoftmax<double>::kEmpty;
  double delta = 0;
  double inverse_sum = 0;
};

struct PairGradient {
  double prob = 0;     // what multiplies v: dropout applied
  double d_score = 0;  // of scale * q k^T
  double d_bias = 0;
  double d_slope = 0;
};

// All that lies between q k^T and the softmax of one (b, query head).
struct HeadScores {
  StandardScoreMods<double> mods;
  Band band;
  double scale = 1;
  int64_t len_q = 0;
  int64_t len_k = 0;
  int64_t diagonal = 0;
  const uint8_t* mask = nullptr;
  int64_t mask_row = 0, mask_col = 0;
  const float* bias_float = nullptr;  // at most one of the two
  const double* bias_double = nullptr;
  int64_t bias_row = 0, bias_col = 0;
  bool drops = false;
  Dropout dropout;
  DropoutPlace place;
  uint32_t bh = 0;

  FLASH_DEVICE bool sees(int64_t query, int64_t key) const {
    if (query >= len_q || key >= len_k || !band.keep(query, key)) return false;
    return mask == nullptr || mask[query * mask_row + key * mask_col] != 0;
  }

  FLASH_DEVICE ScoreAt<double> at(int64_t query, int64_t key) const {
    ScoreAt<double> at;
    at.distance = static_cast<double>(query + diagonal - key);
    const int64_t place = query * bias_row + key * bias_col;
    if (bias_float != nullptr) at.bias = static_cast<double>(bias_float[place]);
    if (bias_double != nullptr) at.bias = bias_double[place];
    return at;
  }

  // 0 or 1 / (1 - p).
  FLASH_DEVICE double keep_factor(int64_t query, int64_t key) const {
    if (!drops) return 1.0;
    return dropout.keep(bh, place.query(query), place.key(key)) ? dropout.scale : 0.0;
  }

  FLASH_DEVICE double score(double dot, const ScoreAt<double>& at,
                            StandardScoreMods<double>::Saved<double>& saved) const {
    return rounded(mods.forward(rounded(dot * scale), at, saved));
  }

  // -inf for a pair that is not seen.
  FLASH_DEVICE double score(double dot, int64_t query, int64_t key) const {
    if (!sees(query, key)) return OnlineSoftmax<double>::kEmpty;
    StandardScoreMods<double>::Saved<double> saved;
    return score(dot, at(query, key), saved);
  }

  // Adds the pair's share of sum P and of sum P dP, P not normalised yet. d_prob = d_out v^T of the pair.
  FLASH_DEVICE void renormalise(double dot, double d_prob, int64_t query, int64_t key, double lse, double& sum,
                                double& product_sum) const {
    if (!sees(query, key)) return;
    StandardScoreMods<double>::Saved<double> saved;
    const double prob = probability(score(dot, at(query, key), saved), lse);
    sum += prob;
    product_sum = fma(prob, rounded(d_prob * keep_factor(query, key)), product_sum);
  }

  FLASH_DEVICE PairGradient differentiate(double dot, double d_prob, int64_t query, int64_t key,
                                          const RowStats& row) const {
    if (row.lse == OnlineSoftmax<double>::kEmpty || !sees(query, key)) return {};
    const ScoreAt<double> place = at(query, key);
    StandardScoreMods<double>::Saved<double> saved;
    const double prob = probability(score(dot, place, saved), row.lse) * row.inverse_sum;
    const double keep = keep_factor(query, key);
    ScoreGrads<double> grads;
    const double d_score = mods.backward(prob * (rounded(d_prob * keep) - row.delta), place, saved, grads);
    return {prob * keep, d_score, grads.bias, grads.slope};
  }
};

FLASH_DEVICE HeadScores make_head_scores(const ForwardArgs& args, const Sequence& sequence, int64_t b, int64_t head) {
  const Problem& problem = args.problem;
  HeadScores scores;
  static_cast<Softcap<double>&>(scores.mods) = make_softcap<double>(problem.softcap);
  scores.band = make_band(problem, sequence);
  scores.scale = problem.scale;
  scores.len_q = sequence.len_q;
  scores.len_k = sequence.len_k;
  scores.diagonal = problem.bottom_right ? sequence.len_k - sequence.len_q : 0;
  if (args.mask) {
    scores.mask = static_cast<const uint8_t*>(args.mask.data) + head_offset(problem, args.mask, b, head);
    scores.mask_row = args.mask.row_stride;
    scores.mask_col = args.mask.col_stride;
  }
  if (args.bias) {
    const int64_t offset = head_offset(problem, args.bias, b, head);
    static_cast<Bias&>(scores.mods).on = true;
    if (problem.bias_dtype == DType::kFloat64) {
      scores.bias_double = static_cast<const double*>(args.bias.data) + offset;
    } else {
      scores.bias_float = static_cast<const float*>(args.bias.data) + offset;
    }
    scores.bias_row = args.bias.row_stride;
    scores.bias_col = args.bias.col_stride;
  }
  if (args.alibi) {
    const float slope = static_cast<const float*>(args.alibi.data)[head_offset(problem, args.alibi, b, head)];
    static_cast<Alibi<double>&>(scores.mods) = {true, static_cast<double>(slope)};
  }
  if (args.rng_state != nullptr && problem.dropout_p > 0.0) {
    scores.drops = true;
    scores.place = args.dropout_place;
    scores.bh = args.dropout_place.bh(b, b * problem.heads_q + head);
    scores.dropout = make_dropout(args.rng_state[0], args.rng_state[1], problem.dropout_p);
  }
  return scores;
}

// Backward's workspace: two numbers a query, and a slope's gradient a tile of queries.
struct BackwardScratch {
  double* delta = nullptr;        // [b, h_q, s_q] sum P dP - d_lse
  double* inverse_sum = nullptr;  // [b, h_q, s_q]
  double* slope = nullptr;        // [b, h_q, tiles]
  int64_t bytes = 0;

  BackwardScratch(const Problem& problem, void* workspace) {
    const int64_t heads = problem.batch * problem.heads_q;
    const int64_t rows = heads * problem.len_q;
    const int64_t tiles = problem.wants_dalibi ? heads * block_count(problem.len_q, kTile) : 0;
    bytes = (2 * rows + tiles) * static_cast<int64_t>(sizeof(double));
    if (workspace == nullptr) return;
    delta = static_cast<double*>(workspace);
    inverse_sum = delta + rows;
    slope = inverse_sum + rows;
  }
};

// A thread's place in a 16 x 16 block.
__device__ inline int thread_row() { return static_cast<int>(threadIdx.x) / kLanes; }
__device__ inline int thread_col() { return static_cast<int>(threadIdx.x) % kLanes; }

// tile[r][c] = matrix[rows.first + r][col + c], zeros outside of `rows` and beyond `cols` columns.
__device__ inline void load_tile(Tile32& tile, const Rows& matrix, Range rows, int64_t col, int cols) {
  const int c = static_cast<int>(threadIdx.x) % kTile;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kTile; r < kTile; r += kThreads / kTile) {
    const bool inside = rows.first + r < rows.last && c < cols;
    tile[r][c] = inside ? matrix.data[(rows.first + r) * matrix.row_stride + (col + c) * matrix.col_stride] : 0.0;
  }
}

// sums = A B^T, zeros where one of them is absent.
__device__ inline void multiply(TileSums& sums, const Rows& a, Range a_rows, const Rows& b, Range b_rows, int depth,
                                Operands& smem) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i / 2][i % 2] = 0.0;
  if (a.data == nullptr || b.data == nullptr) return;
  const int ty = thread_row();
  const int tx = thread_col();
  for (int col = 0; col < depth; col += kTile) {
    const int cols = depth - col < kTile ? depth - col : kTile;
    __syncthreads();  // all threads have left the tiles of the step before
    load_tile(smem.a, a, a_rows, col, cols);
    load_tile(smem.b, b, b_rows, col, cols);
    __syncthreads();  // all threads' loads have landed
#pragma unroll 4
    for (int c = 0; c < cols; ++c) {
      const double a0 = smem.a[ty][c], a1 = smem.a[ty + kLanes][c];
      const double b0 = smem.b[tx][c], b1 = smem.b[tx + kLanes][c];
      sums[0][0] = fma(a0, b0, sums[0][0]);
      sums[0][1] = fma(a0, b1, sums[0][1]);
      sums[1][0] = fma(a1, b0, sums[1][0]);
      sums[1][1] = fma(a1, b1, sums[1][1]);
    }
  }
}

// sums += weights B: weights[row][n] over the rows n of B.
__device__ inline void accumulate(RowSums& sums, const Tile32& weights, const Rows& b, Range b_rows, int depth,
                                  Operands& smem) {
  const int ty = thread_row();
  const int tx = thread_col();
  const int count = static_cast<int>(b_rows.size());
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kTile >= depth) break;
    __syncthreads();  // weights are written, and all threads have left the tile of the step before
    load_tile(smem.b, b, b_rows, chunk * kTile, depth - chunk * kTile);
    __syncthreads();  // all threads' loads have landed
#pragma unroll 4
    for (int n = 0; n < count; ++n) {
      const double w0 = weights[ty][n], w1 = weights[ty + kLanes][n];
      const double b0 = smem.b[n][tx], b1 = smem.b[n][tx + kLanes];
      sums[0][2 * chunk] = fma(w0, b0, sums[0][2 * chunk]);
      sums[0][2 * chunk + 1] = fma(w0, b1, sums[0][2 * chunk + 1]);
      sums[1][2 * chunk] = fma(w1, b0, sums[1][2 * chunk]);
      sums[1][2 * chunk + 1] = fma(w1, b1, sums[1][2 * chunk + 1]);
    }
  }
}

// matrix[rows.first + ty + 16 i][...] = factor[i] * sums.
__device__ inline void store_rows(const RowSums& sums, const double (&factor)[2], const Problem& problem,
                                  const TensorView& view, int64_t b, int64_t head, Range rows, int64_t cols) {
  double* matrix = static_cast<double*>(view.data) + head_offset(problem, view, b, head);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t row = rows.first + thread_row() + i * kLanes;
    if (row >= rows.last) continue;
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) {
      const int64_t col = thread_col() + j * kLanes;
      if (col < cols) matrix[row * view.row_stride + col * view.col_stride] = sums[i][j] * factor[i];
    }
  }
}

}  // namespace flash_ext::sm80::fp64
