// Thread i loads element i of the tile, counted row by row, then element i + blockDim.x, and so on. Neighbours load
// neighbours, whatever d is and however many threads there are. Where a row ends inside a warp, its request takes from
// two rows. The price is a division for each float, which a compiler makes cheap if it knows d.
constexpr int kRows = 32, kPitch = 260;

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float tile[kRows][kPitch];
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4;
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) {
    const int row = i / width, column = i % width;
    tile[row][column] = first + row < rows && column < d ? x[(first + row) * stride + column] : 0.f;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) out[first * width + i] = tile[i / width][i % width];
}
