// Shared memory is the bottleneck now: two loads for each multiplication. So a thread makes 4 x 4 elements of c: 8
// loads for 16 multiplications. 16 x 16 threads have a tile of 64 x 64, which halves the global loads as well. The 4
// columns of a thread are 16 apart, and so are its rows, so that neighbours still read neighbours.
constexpr int kTile = 64, kDepth = 16, kEach = 4, kThreads = kTile / kEach;

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float x[kTile][kDepth], y[kDepth][kTile];
  const int first_column = kTile * blockIdx.x, first_row = kTile * blockIdx.y, t = threadIdx.x;
  float sum[kEach][kEach] = {};
  for (int first = 0; first < k; first += kDepth) {
    for (int i = t; i < kTile * kDepth; i += kThreads * kThreads) {
      const int row = first_row + i / kDepth, across = first + i % kDepth;
      const int down = first + i / kTile, column = first_column + i % kTile;
      x[i / kDepth][i % kDepth] = row < m && across < k ? a[row * k + across] : 0.f;
      y[i / kTile][i % kTile] = down < k && column < n ? b[down * n + column] : 0.f;
    }
    __syncthreads();
    for (int deep = 0; deep < kDepth; ++deep) {
      float across[kEach], down[kEach];
      for (int i = 0; i < kEach; ++i) down[i] = x[t / kThreads + kThreads * i][deep];
      for (int i = 0; i < kEach; ++i) across[i] = y[deep][t % kThreads + kThreads * i];
      for (int i = 0; i < kEach; ++i) {
        for (int j = 0; j < kEach; ++j) sum[i][j] += down[i] * across[j];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kEach; ++i) {
    const int row = first_row + t / kThreads + kThreads * i;
    for (int j = 0; j < kEach; ++j) {
      const int column = first_column + t % kThreads + kThreads * j;
      if (row < m && column < n) c[row * n + column] = sum[i][j];
    }
  }
}
