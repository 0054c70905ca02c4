// The product that every kernel of this backend begins with: S = Q K^T in forward, S^T = K Q^T, dP^T = V dO^T and the
// like in backward. Called by forward/parts.cuh and backward/products.cuh. Invariant: it does not wait; what wgmma
// reads stays as it is until its wait.
#pragma once

#include "gpu/wgmma.cuh"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

// c = A B^T of 64 rows of a tile of kRowsA rows and a tile of kRowsB, both K-major, not waited for. The
// first kSteps steps of 16 columns of A come from registers, `fragments`.
template <class T, int kRowsA, int kRowsB, int kHeadDim, int kSteps = 0>
__device__ __forceinline__ void issue_scores(float (&c)[kRowsB / 2], uint64_t a, uint32_t b_tile,
                                             const uint32_t* fragments = nullptr) {
  const uint64_t b = k_major(b_tile);
  if constexpr (kHeadDim > 256) {
    // NOTE: all descriptors at once spilled; and without the fences ptxas adds some (C7519).
#pragma unroll 1
    for (int first = 0; first < kHeadDim / 16; first += kPanelCols / 16) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kPanelCols / 16; ++k) {
        Wgmma<T, kRowsB>::ss(c, a + k_major_step(kRowsA, first) + k_major_step(kRowsA, k),
                             b + k_major_step(kRowsB, first) + k_major_step(kRowsB, k), first + k > 0);
      }
    }
    wgmma_fence();
  } else {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      if (k < kSteps) {
        Wgmma<T, kRowsB>::template rs<0>(c, fragments + 4 * k, b + k_major_step(kRowsB, k), k > 0);
      } else {
        Wgmma<T, kRowsB>::ss(c, a + k_major_step(kRowsA, k), b + k_major_step(kRowsB, k), k > 0);
      }
    }
  }
  wgmma_commit();
}

}  // namespace flash_ext::sm90
