// A warp has a row, each of its threads two columns: no thread holds 128 numbers, and every load is of neighbours. A
// score is now a sum over the warp, five shuffles for each key.
constexpr int kDim = 64;

extern "C" __global__ void attend(const float* q, const float* k, const float* v, float* out, int tokens) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y, head = blockIdx.y * tokens * kDim;
  if (row >= tokens) return;
  const float2* keys = reinterpret_cast<const float2*>(k + head) + threadIdx.x;
  const float2* values = reinterpret_cast<const float2*>(v + head) + threadIdx.x;
  const float2 mine = reinterpret_cast<const float2*>(q + head + row * kDim)[threadIdx.x];
  float2 sum = make_float2(0.0f, 0.0f);
  float m = -1.0e30f, l = 0.0f;
  for (int key = 0; key < tokens; ++key) {
    const float2 column = keys[key * kDim / 2], value = values[key * kDim / 2];
    float s = mine.x * column.x + mine.y * column.y;
    for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffff, s, step);
    s *= 0.125f;  // 1 / sqrt(64)
    const float largest = max(m, s), shrink = expf(m - largest), p = expf(s - largest);
    m = largest;
    l = l * shrink + p;
    sum = make_float2(sum.x * shrink + p * value.x, sum.y * shrink + p * value.y);
  }
  reinterpret_cast<float2*>(out + head + row * kDim)[threadIdx.x] = make_float2(sum.x / l, sum.y / l);
}
