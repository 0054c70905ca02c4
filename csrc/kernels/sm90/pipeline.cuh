// What every kernel of this backend is built on: rings of tiles between a producer and its consumers, where shared
// memory begins, and how a block becomes one producer warpgroup and its consumers. Invariant: a ring's full barrier is
// completed by TMA, its empty barrier by one arrival of each warp of its consumers, after the wait that proves their
// wgmma finished.
#pragma once

#include "gpu/ptx.cuh"
#include "gpu/ptx/grid.cuh"
#include "gpu/tensor_map.h"
#include "kernels/sm90/descriptor.h"

namespace flash_ext::sm90 {

using cuda::BoxSteps, cuda::TensorMap;
static_assert(kPanelBytes == cuda::kBoxBytes);

// A place in a ring of stages. The consumer waits for full with `phase`, the producer for empty with the other one, so
// that its first round does not wait.
template <int kStages>
struct RingState {
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

// By one thread, before any other waits. writers, readers: how many arrive at a full and at an empty barrier.
template <int kBytes>
__device__ __forceinline__ void init_ring(const Ring<kBytes>& ring, int stages, int readers, int writers = 1) {
  for (int stage = 0; stage < stages; ++stage) {
    barrier_init(ring.full(stage), writers);
    barrier_init(ring.empty(stage), readers);
  }
}

// A warp's arrival; behind what proves that all its lanes have come so far.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// A tile of kRows rows, panel by panel; its barrier expects it already.
template <int kRows, int kPanels>
__device__ __forceinline__ void load_panels(uint32_t tile, uint32_t barrier, const TensorMap& map, BoxStart at) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load(tile + panel * panel_size(kRows), &map.map, barrier, at);
    at.col += kPanelCols;
  }
}

// A tile that is all there is in a stage.
template <int kRows, int kPanels, int kBytes>
__device__ __forceinline__ void load_tile(const Ring<kBytes>& ring, int i, const TensorMap& map, BoxStart at) {
  barrier_expect(ring.full(i), kBytes);
  load_panels<kRows, kPanels>(ring.tile(i), ring.full(i), map, at);
}

// Where the first tile lies.
__device__ __forceinline__ uint32_t tile_base() {
  return (shared_address(dynamic_shared()) + kTileAlign - 1) & ~(kTileAlign - 1);
}

// The next kernel may start, and what the one before wrote is there; barriers are initialised.
__device__ __forceinline__ void follow_previous_kernel() {
  grid_dependency_launch();
  grid_dependency_wait();
  __syncthreads();
}

// Which warpgroup this is, with so many registers a thread from here on: 0 is the producer's, others are consumers.
// NOTE: the same in all lanes, and the compiler knows.
template <int kProducerRegisters, int kConsumerRegisters>
__device__ __forceinline__ int enter_warpgroup() {
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 0) {
    fewer_registers<kProducerRegisters>();
  } else {
    more_registers<kConsumerRegisters>();
  }
  return warpgroup;
}

}  // namespace flash_ext::sm90
