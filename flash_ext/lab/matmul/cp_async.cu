// Two tiles of each side: while the threads multiply one, the next is on its way, past the registers. A copy cannot
// turn the tile of a, so 4 steps of the depth are taken together: 4 floats along a row of x, and 4 rows of y.
#include "ptx.cuh"

constexpr int kTile = 64, kDepth = 16, kFloats = kTile * kDepth;

// 4 floats, of which `left` are still in the row.
__device__ void copy(float* to, const float* from, int left, bool aligned) {
  if (aligned) cp_async_16(to, from, left > 0 ? 16 : 0);
  for (int i = 0; i < 4 && !aligned; ++i) cp_async_4(to + i, from + i, i < left ? 4 : 0);
}

__device__ void fill(float* x, float* y, const float* a, const float* b, int m, int n, int k, int first) {
  const int t = threadIdx.x, row = kTile * blockIdx.y + t / 4, across = first + 4 * (t % 4);
  const int column = kTile * blockIdx.x + 4 * (t % 16), down = first + t / 16;
  copy(x + 4 * t, a + row * k + across, row < m ? k - across : 0, k % 4 == 0);
  copy(y + 4 * t, b + down * n + column, down < k ? n - column : 0, n % 4 == 0);
}

__device__ float4 add(float4 sum, float x, float4 y) {
  return make_float4(sum.x + x * y.x, sum.y + x * y.y, sum.z + x * y.z, sum.w + x * y.w);
}

__device__ void store(float* row, int i, int size, float4 v) {
  if (size % 4 == 0 && i < size) *reinterpret_cast<float4*>(row + i) = v;
  if (size % 4 == 0) return;
  if (i < size) row[i] = v.x;
  if (i + 1 < size) row[i + 1] = v.y;
  if (i + 2 < size) row[i + 2] = v.z;
  if (i + 3 < size) row[i + 3] = v.w;
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float4 x[2][kTile][kDepth / 4], y[2][kDepth][kTile / 4];
  float* xs = reinterpret_cast<float*>(x);
  float* ys = reinterpret_cast<float*>(y);
  const int t = threadIdx.x, column = kTile * blockIdx.x + 4 * (t % 16), row = kTile * blockIdx.y + 4 * (t / 16);
  float4 sum[4] = {};
  fill(xs, ys, a, b, m, n, k, 0);
  cp_async_commit();
  for (int first = 0; first < k; first += kDepth) {
    const int now = first / kDepth % 2, next = 1 - now;
    if (first + kDepth < k) fill(xs + kFloats * next, ys + kFloats * next, a, b, m, n, k, first + kDepth);
    cp_async_commit();  // of nothing at the end, so that the group before the last one is always the one that is needed
    cp_async_wait(1);
    __syncthreads();
    for (int deep = 0; deep < kDepth; deep += 4) {
      const float4 y0 = y[now][deep][t % 16], y1 = y[now][deep + 1][t % 16];
      const float4 y2 = y[now][deep + 2][t % 16], y3 = y[now][deep + 3][t % 16];
      for (int i = 0; i < 4; ++i) {
        const float4 v = x[now][4 * (t / 16) + i][deep / 4];
        sum[i] = add(add(add(add(sum[i], v.x, y0), v.y, y1), v.z, y2), v.w, y3);
      }
    }
    __syncthreads();  // before it is filled again
  }
  for (int i = 0; i < 4; ++i) store(c + (row + i) * n, column, row + i < m ? n : 0, sum[i]);
}
