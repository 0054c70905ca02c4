// Rings of tiles between a producer and consumers, used by forward and backward alike.
// Invariant: a ring's full barrier is completed by TMA, its empty barrier by one arrival of each warp of its consumers,
// after the wait that proves their wgmma finished.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/tensor_map.h"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

using cuda::BoxSteps, cuda::TensorMap;
static_assert(kPanelBytes == cuda::kBoxBytes);

// A place in a ring of stages. The consumer waits for full with `phase`, the producer for empty with the other one, so
// that its first round does not wait.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// `stages` tiles in shared memory, each with a full and an empty barrier.
template <int kStageBytes>
struct Ring {
  uint32_t tiles, barriers;

  __device__ __forceinline__ uint32_t tile(int stage) const { return tiles + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers + stage * 16 + 8; }
};

// One tile of `rows` rows into a stage, panel by panel.
template <int kRows, int kPanels, int kBytes>
__device__ __forceinline__ void load_tile(const Ring<kBytes>& ring, int i, const TensorMap& map, BoxStart at) {
  barrier_expect(ring.full(i), kBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(ring.tile(i) + panel * panel_size(kRows), &map.map, ring.full(i), at);
    at.col += kPanelCols;
  }
}

}  // namespace flash_ext::sm90
