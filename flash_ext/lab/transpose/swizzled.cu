// No float more: row y keeps its column x at place x ^ y. A row is still a permutation of 32 places, so all banks. And
// a column is too: x ^ y differs for each y. This is a swizzle. Whoever reads must permute in the same way.
constexpr int kTile = 32;

__device__ int place(int y, int x) { return x ^ y; }

extern "C" __global__ void transpose(const float* in, float* out, int rows, int columns) {
  __shared__ float tile[kTile][kTile];
  const int first_row = kTile * blockIdx.y, first_column = kTile * blockIdx.x;
  const int x = threadIdx.x;

  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    const int row = first_row + y, column = first_column + x;
    if (row < rows && column < columns) tile[y][place(y, x)] = in[row * columns + column];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    const int row = first_row + x, column = first_column + y;
    if (row < rows && column < columns) out[column * rows + row] = tile[x][place(x, y)];
  }
}
