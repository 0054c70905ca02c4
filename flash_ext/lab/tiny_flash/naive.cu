// Softmax as the formula says it: the largest score, then the sum, then the weighted mean of v. A thread has a row of q
// in its registers and computes each score three times, so that the matrix of scores is nowhere in memory.
constexpr int kDim = 64;

__device__ float score(const float* q, const float* k) {
  float s = 0.0f;
  for (int i = 0; i < kDim; ++i) s += q[i] * k[i];
  return s * 0.125f;  // 1 / sqrt(64)
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, int tokens) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, head = blockIdx.y * tokens * kDim;
  if (row >= tokens) return;
  float mine[kDim], mean[kDim] = {}, m = -1.0e30f, l = 0.0f;
  for (int i = 0; i < kDim; ++i) mine[i] = q[head + row * kDim + i];
  for (int key = 0; key < tokens; ++key) m = max(m, score(mine, k + head + key * kDim));
  for (int key = 0; key < tokens; ++key) l += expf(score(mine, k + head + key * kDim) - m);
  for (int key = 0; key < tokens; ++key) {
    const float p = expf(score(mine, k + head + key * kDim) - m) / l;
    for (int i = 0; i < kDim; ++i) mean[i] += p * v[head + key * kDim + i];
  }
  for (int i = 0; i < kDim; ++i) out[head + row * kDim + i] = mean[i];
}
