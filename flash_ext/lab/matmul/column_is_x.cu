// The same with threadIdx.x as a column. Now the element of a is the one that a warp shares, one sector, and 32
// neighbours in a row of b are 4. Of two names exchanged a factor of 6 in sectors has come. Still, each step of the
// loop loads two floats for one multiplication and one addition.
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;

  float sum = 0.f;
  for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + column];
  c[row * n + column] = sum;
}
