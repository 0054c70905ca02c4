// The other way about: a warp reads 128 neighbouring bytes and writes a column. A sector that is read in pieces may
// wait in a cache for its other readers; one that is written in pieces has to be put together there. Either way one
// side pays, as long as a thread writes what it has read itself.
extern "C" __global__ void transpose(const float* in, float* out, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row < rows && column < columns) out[column * rows + row] = in[row * columns + column];
}
