// The block brings the window's keys and values to shared memory, a warp a token's 32 floats at a time: sectors are
// used whole, and each is read once. Queries, results and the bias are still a row a thread.
constexpr int kWindow = 7, kTokens = kWindow * kWindow, kDim = 32, kShift = 3;

__device__ int place(int window, int i) { return window * kWindow + i; }
__device__ int region(int at, int side) { return (at >= side - kWindow ? 1 : 0) + (at >= side - kShift ? 1 : 0); }

__device__ int row_of(int t, int x, int y, int side, int heads) {
  const int down = (place(y, t / kWindow) + kShift) % side, across = (place(x, t % kWindow) + kShift) % side;
  return ((blockIdx.y / heads * side + down) * side + across) * heads * kDim + blockIdx.y % heads * kDim;
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, const float* bias, float* out,
                                  int side, int heads) {
  __shared__ float keys[kTokens][kDim], values[kTokens][kDim];
  const int x = blockIdx.x % (side / kWindow), y = blockIdx.x / (side / kWindow), t = threadIdx.x;
  for (int key = threadIdx.x / kDim; key < kTokens; key += blockDim.x / kDim) {
    const int other = row_of(key, x, y, side, heads) + threadIdx.x % kDim;
    keys[key][threadIdx.x % kDim] = k[other];
    values[key][threadIdx.x % kDim] = v[other];
  }
  __syncthreads();
  if (t >= kTokens) return;
  const int row = row_of(t, x, y, side, heads);
  const int down = region(place(y, t / kWindow), side), across = region(place(x, t % kWindow), side);
  float mine[kDim], sum[kDim] = {}, m = -1.0e30f, l = 0.0f;
  for (int i = 0; i < kDim; ++i) mine[i] = q[row + i];
  for (int key = 0; key < kTokens; ++key) {
    float s = 0.0f;
    for (int i = 0; i < kDim; ++i) s += mine[i] * keys[key][i];
    s = s * 0.17677669f + bias[(blockIdx.y % heads * kTokens + t) * kTokens + key];  // 1 / sqrt(32)
    const bool seen = region(place(y, key / kWindow), side) == down && region(place(x, key % kWindow), side) == across;
    const float largest = seen ? max(m, s) : m, shrink = expf(m - largest), e = expf(s - largest);
    const float p = seen ? e : 0.0f;
    m = largest;
    l = l * shrink + p;
    for (int i = 0; i < kDim; ++i) sum[i] = sum[i] * shrink + p * values[key][i];
  }
  for (int i = 0; i < kDim; ++i) out[row + i] = sum[i] / l;
}
