// Thread i loads 4 floats: a quarter of the requests, and of the divisions. A float4 has to lie at a multiple of 16
// bytes, so every row has to begin at one: the stride is a multiple of 4. And no chunk may reach behind d. If either
// does not hold, all is done float by float.
constexpr int kRows = 32, kPitch = 260;

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float4 tile[kRows][kPitch / 4];
  float* words = reinterpret_cast<float*>(tile);
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4, chunks = width / 4;
  if (d % 4 == 0 && stride % 4 == 0) {
    for (int i = threadIdx.x; i < kRows * chunks; i += blockDim.x) {
      const int row = i / chunks, chunk = i % chunks;
      const float* from = x + (first + row) * stride + 4 * chunk;
      tile[row][chunk] = first + row < rows ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  } else {
    for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
      const int row = i / width, column = i % width;
      words[kPitch * row + column] = first + row < rows && column < d ? x[(first + row) * stride + column] : 0.f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
    out[first * width + i] = words[kPitch * (i / width) + i % width];
  }
}
