// Copies and additions between global and shared memory that one thread starts (compute capability 9.0 and above):
// boxes of a tensor by TMA, and bytes in a row.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_ext {

// Where a box starts, innermost dimension first: column, row, head, batch, outer batch.
struct BoxStart {
  int col, row, head, b0, b1;
};

// prefetch.tensormap
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.prefetch.tensor.5d: global to L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, BoxStart at) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(at.col),
               "r"(at.row), "r"(at.head), "r"(at.b0), "r"(at.b1)
               : "memory");
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

// ---- bytes in a row -------------------------------------------------------------------------------------------------

// cp.async.bulk, global to shared: bytes in a row, addresses and size multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t barrier, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// cp.reduce.async.bulk .add.f32, shared to global: bytes a multiple of 16, addresses, too; in the thread's bulk group.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// cp.async.bulk, shared to global: as bulk_add, but replaces.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// ---- of both --------------------------------------------------------------------------------------------------------

// fence.proxy.async.shared::cta: ordinary stores to shared memory before it are seen by TMA, bulk copies and wgmma
// after it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// cp.async.bulk.wait_group.read 0: this thread's stores have read shared memory; they may not be visible yet.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// cp.async.bulk.wait_group 0: this thread's stores and additions are done, and visible to it.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_ext
