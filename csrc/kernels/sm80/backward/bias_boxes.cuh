// The gradient of a bias in bf16 out of the main backward kernel, where the device has TMA: dS of a pair of warps, 32
// keys by all queries of a tile, becomes rows of keys where their P was, and TMA stores it or adds it to what is there.
//
//   dbias[query, key] = sum over the batch elements that share the bias of dS^T[key, query]
//
// Batch elements that share it run one after the other, a launch each, so that the order of a sum is theirs. A sum is
// rounded to bf16 that many times; beyond kMostSums it has bias_gradient/kernel.cuh, a pass of its own that computes S
// and dP anew. NOTE: 4x16x4096x128, (1, 16, S, S): that pass takes 3.9 ms, what its operands take from L2, beside
// the 4.9 of the main kernel. Called by steps.cuh and run.cuh. Invariant: two boxes that add to the same element are
// never in flight together.
#pragma once

#include "kernels/sm80/backward/parts.cuh"
#include "kernels/sm80/boxes.cuh"

namespace flash_ext::sm80 {

constexpr int64_t kMostSums = 8;
constexpr int kDbiasCols = 32;  // of a box: a warp's keys, in 64 bytes

// `buffer`: where this warp's P lies, which it has read. Behind it: bulk_wait_read before P is written again.
template <class Frag, int kM, int kN>
__device__ __forceinline__ void send_dbias(const Operands<Frag, kM, kN>& ds, uint32_t buffer,
                                           const cuda::TensorMap& map, bool adds, BoxStart at) {
  static_assert(kM * 16 == kDbiasCols);
  const unsigned lane = no_hoist(threadIdx.x % 32), row = lane % 8;
  const uint32_t to = buffer + row * 64 + (lane / 8 ^ row / 2) * kChunkBytes;  // swizzled in 64 bytes
  __syncwarp();                                                                // all lanes have read P
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    stmatrix_x4_trans(to + n * 512, ds.row[0].word(2 * n), ds.row[0].word(2 * n + 1), ds.row[kM - 1].word(2 * n),
                      ds.row[kM - 1].word(2 * n + 1));
  }
  fence_async_proxy();
  __syncwarp();
  if (lane != 0) return;
  if (adds) {
    tma_add(&map.map, buffer, at);
  } else {
    tma_store(&map.map, buffer, at);
  }
  bulk_commit();
}

}  // namespace flash_ext::sm80
