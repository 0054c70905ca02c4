// The same chunks, copied past the registers: a thread begins all of its copies and waits once. (A block that has other
// work does it before the wait.) cp_async_16 is told how many bytes are there and makes the rest 0, so a tail is no
// extra work, nor is a row that is not there. Only the heads are left, at most 3 floats a row.
#include "ptx.cuh"

constexpr int kRows = 32, kPitch = 260;

__device__ int lead(int row, int stride) { return row * stride % 4; }

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float4 tile[kRows][kPitch / 4];
  float* words = reinterpret_cast<float*>(tile);
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4, chunks = width / 4;
  for (int i = threadIdx.x; i < kRows * chunks; i += blockDim.x) {
    const int row = i / chunks, at = lead(first + row, stride), chunk = i % chunks + (at > 0), column = 4 * chunk - at;
    const int end = first + row < rows ? d : 0;
    if (column < width) {
      const float* from = x + (first + row) * stride + column;
      cp_async_16(words + kPitch * row + 4 * chunk, from, 4 * max(0, min(4, end - column)));
    }
  }
  for (int i = threadIdx.x; i < kRows * 4; i += blockDim.x) {
    const int row = i / 4, at = lead(first + row, stride), column = i % 4;
    const int end = first + row < rows ? d : 0;
    if (column < (4 - at) % 4) {
      const float* from = x + (first + row) * stride + column;
      cp_async_4(words + kPitch * row + at + column, from, column < end ? 4 : 0);
    }
  }
  cp_async_commit();
  cp_async_wait(0);
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
    const int row = i / width;
    out[first * width + i] = words[kPitch * row + lead(first + row, stride) + i % width];
  }
}
