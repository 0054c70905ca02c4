// The same rounds with other pairs: the second half is added to the first, then the second quarter to the first, and so
// on. The order of a sum is free, so take the one in which neighbours touch neighbours: no conflicts. (Floats are
// rounded, so another order gives other last bits.)
constexpr int kThreads = 256;

extern "C" __global__ void sums(const float* x, float* out, int n) {
  __shared__ float part[kThreads];
  const int t = threadIdx.x, i = kThreads * blockIdx.x + t;
  part[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = part[0];
}
