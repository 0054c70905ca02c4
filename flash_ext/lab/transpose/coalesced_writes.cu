// out[column][row] = in[row][column]. threadIdx.x runs along a row of out, so a warp writes 128 neighbouring bytes. It
// reads a column of in: 32 floats, each in a sector of its own.
extern "C" __global__ void transpose(const float* in, float* out, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row < rows && column < columns) out[column * rows + row] = in[row * columns + column];
}
