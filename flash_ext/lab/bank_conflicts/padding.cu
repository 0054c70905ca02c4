// Stride 32, and after every 32 floats one place is left free: float k lies at k + k / 32. A step of 32 floats is now
// one of 33 words, so the 32 threads reach 32 banks. Padding takes memory, here 31 floats of 1055.
constexpr int kBlock = 1024, kStride = 32;

__device__ int place(int k) { return k + k / 32; }

extern "C" __global__ void gather(const float* in, float* out, int n) {
  __shared__ float tile[kBlock + kBlock / 32 - 1];
  const int first = kBlock * blockIdx.x;
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) tile[place(j)] = first + j < n ? in[first + j] : 0.f;
  __syncthreads();
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) {
    const int k = kStride * j % kBlock + kStride * j / kBlock;
    out[first + j] = tile[place(k)];
  }
}
