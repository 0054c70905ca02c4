// Neighbours touch neighbours again, but each warp begins one float after a multiple of 32 bytes, as it does in a view
// like x[1:]. The 128 bytes of a request now touch a fifth sector. (The last thread adds element 0, so that all is
// done.)
extern "C" __global__ void add(const float* x, const float* y, float* z, int rows, int columns) {
  const int n = rows * columns;
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= n) return;

  const int i = thread + 1 < n ? thread + 1 : 0;
  z[i] = x[i] + y[i];
}
