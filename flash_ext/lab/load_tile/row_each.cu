// A block brings 32 rows of x, d floats each, to shared memory, as attention does with a tile of Q, K or V. A row
// begins `stride` floats behind the one before. The tile is whole: what lies behind the last row, and behind d up to a
// multiple of 4, is 0. Then the block writes the tile to out, so that it can be compared. Here each thread loads a row
// of its own. Its neighbours are a stride away: 32 sectors a request, and in shared memory 8 of the 32 rows begin in
// the same bank.
constexpr int kRows = 32, kPitch = 260;

extern "C" __global__ void load_tile(const float* x, float* out, int rows, int d, int stride) {
  __shared__ float tile[kRows][kPitch];
  const int first = kRows * blockIdx.x, width = (d + 3) / 4 * 4;
  for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
    for (int column = 0; column < width; ++column) {
      tile[row][column] = first + row < rows && column < d ? x[(first + row) * stride + column] : 0.f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * width; i += blockDim.x) out[first * width + i] = tile[i / width][i % width];
}
