// Tensor cores compute both products; a warp has 16 rows, and P never leaves its registers. mma.sync gives a thread the
// keys 2 t and 2 t + 1 of a row, and wants t and t + 4 of its left matrix. The order of keys does not matter in a sum,
// so P is taken as it lies, and rows of v in the order that fits. Rows of 68 floats keep a warp's loads in 32 banks.
#include "ptx.cuh"

constexpr int kDim = 64, kKeys = 32, kPitch = kDim + 4;

extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, int tokens) {
  __shared__ float4 tiles[2 * kKeys * kPitch / 4];
  const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float* rows = reinterpret_cast<const float*>(tiles);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, head = blockIdx.y * tokens * kDim;
  const int row = blockIdx.x * 64 + threadIdx.x / 32 * 16 + g;  // and row + 8
  float mine[kDim / 8][4], sum[kDim / 8][4] = {}, l[2] = {}, m[2], b[2], p[4];
  for (int i = 0; i < kDim / 2; ++i) {
    const int at = (row + i % 2 * 8) * kDim + i / 4 * 8 + i / 2 % 2 * 4 + t;
    mine[i / 4][i % 4] = row + i % 2 * 8 < tokens ? to_tf32(q[head + at] * 0.125f) : 0.0f;  // 1 / sqrt(64)
    m[i % 2] = -1.0e30f;
  }
  for (int first = 0; first < tokens; first += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * kDim / 4; i += blockDim.x) {
      const int to = i / (kDim / 4) * kPitch / 4 + i % (kDim / 4), from = (head + first * kDim) / 4 + i;
      const bool inside = from < (head + tokens * kDim) / 4;
      tiles[to] = inside ? reinterpret_cast<const float4*>(k)[from] : zeros;
      tiles[kKeys * kPitch / 4 + to] = inside ? reinterpret_cast<const float4*>(v)[from] : zeros;
    }
    __syncthreads();
    float s[kKeys / 8][4] = {};
    for (int i = 0; i < kKeys / 8 * kDim / 8; ++i) {
      for (int j = 0; j < 2; ++j) b[j] = to_tf32(rows[(i / 8 * 8 + g) * kPitch + i % 8 * 8 + j * 4 + t]);
      mma_tf32(s[i / 8], mine[i % 8], b);
    }
    for (int h = 0; h < 4; h += 2) {  // the rows g and g + 8
      float largest = m[h / 2];
      for (int i = 0; i < kKeys / 4; ++i) {
        if (first + i / 2 * 8 + 2 * t + i % 2 >= tokens) s[i / 2][h + i % 2] = -1.0e30f;
        largest = max(largest, s[i / 2][h + i % 2]);
      }
      for (int step = 1; step < 4; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
      const float shrink = expf(m[h / 2] - largest);
      m[h / 2] = largest;
      l[h / 2] *= shrink;
      for (int i = 0; i < kKeys / 4; ++i) l[h / 2] += s[i / 2][h + i % 2] = expf(s[i / 2][h + i % 2] - largest);
      for (int i = 0; i < kDim / 4; ++i) sum[i / 2][h + i % 2] *= shrink;
    }
    for (int i = 0; i < kKeys / 8 * kDim / 8; ++i) {
      for (int j = 0; j < 4; ++j) p[j] = to_tf32(s[i / 8][j / 2 + j % 2 * 2]);
      for (int j = 0; j < 2; ++j) b[j] = to_tf32(rows[(kKeys + i / 8 * 8 + 2 * t + j) * kPitch + i % 8 * 8 + g]);
      mma_tf32(sum[i % 8], p, b);
    }
  }
  for (int h = 0; h < 4; h += 2) {
    for (int step = 1; step < 4; step *= 2) l[h / 2] += __shfl_xor_sync(0xffffffff, l[h / 2], step);
    float* to = out + head + (row + 4 * h) * kDim + 2 * t;
    for (int i = 0; i < kDim / 4 && row + 4 * h < tokens; ++i) to[i / 2 * 8 + i % 2] = sum[i / 2][h + i % 2] / l[h / 2];
  }
}
