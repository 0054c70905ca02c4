// The sum of dQ in global memory, to which every block of keys adds: floats, [b, h_q, s_q, d].
//
// In fragments where the device has bulk additions (compute capability 9.0), d is the head dimension of the instance
// and sequences are not packed: 16 whole rows of a head are then d / 8 fragments of 16 rows by 8 columns, of each of
// which lane l of a warp holds numbers 4 l to 4 l + 3, as an accumulator of mma.sync does. Rows otherwise, and where
// fewer than 16 are left.
//
// NOTE: an accumulator's rows are 32 bytes long. Added to rows of d they were 1,024 requests a tile, behind which the
// loads and shuffles of the other warps waited, too: of 9,800 clocks a tile with a mask 1,600 in either, head dimension
// 128.
//
// Fragments are 512 bytes in a row, and a bulk addition takes them out of shared memory when no warp waits for it.
// Where one block meets all keys there is nothing to add, and dQ needs no memory beside itself (store_dq): PyTorch's
// leanest backend has none there either.
//
// Called by steps.cuh and block.cuh; kernels/stages/rows.cu reads them. Invariant: a call adds to each group of
// rows in one way only.
#pragma once

#include "kernels/sm80/score.cuh"

namespace flash_ext::sm80 {

// to[row, col] += factor * c, rows of `cols` floats; red.global.add, two columns at once where all of them exist.
template <int kM, int kN>
__device__ __forceinline__ void add_to_rows(const float (&c)[kM][kN][4], float* to, int cols, int col, int row,
                                            int rows, float factor) {
  const int g = lane_row(), t = lane_column();
  float* line = to + int64_t{row + g} * cols + col + 2 * t;
  const int step = 8 * cols;
  if (row + 16 * kM <= rows && col + 8 * kN <= cols && cols % 2 == 0) {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        add_global(line + n * 8, c[i / 2][n][i % 2 * 2] * factor, c[i / 2][n][i % 2 * 2 + 1] * factor);
      }
      line += step;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int left = row + g + i * 8 < rows ? cols - col - 2 * t : 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n * 8 < left) add_global(line + n * 8, c[i / 2][n][i % 2 * 2] * factor);
      if (n * 8 + 1 < left) add_global(line + n * 8 + 1, c[i / 2][n][i % 2 * 2 + 1] * factor);
    }
    line += step;
  }
}

// The same to fragments. `stage` is this warp's shared memory for stage_rows of the kM rows of fragments; without it
// red.global.add. `first`: nothing of this tile was added before.
template <int kM, int kN>
__device__ __forceinline__ void add_fragments(const float (&c)[kM][kN][4], float* to, int cols, int col, int row,
                                              int rows, float factor, uint32_t stage, int stage_rows, bool first) {
  const unsigned lane = no_hoist(threadIdx.x % 32);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    if (row + m * 16 + 16 > rows) {
      add_to_rows<1, kN>(reinterpret_cast<const float(&)[1][kN][4]>(c[m]), to, cols, col, row + m * 16, rows, factor);
      continue;
    }
    float* const at = to + int64_t{row + m * 16} * cols + col * 16;
    if (stage_rows == 0) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        add_global(at + n * 128 + lane * 4, c[m][n][0] * factor, c[m][n][1] * factor, c[m][n][2] * factor,
                   c[m][n][3] * factor);
      }
      continue;
    }
    if (stage_rows < kM || (first && m == 0)) {
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    }
    const uint32_t staged = stage + (stage_rows < kM ? 0 : m * kN * 512);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t words[4] = {__float_as_uint(c[m][n][0] * factor), __float_as_uint(c[m][n][1] * factor),
                                 __float_as_uint(c[m][n][2] * factor), __float_as_uint(c[m][n][3] * factor)};
      store_shared(staged + n * 512 + lane * kChunkBytes, words);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      bulk_add(at, staged, kN * 512);
      bulk_commit();
    }
  }
}

// Straight to rows of dQ itself, where one block meets all keys of its head and there is no sum.
template <class Frag, class U, int kM, int kN>
__device__ __forceinline__ void store_dq(const float (&c)[kM][kN][4], U* to, int64_t row_stride, int rows, int cols,
                                         int col, int row, float factor) {
  const int first_col = col + 2 * lane_column();
  const bool pairs =
      sizeof(U) == 2 && (reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(row_stride * 2)) % 4 == 0;
#pragma unroll
  for (int i = 0; i < 2 * kM; ++i) {
    const int line = row + lane_row() + i * 8;
    if (line >= rows) continue;
    U* const at = to + line * row_stride + first_col;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float x = c[i / 2][n][i % 2 * 2] * factor, y = c[i / 2][n][i % 2 * 2 + 1] * factor;
      if (pairs && first_col + n * 8 + 1 < cols) {
        if constexpr (sizeof(U) == 2) *reinterpret_cast<uint32_t*>(at + n * 8) = Frag::pack(x, y);
      } else {
        if (first_col + n * 8 < cols) at[n * 8] = U(x);
        if (first_col + n * 8 + 1 < cols) at[n * 8 + 1] = U(y);
      }
    }
  }
}

// Deterministic dQ: blocks of keys add to a block of queries in ascending order, each warp after the warp that owns the
// same part of dQ. `turn` counts who is done.
// NOTE: no deadlock, because blocks draw their tiles from a counter: whoever is waited for has started.
__device__ __forceinline__ void wait_for_turn(const int* turn, int predecessors) {
  if (threadIdx.x % 32 == 0) {
    while (load_acquire(turn) != predecessors) {
    }
  }
  __syncwarp();
}

__device__ __forceinline__ void end_turn(int* turn, int predecessors) {
  __syncwarp();  // a release is cumulative: with it, what the other lanes added is seen too
  if (threadIdx.x % 32 == 0) {
    store_release(turn, predecessors + 1);
  }
}

}  // namespace flash_ext::sm80
