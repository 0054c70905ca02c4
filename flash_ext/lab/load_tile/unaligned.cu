// Any stride. A row may now begin 0, 1, 2 or 3 floats behind a multiple of 16 bytes: its lead. It is given the same
// lead in shared memory, so that a chunk is at multiples of 16 bytes on both sides again. Whoever reads the tile has to
// add the lead. What fills no chunk, the head and the tail of a row, is at most 8 floats with the zeros behind it. They
// are a job of their own, in which 32 threads take those of 4 rows: nobody waits for one thread.
constexpr int kRows = 32, kPitch = 260;

__device__ int lead(int row, int stride) { return row * stride % 4; }

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float4 tile[kRows][kPitch / 4];
  float* words = reinterpret_cast<float*>(tile);
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4, chunks = width / 4;
  for (int i = threadIdx.x; i < kRows * chunks; i += blockDim.x) {
    const int row = i / chunks, at = lead(first + row, stride), chunk = i % chunks + (at > 0), column = 4 * chunk - at;
    const float* from = x + (first + row) * stride + column;
    if (column + 3 < d) {
      tile[row][chunk] = first + row < rows ? *reinterpret_cast<const float4*>(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  for (int i = threadIdx.x; i < kRows * 8; i += blockDim.x) {
    const int row = i / 8, at = lead(first + row, stride), head = (4 - at) % 4;
    const int tail = max(head, (at + d) / 4 * 4 - at), column = i % 8 < head ? i % 8 : tail + i % 8 - head;
    if (column < width) {
      const bool inside = first + row < rows && column < d;
      words[kPitch * row + at + column] = inside ? x[(first + row) * stride + column] : 0.f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
    const int row = i / width;
    out[first * width + i] = words[kPitch * row + lead(first + row, stride) + i % width];
  }
}
