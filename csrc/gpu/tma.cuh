// Tiles by TMA (compute capability 9.0 and above): mbarriers, the copies of boxes that they wait for, and boxes that
// are stored. Thin wrappers, each of which names its instruction. Shared-memory addresses are 32-bit offsets of the
// shared window.
//
// Called by the kernels of sm80/ and sm90/; tests/cpp/emulated/gpu/tma.cuh has the same names for the host.
// Invariant: every wait is on a barrier of this block; with FLASH_EXT_BOUNDED_WAITS it traps instead of hanging.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_ext::cuda {

// ---- mbarrier -------------------------------------------------------------------------------------------------------

// mbarrier.init.shared::cta.b64
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// fence.mbarrier_init: TMA sees the initialised barriers.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive.shared::cta.b64
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// mbarrier.arrive.expect_tx: the phase also needs `bytes` of TMA, those out of bounds included.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// mbarrier.try_wait.parity: whether the phase of this parity is complete; suspends for a while before it says no.
__device__ __forceinline__ bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#ifdef FLASH_EXT_BOUNDED_WAITS
  for (int polls = 0; !barrier_try_wait(barrier, parity); ++polls) {
    if (polls > 1 << 20) __trap();
  }
#else
  while (!barrier_try_wait(barrier, parity)) {
  }
#endif
}

// ---- TMA
// -------------------------------------------------------------------------------------------------------------

// Where a box starts, innermost dimension first: column, row, head, batch, outer batch.
struct BoxStart {
  int col, row, head, b0, b1;
};

// prefetch.tensormap
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.5d, global to shared; the barrier counts the bytes. One thread calls.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, BoxStart at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.col), "r"(at.row), "r"(at.head), "r"(at.b0), "r"(at.b1)
      : "memory");
}

// cp.async.bulk.tensor.5d, shared to global: rows and columns outside of the tensor are not written.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(shared), "r"(at.col), "r"(at.row), "r"(at.head), "r"(at.b0), "r"(at.b1)
               : "memory");
}
// cp.reduce.async.bulk.tensor.5d .add: the same, added to what is there, in the map's type.
__device__ __forceinline__ void tma_add(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(shared), "r"(at.col), "r"(at.row), "r"(at.head), "r"(at.b0), "r"(at.b1)
      : "memory");
}

}  // namespace flash_ext::cuda
