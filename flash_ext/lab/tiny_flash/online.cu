// One pass over the keys: where a larger score comes, what was summed so far shrinks by e to the old largest minus the
// new one. Each score is computed once (Milakov & Gimelshein 2018).
constexpr int kDim = 64;

__device__ float score(const float* q, const float* k) {
  float s = 0.0f;
  for (int i = 0; i < kDim; ++i) s += q[i] * k[i];
  return s * 0.125f;  // 1 / sqrt(64)
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, int tokens) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y * tokens * kDim;
  if (row >= tokens) return;
  float mine[kDim], sum[kDim] = {}, m = -1.0e30f, l = 0.0f;
  for (int i = 0; i < kDim; ++i) mine[i] = q[head + row * kDim + i];
  for (int key = 0; key < tokens; ++key) {
    const float s = score(mine, k + head + key * kDim), largest = max(m, s);
    const float shrink = expf(m - largest), p = expf(s - largest);
    m = largest;
    l = l * shrink + p;
    for (int i = 0; i < kDim; ++i) sum[i] = sum[i] * shrink + p * v[head + key * kDim + i];
  }
  for (int i = 0; i < kDim; ++i) out[head + row * kDim + i] = sum[i] / l;
}
