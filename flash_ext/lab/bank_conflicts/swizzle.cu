// Stride 32 without padding: float k lies at k ^ (k / 32 % 32), within the same row of 32 words but at another bank in
// each row. Stores go along a row: 32 different banks. Loads go down a column: 32 different banks as well.
constexpr int kBlock = 1024, kStride = 32;

__device__ int place(int k) { return k ^ k / 32 % 32; }

extern "C" __global__ void gather(const float* in, float* out, int n) {
  __shared__ float tile[kBlock];
  const int first = kBlock * blockIdx.x;
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) tile[place(j)] = first + j < n ? in[first + j] : 0.f;
  __syncthreads();
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) {
    const int k = kStride * j % kBlock + kStride * j / kBlock;
    out[first + j] = tile[place(k)];
  }
}
