// c = a b, with a of m x k, b of k x n, all row by row. One thread an element of c: it walks along a row of a and down
// a column of b. threadIdx.x is a row here, so the threads of a warp read 32 rows of a, at 32 sectors a request, and
// write a column of c. That they all read the same element of b is cheap: one sector.
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const int column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row >= m || column >= n) return;

  float sum = 0.f;
  for (int i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + column];
  c[row * n + column] = sum;
}
