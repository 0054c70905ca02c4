// A block has 64 rows, and brings a tile of 32 keys and values to shared memory once for all of them (Dao et al. 2022).
// All threads of a warp read the same key at the same time, which one pass serves. The sums shrink once a tile.
constexpr int kDim = 64, kKeys = 32;

// The tile's rows from `first` on; what is behind the last one is 0.
__device__ void fill(float4* to, const float* from, int first, int tokens) {
  for (int i = threadIdx.x; i < kKeys * kDim / 4; i += blockDim.x) {
    const int row = first + i / (kDim / 4), at = row * kDim / 4 + i % (kDim / 4);
    to[i] = row < tokens ? reinterpret_cast<const float4*>(from)[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, int tokens) {
  __shared__ float4 keys[kKeys][kDim / 4], values[kKeys][kDim / 4];
  const int row = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y * tokens * kDim;
  float mine[kDim], sum[kDim] = {}, m = -1.0e30f, l = 0.0f;
  for (int i = 0; i < kDim; ++i) mine[i] = row < tokens ? q[head + row * kDim + i] : 0.0f;
  for (int first = 0; first < tokens; first += kKeys) {
    __syncthreads();
    fill(&keys[0][0], k + head, first, tokens);
    fill(&values[0][0], v + head, first, tokens);
    __syncthreads();
    float s[kKeys] = {}, largest = m;
    for (int key = 0; key < kKeys; ++key) {
      for (int i = 0; i < kDim / 4; ++i) {
        const float4 x = keys[key][i];
        s[key] += mine[4 * i] * x.x + mine[4 * i + 1] * x.y + mine[4 * i + 2] * x.z + mine[4 * i + 3] * x.w;
      }
      s[key] = first + key < tokens ? s[key] * 0.125f : -1.0e30f;  // 1 / sqrt(64)
      largest = max(largest, s[key]);
    }
    const float shrink = expf(m - largest);
    m = largest;
    l *= shrink;
    for (int i = 0; i < kDim; ++i) sum[i] *= shrink;
    for (int key = 0; key < kKeys; ++key) {
      const float p = expf(s[key] - m);
      l += p;
      for (int i = 0; i < kDim; ++i) sum[i] += p * reinterpret_cast<const float*>(&values[key][0])[i];
    }
  }
  for (int i = 0; i < kDim && row < tokens; ++i) out[head + row * kDim + i] = sum[i] / l;
}
