// The same additions. After every 32 floats one place is left free: float k lies at k + k / 32, so that strides of 2,
// 4, 8, ... floats reach different banks: 1-way in every round, for 7 floats more.
constexpr int kThreads = 256;

__device__ int place(int k) { return k + k / 32; }

extern "C" __global__ void scan(const float* x, float* out, int n) {
  __shared__ float part[kThreads + kThreads / 32 - 1];
  const int t = threadIdx.x, i = kThreads * blockIdx.x + t;
  const float own = i < n ? x[i] : 0.f;
  part[place(t)] = own;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int right = 2 * step * (t + 1) - 1;  // the last place of the thread's pair
    if (right < kThreads) part[place(right)] += part[place(right - step)];
    __syncthreads();
  }
  if (t == 0) part[place(kThreads - 1)] = 0.f;  // nothing comes before the whole
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    const int right = 2 * step * (t + 1) - 1;
    if (right < kThreads) {
      const float before = part[place(right)], left = part[place(right - step)];
      part[place(right - step)] = before;
      part[place(right)] = before + left;
    }
    __syncthreads();
  }
  if (i < n) out[i] = part[place(t)] + own;
}
