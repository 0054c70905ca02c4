// A block keeps 1024 floats in shared memory and takes them out with a stride: thread j takes float STRIDE * j, and
// when the end is reached, it goes on one further. (Seen as a matrix of STRIDE columns, it reads column after column.)
// Word w lies in bank w % 32. With a stride S of 2, 4, 8, ... the threads of a warp reach only 32 / S banks, so S
// threads want different words of the same bank, and shared memory serves them one after the other: an S-way conflict.
// STRIDE is the compiler's -DSTRIDE=1, 2, 4, 8 or 32.
constexpr int kBlock = 1024;

extern "C" __global__ void gather(const float* in, float* out, int n) {
  __shared__ float tile[kBlock];
  const int first = kBlock * blockIdx.x;
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) tile[j] = first + j < n ? in[first + j] : 0.f;
  __syncthreads();
  for (int j = threadIdx.x; j < kBlock; j += blockDim.x) {
    const int k = STRIDE * j % kBlock + STRIDE * j / kBlock;
    out[first + j] = tile[k];
  }
}
