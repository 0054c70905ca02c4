// A block takes a tile of 32 x 32 through shared memory: it reads rows of in and writes rows of out, both coalesced.
// The turn happens on chip, where a warp reads a column of the tile. Shared memory has 32 banks of 4 bytes, and a row
// of the tile is 32 floats: all of a column lies in one bank. The 32 words come one after the other, a 32-way conflict.
constexpr int kTile = 32;

extern "C" __global__ void transpose(const float* in, float* out, int rows, int columns) {
  __shared__ float tile[kTile][kTile];
  const int first_row = kTile * blockIdx.y, first_column = kTile * blockIdx.x;
  const int x = threadIdx.x;

  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    const int row = first_row + y, column = first_column + x;
    if (row < rows && column < columns) tile[y][x] = in[row * columns + column];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    const int row = first_row + x, column = first_column + y;
    if (row < rows && column < columns) out[column * rows + row] = tile[x][y];
  }
}
