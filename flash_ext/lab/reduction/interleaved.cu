// A block adds up 256 floats in shared memory, in 8 rounds: pairs of neighbours, then pairs of these sums, and so on.
// Each sum stays where its first part was, so the threads that still work touch every 2nd, 4th, 8th, ... word: 2, 4,
// then 8 of them want the same bank.
constexpr int kThreads = 256;

extern "C" __global__ void sums(const float* x, float* out, int n) {
  __shared__ float part[kThreads];
  const int t = threadIdx.x, i = kThreads * blockIdx.x + t;
  part[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int k = 2 * step * t;
    if (k < kThreads) part[k] += part[k + step];
    __syncthreads();
  }
  if (t == 0) out[blockIdx.x] = part[0];
}
