// 16 bytes a thread: a warp wants 512 bytes, and 32 banks have 128 in a pass. So the request takes four passes whatever
// one does, a quarter of the warp in each. Threads t and t + 8 use the same banks, but they are in different quarters
// and do not conflict. Only inside a quarter do banks have to differ.
constexpr int kBlock = 1024;

extern "C" __global__ void gather(const float* in, float* out, int n) {
  __shared__ float4 tile[kBlock / 4];
  const int first = kBlock * blockIdx.x, chunk = threadIdx.x, k = first + 4 * chunk;
  if (k + 3 < n) {
    tile[chunk] = reinterpret_cast<const float4*>(in)[k / 4];
  } else {
    tile[chunk] = make_float4(k < n ? in[k] : 0.f, k + 1 < n ? in[k + 1] : 0.f, k + 2 < n ? in[k + 2] : 0.f, 0.f);
  }
  __syncthreads();
  const int other = chunk ^ 1;  // a neighbour's
  reinterpret_cast<float4*>(out + first)[chunk] = tile[other];
}
