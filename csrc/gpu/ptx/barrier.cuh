// mbarriers, and barriers of some warps of a block. Invariant: every wait is on a barrier of this block; with
// FLASH_EXT_BOUNDED_WAITS one on an mbarrier traps instead of hanging.
#pragma once

#include <cstdint>

namespace flash_ext {

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

// cp.async.mbarrier.arrive.noinc: arrives when this thread's cp.async are done.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// bar.sync and bar.arrive of a named barrier. Number 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// barrier.cta.arrive and .sync between two warps; barrier 0 is __syncthreads.
// NOTE: racecheck of compute-sanitizer (CUDA 13.0) loses its count behind an arrive: it reports dS, stored before a
// __syncthreads and read after it. With .sync in both places it reports nothing.
__device__ __forceinline__ void pair_arrive(int barrier) {
  asm volatile("barrier.cta.arrive %0, 64;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void pair_wait(int barrier) {
  asm volatile("barrier.cta.sync %0, 64;" ::"r"(barrier) : "memory");
}

}  // namespace flash_ext
