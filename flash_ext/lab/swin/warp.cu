// A warp has a query. For the scores a thread has a key, or two: neighbours read neighbours of the bias, and keys lie
// 33 floats apart, so that a column of them is in 32 banks. For the sum a thread has one of the 32 columns.
constexpr int kWindow = 7, kTokens = kWindow * kWindow, kDim = 32, kShift = 3;

__device__ int place(int window, int i) { return window * kWindow + i; }
__device__ int region(int at, int side) { return (at >= side - kWindow ? 1 : 0) + (at >= side - kShift ? 1 : 0); }

__device__ int row_of(int t, int x, int y, int side, int heads) {
  const int down = (place(y, t / kWindow) + kShift) % side, across = (place(x, t % kWindow) + kShift) % side;
  return ((blockIdx.y / heads * side + down) * side + across) * heads * kDim + blockIdx.y % heads * kDim;
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, const float* bias, float* out,
                                  int side, int heads) {
  __shared__ float keys[kTokens][kDim + 1], values[kTokens][kDim];
  const int x = blockIdx.x % (side / kWindow), y = blockIdx.x / (side / kWindow), lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int key = warp; key < kTokens; key += warps) {
    const int other = row_of(key, x, y, side, heads) + lane;
    keys[key][lane] = k[other];
    values[key][lane] = v[other];
  }
  __syncthreads();
  for (int t = warp; t < kTokens; t += warps) {
    const int row = row_of(t, x, y, side, heads);
    const float mine = q[row + lane] * 0.17677669f;  // 1 / sqrt(32)
    float s[2] = {}, m = -1.0e30f, l = 0.0f, sum = 0.0f;
    for (int i = 0; i < kDim; ++i) {
      const float column = __shfl_sync(0xffffffff, mine, i);
      for (int j = 0; j < 2; ++j) s[j] += column * keys[min(lane + 32 * j, kTokens - 1)][i];
    }
    for (int j = 0; j < 2; ++j) {
      const int key = min(lane + 32 * j, kTokens - 1);
      const bool seen = lane + 32 * j < kTokens &&
                        region(place(y, key / kWindow), side) == region(place(y, t / kWindow), side) &&
                        region(place(x, key % kWindow), side) == region(place(x, t % kWindow), side);
      s[j] = seen ? s[j] + bias[(blockIdx.y % heads * kTokens + t) * kTokens + key] : -1.0e30f;
      m = max(m, s[j]);
    }
    for (int step = 16; step > 0; step /= 2) m = max(m, __shfl_xor_sync(0xffffffff, m, step));
    for (int j = 0; j < 2; ++j) l += s[j] = expf(s[j] - m);
    for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(0xffffffff, l, step);
    for (int key = 0; key < kTokens; ++key) sum += __shfl_sync(0xffffffff, s[key / 32], key % 32) * values[key][lane];
    out[row + lane] = sum / l;
  }
}
