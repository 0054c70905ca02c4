// The whole x is scanned, and read once. A block publishes the sum of its tile and looks back over those before, 32 at
// a time: it adds up sums as far as the nearest tile that has published its prefix, the sum of all up to its end; then
// it publishes its own. (Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016.) A block
// draws its tile when it starts, so earlier tiles have started, too, and publish a sum without waiting: all waiting
// ends. The fences keep a flag behind its sum. drawn and flags are 0 at the start.
constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 4, kTile = kRows * kThreads, kSum = 1, kPrefix = 2;

__device__ float warp_scan(float sum, int lane) {
  for (int step = 1; step < 32; step *= 2) {
    const float before = __shfl_up_sync(0xffffffff, sum, step);
    if (lane >= step) sum += before;
  }
  return sum;
}

__device__ void publish(volatile int* flags, volatile float* sums, int tile, int flag, float sum) {
  sums[2 * tile + flag - 1] = sum;
  __threadfence();
  flags[tile] = flag;
}

__device__ float look_back(volatile int* flags, volatile float* sums, int tile, int lane) {
  float before = 0.f;
  unsigned prefixes = 0;  // a bit for each lane whose tile has one; so has what lies before the first tile
  for (int other = tile - 1 - lane; prefixes == 0; other -= 32) {
    int flag = 0;
    while (__any_sync(0xffffffff, flag == 0)) flag = other < 0 ? kPrefix : flags[other];
    __threadfence();
    prefixes = __ballot_sync(0xffffffff, flag == kPrefix);
    if (other >= 0 && (prefixes == 0 || lane < __ffs(prefixes))) before += sums[2 * other + flag - 1];
  }
  return __shfl_sync(0xffffffff, warp_scan(before, lane), 31);
}

extern "C" __global__ void scan(const float* x, float* out, int* drawn, volatile int* flags, volatile float* sums,
                                int n) {
  __shared__ float part[kWarps + 1];  // first the number of the tile, then what comes before each warp
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  if (t == 0) part[0] = atomicAdd(drawn, 1);
  __syncthreads();
  const int tile = part[0], first = kTile * tile + kRows * 32 * warp + lane;
  float own[kRows], sum = 0.f;
  for (int k = 0; k < kRows; ++k) own[k] = first + 32 * k < n ? x[first + 32 * k] : 0.f;
  for (int k = 0; k < kRows; ++k) {
    own[k] = warp_scan(own[k], lane) + sum;
    sum = __shfl_sync(0xffffffff, own[k], 31);
  }
  if (lane == 31) part[warp + 1] = sum;
  __syncthreads();
  if (warp == 0) {
    const float upto = warp_scan(lane > 0 && lane <= kWarps ? part[lane] : 0.f, lane);
    if (lane == 31) publish(flags, sums, tile, kSum, upto);
    const float before = look_back(flags, sums, tile, lane);
    if (lane == 31) publish(flags, sums, tile, kPrefix, before + upto);
    if (lane <= kWarps) part[lane] = before + upto;
  }
  __syncthreads();
  for (int k = 0; k < kRows; ++k)
    if (first + 32 * k < n) out[first + 32 * k] = own[k] + part[warp];
}
