// A block makes a tile of c, 32 x 32. Its rows of a and its columns of b are needed by 32 threads each, so they are
// loaded once, 32 deep, and read from shared memory: a thirty-second of the global loads, of either side. Zeros stand
// where a matrix ends. The threads of a warp read one word of x, and 32 neighbours of y: no conflicts.
constexpr int kTile = 32;

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float x[kTile][kTile], y[kTile][kTile];
  const int column = kTile * blockIdx.x + threadIdx.x, row = kTile * blockIdx.y + threadIdx.y;
  float sum = 0.f;
  for (int first = 0; first < k; first += kTile) {
    const int across = first + threadIdx.x, down = first + threadIdx.y;
    x[threadIdx.y][threadIdx.x] = row < m && across < k ? a[row * k + across] : 0.f;
    y[threadIdx.y][threadIdx.x] = down < k && column < n ? b[down * n + column] : 0.f;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += x[threadIdx.y][i] * y[i][threadIdx.x];
    __syncthreads();  // before anybody overwrites what another has yet to read
  }
  if (row < m && column < n) c[row * n + column] = sum;
}
