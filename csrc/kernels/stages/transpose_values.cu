// A block takes kKeysOfGroup keys of a head, up to 128 columns at a time: rows come in through shared memory by 16
// bytes, and go out as bytes of 16 keys, of four columns a thread.
#include "gpu/host/launch.h"
#include "kernels/stages/transpose_values.h"

namespace flash_ext::cuda {
namespace {

constexpr int kThreads = 256, kCols = 128;  // columns of a turn

// Of a word (four columns) of a key's row in shared memory: what 8 lanes read of keys 16 apart lies in different banks.
__device__ __forceinline__ int word_at(int key, int word) { return key * (kCols / 4) + (word ^ (key / 16 % 8 * 4)); }

// x[i]: four columns of key i; afterwards of column i four keys.
__device__ __forceinline__ void transpose_bytes(uint32_t (&x)[4]) {
  const uint32_t low = __byte_perm(x[0], x[1], 0x5140), high = __byte_perm(x[0], x[1], 0x7362);
  const uint32_t low_23 = __byte_perm(x[2], x[3], 0x5140), high_23 = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(low, low_23, 0x5410);
  x[1] = __byte_perm(low, low_23, 0x7632);
  x[2] = __byte_perm(high, high_23, 0x5410);
  x[3] = __byte_perm(high, high_23, 0x7632);
}

__global__ void __launch_bounds__(kThreads)
    transpose_values_kernel(const __grid_constant__ ForwardArgs args, char* to, int64_t keys) {
  __shared__ uint32_t words[kKeysOfGroup * kCols / 4];
  const Problem& problem = args.problem;
  const int64_t groups = keys / kKeysOfGroup, bh = blockIdx.x / groups;
  const int64_t first = blockIdx.x % groups * kKeysOfGroup;
  const int64_t b = bh / problem.heads_v, head = bh % problem.heads_v;
  const char* const from =
      static_cast<const char*>(args.v.data) + batch_offset(problem, args.v, b) + head * args.v.head_stride;
  const int thread = static_cast<int>(threadIdx.x), cols = static_cast<int>(problem.head_dim_v);
  for (int col = 0; col < cols; col += kCols) {
    const int here = min(cols - col, kCols);
    for (int i = thread; i < kKeysOfGroup * kCols / 16; i += kThreads) {
      const int key = i / (kCols / 16), chunk = i % (kCols / 16);
      if (chunk * 16 >= here) continue;
      uint4 x = {};
      if (first + key < problem.len_k) {
        x = *reinterpret_cast<const uint4*>(from + (first + key) * args.v.row_stride + col + chunk * 16);
      }
      *reinterpret_cast<uint4*>(words + word_at(key, chunk * 4)) = x;
    }
    __syncthreads();
    for (int i = thread; i < kKeysOfGroup / 16 * kCols / 4; i += kThreads) {
      const int part = i % (kKeysOfGroup / 16), word = i / (kKeysOfGroup / 16);  // of 16 keys, of four columns
      if (word * 4 >= here) continue;
      uint32_t rows[4][4];  // [columns][keys]
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = words[word_at(part * 16 + 2 * t + k / 2 * 8 + k % 2, word)];
        transpose_bytes(x);
#pragma unroll
        for (int k = 0; k < 4; ++k) rows[k][t] = x[k];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        char* const row = to + (bh * cols + col + word * 4 + k) * keys + first + part * 16;
        *reinterpret_cast<uint4*>(row) = make_uint4(rows[k][0], rows[k][1], rows[k][2], rows[k][3]);
      }
    }
    __syncthreads();
  }
}

}  // namespace

void transpose_values(const ForwardArgs& args, void* to) {
  const Problem& problem = args.problem;
  const int64_t keys = transposed_keys(problem), blocks = problem.batch * problem.heads_v * (keys / kKeysOfGroup);
  launch(transpose_values_kernel, grid_of(blocks), kThreads, 0, args.stream, args, static_cast<char*>(to), keys);
}

}  // namespace flash_ext::cuda
