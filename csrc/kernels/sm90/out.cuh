// How out leaves a warp: 16 rows of an accumulator, already divided by the row sums, to global memory.
//
//   stage_out   as 16-bit numbers, through 16 rows of a tile in shared memory and by TMA, which stops at out's end
//
//   write_out   the same from registers, 64 bytes of a row an instruction, where shared memory has no room
//
//   write_part  as floats, for combine to join with those of other keys
//
// Called by forward/kernel.cuh, in part by bias_gradient/parts.cuh. Invariant: all lanes of the warp call; stage_out
// returns before its tile has been read.
#pragma once

#include "core/args.h"
#include "gpu/ptx.cuh"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

// out for ordinary stores: strides in bytes.
struct OutView {
  char* data;
  int64_t row, head, b0, b1;
  int cols;
};

inline OutView make_out_view(const Problem& problem, const TensorView& out, int64_t cols) {
  const auto batch = [&](int from_last) {
    const int dim = problem.batch_rank - 1 - from_last;
    return dim >= 0 ? out.batch_stride[dim] * 2 : 0;
  };
  return {static_cast<char*>(out.data), out.row_stride * 2, out.head_stride * 2, batch(0), batch(1),
          static_cast<int>(cols)};
}

// tile: kRows rows of which the warp owns 16 from warp_row on.
template <class T, int kHeadDim, int kRows = 64>
__device__ __forceinline__ void stage_out(const float (&o_acc)[kHeadDim / 2], uint32_t tile, int warp_row,
                                          const CUtensorMap& map, BoxStart at) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const float* c = o_acc + 8 * k;
    stmatrix_x4(tile + tile_offset(kRows, warp_row + lane % 16, 16 * k + lane / 16 * 8), pack(c[0], c[1], T()),
                pack(c[2], c[3], T()), pack(c[4], c[5], T()), pack(c[6], c[7], T()));
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int panel = 0; panel < panels(kHeadDim); ++panel) {
      tma_store(&map, tile + panel * panel_size(kRows) + warp_row * kPanelBytes, at);
      at.col += kPanelCols;
    }
    bulk_commit();
  }
}

// The four lanes of a quad hold pair t of each of four blocks of 8 columns; afterwards lane t holds all of block t.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = t & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(~0u, high ? x[i] : x[i + bit], bit);
      x[i] = high ? other : x[i];
      x[i + bit] = high ? x[i + bit] : other;
    }
  }
}

// rows: this thread's two, cols floats each; null: there is none.
template <int kHeadDim>
__device__ __forceinline__ void write_part(const float (&o_acc)[kHeadDim / 2], float* const (&rows)[2], int cols) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const to = rows[half] + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      if (rows[half] != nullptr && 8 * n < cols) {
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(o_acc[4 * n + 2 * half], o_acc[4 * n + 2 * half + 1]);
      }
    }
  }
}

// rows: this thread's two; null: there is none.
template <class T, int kHeadDim>
__device__ __forceinline__ void write_out(const float (&o_acc)[kHeadDim / 2], char* const (&rows)[2], int cols) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; n += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = pack(o_acc[4 * (n + i) + 2 * half], o_acc[4 * (n + i) + 2 * half + 1], T());
      transpose_quad(x);
      const int col = 8 * (n + lane % 4);
      if (rows[half] != nullptr && col < cols) {
        *reinterpret_cast<uint4*>(rows[half] + 2 * col) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
}

}  // namespace flash_ext::sm90
