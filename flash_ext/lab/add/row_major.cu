// One thread an element. The threads of a warp have neighbouring threadIdx.x, and here threadIdx.x is a column: they
// touch 32 neighbouring floats of one row, 128 bytes. That is 4 sectors of 32 bytes, and every byte of them is used.
extern "C" __global__ void add(const float* x, const float* y, float* z, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;

  const int i = row * columns + column;
  z[i] = x[i] + y[i];
}
