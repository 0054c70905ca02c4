// The products of backward, and how the consumers of all its kernels walk over tiles.
//
//   issue_next_scores   S^T = K Q^T or dP^T = V dO^T      (rows are queries in the second of two passes: S, dP)
//   issue_gradient      dV += P^T dO, dK += dS^T Q or dQ += dS K
//
// Called by steps.cuh, backward_two_pass and bias_gradient/kernel.cuh. Invariant: none waits; what wgmma reads stays as
// it is until its wait.
#pragma once

#include <type_traits>

#include "kernels/sm90/pipeline.cuh"
#include "kernels/sm90/products.cuh"

namespace flash_ext::sm90 {

// Columns [0, 16 kSteps) of 16 rows of a warp, as wgmma takes them from registers.
template <int kRows, int kSteps>
__device__ __forceinline__ void load_fragments(uint32_t* fragments, uint32_t tile, int warp_row) {
  const int row = warp_row + threadIdx.x % 16, col = threadIdx.x % 32 / 16 * 8;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t step[4];
    ldmatrix_x4(step, tile + tile_offset(kRows, row, 16 * k + col));
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[4 * k + i] = step[i];
  }
}

// issue_scores() of B in a ring, when it is there; the first kSteps steps of A from `fragments`.
template <class T, int kRowsA, int kRowsB, int kHeadDim, int kSteps = 0, class Ring, class Place>
__device__ __forceinline__ void issue_next_scores(float (&c)[kRowsB / 2], uint64_t a, const Ring& ring,
                                                  const Place& place, const uint32_t* fragments = nullptr) {
  barrier_wait(ring.full(place.stage), place.phase);
  wgmma_fence();
  issue_scores<T, kRowsA, kRowsB, kHeadDim, kSteps>(c, a, ring.tile(place.stage), fragments);
}

// c += A B, A from registers, B kCols columns of a stage of kRows rows from `first_panel` on: dV += P^T dO, dK += dS^T
// Q or dQ += dS K, not waited for.
template <class T, int kRows, int kCols, class Ring>
__device__ __forceinline__ void issue_gradient(float (&c)[kCols / 2], uint32_t (&a)[kRows / 4], const Ring& ring,
                                               int stage, int first_panel = 0) {
  fence_registers(a);
  fence_registers(c);
  wgmma_fence();
  const uint64_t b = mn_major(ring.tile(stage) + first_panel * panel_size(kRows), kRows);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) Wgmma<T, kCols>::rs(c, a + 4 * k, b + mn_major_step(k), 1);
  wgmma_commit();
}

// step(kLast) for each of `count` > 0 tiles.
template <class Step>
__device__ __forceinline__ void for_tiles(int count, const Step& step) {
  for (; count > 1; --count) step(std::false_type());
  step(std::true_type());
}

// The tile of queries that a consumer is at, head after head.
struct QueryPlace {
  int m, head;
  __device__ __forceinline__ void advance(int first_m, int last_m) {
    if (++m == last_m) {
      m = first_m;
      ++head;
    }
  }
};

// A warp hands a stage of Q and one of dO back. Its products have been waited for.
template <class Ring, class OutRing, class Place>
__device__ __forceinline__ void release_queries(const Ring& q, const OutRing& d_out, const Place& place) {
  __syncwarp();  // all lanes have read their lse and delta
  if (threadIdx.x % 32 == 0) {
    barrier_arrive(q.empty(place.stage));
    barrier_arrive(d_out.empty(place.stage));
  }
}

}  // namespace flash_ext::sm90
