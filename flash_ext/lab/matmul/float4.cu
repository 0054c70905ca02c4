// The 4 columns of a thread are neighbours now, and so are its rows: 16 bytes an instruction from global memory and
// from shared memory, where 2 requests feed 16 multiplications. For 4 rows to be neighbours, the tile of a is turned
// when it is stored, with 68 floats a row: 64 would be 4-way there, and 16 bytes have to stay aligned, so 2-way it is.
constexpr int kTile = 64, kPitch = kTile + 4, kDepth = 16;

// Where 4 floats of a row of `size` are aligned, one instruction; else what there is, one by one.
__device__ float4 load(const float* row, int i, int size) {
  if (size % 4 == 0 && i < size) return *reinterpret_cast<const float4*>(row + i);
  return make_float4(i < size ? row[i] : 0.f, i + 1 < size ? row[i + 1] : 0.f, i + 2 < size ? row[i + 2] : 0.f,
                     i + 3 < size ? row[i + 3] : 0.f);
}

__device__ float4 add(float4 sum, float x, float4 y) {
  return make_float4(sum.x + x * y.x, sum.y + x * y.y, sum.z + x * y.z, sum.w + x * y.w);
}

__device__ void store(float* row, int i, int size, float4 v) {
  if (size % 4 == 0 && i < size) *reinterpret_cast<float4*>(row + i) = v;
  if (size % 4 == 0) return;
  if (i < size) row[i] = v.x;
  if (i + 1 < size) row[i + 1] = v.y;
  if (i + 2 < size) row[i + 2] = v.z;
  if (i + 3 < size) row[i + 3] = v.w;
}

extern "C" __global__ void matmul(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float4 x[kDepth][kPitch / 4], y[kDepth][kTile / 4];
  float* turned = reinterpret_cast<float*>(x);
  const int t = threadIdx.x, column = kTile * blockIdx.x + 4 * (t % 16), row = kTile * blockIdx.y + 4 * (t / 16);
  const int load_row = kTile * blockIdx.y + t / 4, across = 4 * (t % 4);
  float4 sum[4] = {};
  for (int first = 0; first < k; first += kDepth) {
    const float4 v = load(a + load_row * k, first + across, load_row < m ? k : 0);
    turned[kPitch * across + t / 4] = v.x;
    turned[kPitch * (across + 1) + t / 4] = v.y;
    turned[kPitch * (across + 2) + t / 4] = v.z;
    turned[kPitch * (across + 3) + t / 4] = v.w;
    y[t / 16][t % 16] = load(b + (first + t / 16) * n, column, first + t / 16 < k ? n : 0);
    __syncthreads();
    for (int deep = 0; deep < kDepth; ++deep) {
      const float4 down = x[deep][t / 16], line = y[deep][t % 16];
      sum[0] = add(sum[0], down.x, line);
      sum[1] = add(sum[1], down.y, line);
      sum[2] = add(sum[2], down.z, line);
      sum[3] = add(sum[3], down.w, line);
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) store(c + (row + i) * n, column, row + i < m ? n : 0, sum[i]);
}
