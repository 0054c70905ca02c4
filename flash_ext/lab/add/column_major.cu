// The same work, the same threads, but threadIdx.x is a row now. Neighbours in a warp touch floats that lie a whole row
// apart: 32 sectors a request, and of each sector's 32 bytes only 4 are used at that moment. The other threads that
// want the rest are in other warps; whether the sector is still in a cache when they come is a matter of luck.
extern "C" __global__ void add(const float* x, const float* y, float* z, int rows, int columns) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= rows || column >= columns) return;

  const int i = row * columns + column;
  z[i] = x[i] + y[i];
}
