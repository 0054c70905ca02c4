// Four floats an instruction on both sides. A row of the tile is 8 chunks of 16 bytes, and 8 threads read or write it:
// a quarter of a warp, which is how shared memory serves 16 bytes a thread. Chunk c of row y lies at c ^ (y / 4). A
// quarter warp that stores has one y, so all 8 chunks. To turn, a thread takes one float from each of 4 rows: its warp
// reads rows k, 4 + k, 8 + k, ... whose y / 4 differ, so 8 chunks again, and 4 floats of each: 32 banks, one pass.
constexpr int kTile = 32, kChunks = kTile / 4;

__device__ int place(int y, int x) { return (x / 4 ^ y / 4) * 4 + x % 4; }

// Where all 4 are inside and their address is a multiple of 16 bytes, one instruction; else what there is, one by one.
__device__ float4 load(const float* row, int x, int size) {
  if (size % 4 == 0 && x < size) return *reinterpret_cast<const float4*>(row + x);
  return make_float4(x < size ? row[x] : 0.f, x + 1 < size ? row[x + 1] : 0.f, x + 2 < size ? row[x + 2] : 0.f,
                     x + 3 < size ? row[x + 3] : 0.f);
}

__device__ void store(float* row, int x, int size, float4 v) {
  if (size % 4 == 0) {
    if (x < size) *reinterpret_cast<float4*>(row + x) = v;
    return;
  }
  if (x < size) row[x] = v.x;
  if (x + 1 < size) row[x + 1] = v.y;
  if (x + 2 < size) row[x + 2] = v.z;
  if (x + 3 < size) row[x + 3] = v.w;
}

extern "C" __global__ void transpose(const float* in, float* out, int rows, int columns) {
  __shared__ float4 tile[kTile][kChunks];
  const int first_row = kTile * blockIdx.y, first_column = kTile * blockIdx.x;
  const int x = 4 * threadIdx.x, y = threadIdx.y;

  if (first_row + y < rows) {
    const float4 v = load(in + (first_row + y) * columns, first_column + x, columns);
    tile[y][place(y, x) / 4] = v;
  }
  __syncthreads();
  if (first_column + y < columns) {
    const float* words = reinterpret_cast<const float*>(tile);
    const float a = words[kTile * x + place(x, y)], b = words[kTile * (x + 1) + place(x + 1, y)];
    const float c = words[kTile * (x + 2) + place(x + 2, y)], d = words[kTile * (x + 3) + place(x + 3, y)];
    store(out + (first_column + y) * rows, first_row + x, rows, make_float4(a, b, c, d));
  }
}
