// A tile of ROWS rows of HEAD_DIM numbers goes through shared memory and comes out with its rows in reverse order. So
// nothing is written before all has been read, as nothing is multiplied before a tile of K is there. While a block
// waits at its barrier, only other blocks of the multiprocessor can read or write; how many there are is what the bytes
// of a tile leave room for. -DROWS=64 -DHEAD_DIM=128 -DBYTES=4 are the compiler's, of floats; a number of 16 bits has
// BYTES 2. What moves is 16 bytes a thread, whatever is in them. Twice the head dim leaves half the rows, half the
// bytes leave twice as many; 48 KiB is the most that a block has without asking for more.
constexpr int kChunks = HEAD_DIM * BYTES / 16;  // of 16 bytes, in a row

extern "C" __global__ void reverse(const float* x, float* out, int n) {
  __shared__ float4 tile[ROWS * kChunks];
  const int first = ROWS * blockIdx.x, rows = min(ROWS, n - first);
  for (int i = threadIdx.x; i < rows * kChunks; i += blockDim.x) {
    tile[i] = reinterpret_cast<const float4*>(x)[first * kChunks + i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kChunks; i += blockDim.x) {
    const int row = rows - 1 - i / kChunks;
    reinterpret_cast<float4*>(out)[first * kChunks + i] = tile[row * kChunks + i % kChunks];
  }
}
