// A block makes all sums of its 256 floats: out[t] = x[0] + ... + x[t]. In round r each thread adds what lies 1, 2, 4,
// 8, ... places before its own, which by then is the sum of as many floats. 8 rounds are few, but nearly every thread
// adds in each: 1793 additions, where one thread alone would do with 255. A round reads one copy and writes the other,
// so that one barrier a round is enough.
constexpr int kThreads = 256;

extern "C" __global__ void scan(const float* x, float* out, int n) {
  __shared__ float part[2][kThreads];
  const int t = threadIdx.x, i = kThreads * blockIdx.x + t;
  int now = 0;
  part[now][t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int step = 1; step < kThreads; step *= 2) {
    float sum = part[now][t];
    if (t >= step) sum += part[now][t - step];
    now = 1 - now;
    part[now][t] = sum;
    __syncthreads();
  }
  if (i < n) out[i] = part[now][t];
}
