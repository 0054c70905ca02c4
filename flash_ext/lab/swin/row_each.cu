// A block has a window and a head, a thread a query of the 7 x 7. Nothing is copied together: each thread finds its
// tokens in the image. With -DSHIFT=0 windows lie side by side. With -DSHIFT=3 they are shifted in an image that goes
// around, and tokens from both ends of it do not see each other; `region` says which end. A thread's row of the bias
// lies 49 floats behind its neighbour's.
constexpr int kWindow = 7, kTokens = kWindow * kWindow, kDim = 32, kShift = SHIFT;

__device__ int place(int window, int i) { return window * kWindow + i; }
__device__ int region(int at, int side) {
  return kShift == 0 ? 0 : (at >= side - kWindow ? 1 : 0) + (at >= side - kShift ? 1 : 0);
}

// Of token t of the window at (x, y): where its 32 floats of a head begin.
__device__ int row_of(int t, int x, int y, int side, int heads) {
  const int down = (place(y, t / kWindow) + kShift) % side, across = (place(x, t % kWindow) + kShift) % side;
  return ((blockIdx.y / heads * side + down) * side + across) * heads * kDim + blockIdx.y % heads * kDim;
}

extern "C" __global__ void attend(const float* q, const float* k, const float* v, const float* bias, float* out,
                                  int side, int heads) {
  const int x = blockIdx.x % (side / kWindow), y = blockIdx.x / (side / kWindow), t = threadIdx.x;
  if (t >= kTokens) return;
  const int row = row_of(t, x, y, side, heads);
  const int down = region(place(y, t / kWindow), side), across = region(place(x, t % kWindow), side);
  float mine[kDim], sum[kDim] = {}, m = -1.0e30f, l = 0.0f;
  for (int i = 0; i < kDim; ++i) mine[i] = q[row + i];
  for (int key = 0; key < kTokens; ++key) {
    const int other = row_of(key, x, y, side, heads);
    float s = 0.0f;
    for (int i = 0; i < kDim; ++i) s += mine[i] * k[other + i];
    s = s * 0.17677669f + bias[(blockIdx.y % heads * kTokens + t) * kTokens + key];  // 1 / sqrt(32)
    const bool seen = region(place(y, key / kWindow), side) == down && region(place(x, key % kWindow), side) == across;
    const float largest = seen ? max(m, s) : m, shrink = expf(m - largest), e = expf(s - largest);
    const float p = seen ? e : 0.0f;
    m = largest;
    l = l * shrink + p;
    for (int i = 0; i < kDim; ++i) sum[i] = sum[i] * shrink + p * v[other + i];
  }
  for (int i = 0; i < kDim; ++i) out[row + i] = sum[i] / l;
}
