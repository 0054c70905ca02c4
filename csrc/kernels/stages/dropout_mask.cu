// The operator dropout_mask on a GPU: the map of core/dropout.h, for tests and for `chunked`.
//
//   out[n, i, j] = keep(n0 + n, q0 + i, k0 + j)      out [batch_heads, rows, cols] contiguous
//
// A thread draws the eight numbers of one lane of one 16x16 block, as the attention kernels do, and writes those of
// them that lie inside; the origin need not be a multiple of 16. Called by torch/dropout_mask.cpp.
#include "core/dropout.h"
#include "core/library.h"
#include "gpu/host/launch.h"

namespace flash_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 32;

// Blocks of 16x16 that [first, first + size) touches.
FLASH_DEVICE int64_t blocks_of(int64_t first, int64_t size) { return (first + size + 15) / 16 - first / 16; }

struct Window {
  int64_t batch_heads, rows, cols, q0, k0, n0;
};

__global__ void __launch_bounds__(kThreads)
    dropout_mask_kernel(const int64_t* rng_state, double p, Window window, bool* out) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t col_blocks = blocks_of(window.k0, window.cols);
  const int64_t row_blocks = blocks_of(window.q0, window.rows);
  const int64_t bh = item / (row_blocks * col_blocks);
  if (bh >= window.batch_heads) return;
  const int64_t q16 = window.q0 / 16 + item / col_blocks % row_blocks;
  const int64_t k16 = window.k0 / 16 + item % col_blocks;
  const uint32_t lane = threadIdx.x % kLanes;
  const Dropout dropout = make_dropout(rng_state[0], rng_state[1], p);
  const PhiloxWords<uint32_t> words = dropout.block_words(static_cast<uint32_t>(window.n0 + bh),
                                                          static_cast<uint32_t>(q16), static_cast<uint32_t>(k16), lane);
#pragma unroll
  for (int number = 0; number < 8; ++number) {
    const int word = number / 2, half = number % 2;
    const int64_t i = q16 * 16 + lane / 4 + word % 2 * 8 - window.q0;
    const int64_t j = k16 * 16 + lane % 4 * 2 + word / 2 * 8 + half - window.k0;
    if (i >= 0 && i < window.rows && j >= 0 && j < window.cols) {
      out[(bh * window.rows + i) * window.cols + j] = dropout.keeps(words.word[word] >> 16 * half & 0xFFFFu);
    }
  }
}

}  // namespace

void cuda_dropout_mask(const int64_t* rng_state, double p, int64_t batch_heads, int64_t rows, int64_t cols, int64_t q0,
                       int64_t k0, int64_t n0, bool* out, void* stream) {
  if (batch_heads * rows * cols == 0) return;
  const int64_t blocks = batch_heads * blocks_of(q0, rows) * blocks_of(k0, cols);
  const int64_t per_cta = kThreads / kLanes;
  cuda::launch(dropout_mask_kernel, cuda::grid_of((blocks + per_cta - 1) / per_cta), kThreads, 0, stream, rng_state, p,
               Window{batch_heads, rows, cols, q0, k0, n0}, out);
}

}  // namespace flash_ext
