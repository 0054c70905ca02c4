// Fewer additions, more rounds. On the way up pairs are added, as a sum of all needs it: 255 additions, and every 2nd,
// 4th, 8th, ... place keeps the sum of its part. On the way down each part tells its halves what comes before them: the
// left one what comes before both, the right one that and the sum of the left, 255 additions. What comes before t, and
// x[t], is the result. 766 additions are nearly 3 a float, and would be for a longer stretch. The price: twice the
// rounds, and strides of 2, 4, 8, ... words, where 2, 4, then 8 threads want the same bank. (Blelloch, Prefix sums and
// their applications, 1990.)
constexpr int kThreads = 256;

extern "C" __global__ void scan(const float* x, float* out, int n) {
  __shared__ float part[kThreads];
  const int t = threadIdx.x, i = kThreads * blockIdx.x + t;
  const float own = i < n ? x[i] : 0.f;
  part[t] = own;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    const int right = 2 * step * (t + 1) - 1;  // the last place of the thread's pair
    if (right < kThreads) part[right] += part[right - step];
    __syncthreads();
  }
  if (t == 0) part[kThreads - 1] = 0.f;  // nothing comes before the whole
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    const int right = 2 * step * (t + 1) - 1;
    if (right < kThreads) {
      const float before = part[right], left = part[right - step];
      part[right - step] = before;
      part[right] = before + left;
    }
    __syncthreads();
  }
  if (i < n) out[i] = part[t] + own;
}
