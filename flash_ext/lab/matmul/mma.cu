// The same copies, and the tensor cores multiply: a warp's mma.sync adds a product of 16 x 8 and 8 x 8 to a tile that
// lies in its registers, as ptx.cuh says. The inputs are rounded to tf32, 11 significant bits; sums are floats. Four
// warps have 32 x 32 of the tile each. A fragment takes 8 rows and 4 columns of x, and of y 4 rows and 8 columns: the
// chunks of a row are swizzled, so that these are 32 banks, and so are those of a copy's quarter warp.
#include "ptx.cuh"

constexpr int kTile = 64, kDepth = 16, kFloats = kTile * kDepth;

__device__ int in_x(int row, int i) { return kDepth * row + (i / 4 ^ row / 2 % 4) * 4 + i % 4; }
__device__ int in_y(int row, int i) { return kTile * row + (i / 4 ^ row % 4 * 2) * 4 + i % 4; }

// 4 floats, of which `left` are still in the row.
__device__ void copy(float* to, const float* from, int left, bool aligned) {
  if (aligned) cp_async_16(to, from, left > 0 ? 16 : 0);
  for (int i = 0; i < 4 && !aligned; ++i) cp_async_4(to + i, from + i, i < left ? 4 : 0);
}

__device__ void fill(float* x, float* y, const float* a, const float* b, int m, int n, int k, int first) {
  for (int t = threadIdx.x; t < kFloats / 4; t += blockDim.x) {
    const int row = kTile * blockIdx.y + t / 4, across = first + 4 * (t % 4);
    const int column = kTile * blockIdx.x + 4 * (t % 16), down = first + t / 16;
    copy(x + in_x(t / 4, 4 * (t % 4)), a + row * k + across, row < m ? k - across : 0, k % 4 == 0);
    copy(y + in_y(t / 16, 4 * (t % 16)), b + down * n + column, down < k ? n - column : 0, n % 4 == 0);
  }
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float4 x[2 * kFloats / 4], y[2 * kFloats / 4];
  float* xs = reinterpret_cast<float*>(x);
  float* ys = reinterpret_cast<float*>(y);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sum[2][4][4] = {};
  fill(xs, ys, a, b, m, n, k, 0);
  cp_async_commit();
  for (int first = 0; first < k; first += kDepth) {
    const int now = first / kDepth % 2 * kFloats, next = kFloats - now;
    if (first + kDepth < k) fill(xs + next, ys + next, a, b, m, n, k, first + kDepth);
    cp_async_commit();
    cp_async_wait(1);
    __syncthreads();
    for (int i = 0; i < kDepth; i += 8) {
      float left[2][4], right[4][2];
      for (int j = 0; j < 8; ++j) {
        const int row = warp_row + j / 4 * 16 + j % 2 * 8 + g;
        left[j / 4][j % 4] = to_tf32(xs[now + in_x(row, i + j / 2 % 2 * 4 + t)]);
        right[j / 2][j % 2] = to_tf32(ys[now + in_y(i + j % 2 * 4 + t, warp_column + j / 2 * 8 + g)]);
      }
      for (int j = 0; j < 8; ++j) mma_tf32(sum[j / 4][j % 4], left[j / 4], right[j % 4]);
    }
    __syncthreads();
  }
  for (int i = 0; i < 32; ++i) {
    const int row = kTile * blockIdx.y + warp_row + i / 16 * 16 + i / 2 % 2 * 8 + g;
    const int column = kTile * blockIdx.x + warp_column + i / 4 % 4 * 8 + 2 * t + i % 2;
    if (row < m && column < n) c[row * n + column] = sum[i / 16][i / 4 % 4][i % 4];
  }
}
