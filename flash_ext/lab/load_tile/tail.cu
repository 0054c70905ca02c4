// Any d, as long as rows begin at multiples of 16 bytes. Of a row only the last chunk can reach behind d, and the one
// thread that has it takes its 1, 2 or 3 floats one by one. Behind d lies what is not ours, perhaps NaN, and NaN times
// 0 is NaN: the rest of the chunk must become 0. One or two threads of a warp do so, and the others wait for them: four
// more requests a warp, for hardly any bytes.
constexpr int kRows = 32, kPitch = 260;

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float4 tile[kRows][kPitch / 4];
  float* words = reinterpret_cast<float*>(tile);
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4, chunks = width / 4;
  for (int i = threadIdx.x; i < kRows * chunks; i += blockDim.x) {
    const int row = i / chunks, chunk = i % chunks, column = 4 * chunk;
    const int end = first + row < rows ? d : 0;
    const float* from = x + (first + row) * stride + column;
    if (stride % 4 == 0 && column + 3 < end) {
      tile[row][chunk] = *reinterpret_cast<const float4*>(from);
    } else {
      float* to = words + kPitch * row + column;
      for (int k = 0; k < 4; ++k) to[k] = column + k < end ? from[k] : 0.f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
    out[first * width + i] = words[kPitch * (i / width) + i % width];
  }
}
