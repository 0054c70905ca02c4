// Thin wrappers of the PTX instructions this backend uses, but for wgmma (wgmma.cuh) and those of gpu/; each names
// its instruction.
// Shared-memory addresses are 32-bit offsets of the shared window (shared_address).
// Called by the kernels and the tests of the wrappers; tests/cpp/emulated/sm90/ptx.cuh has the same names for the host.
// Invariant: every wait is on a barrier of this block, but wait_count's; with FLASH_EXT_BOUNDED_WAITS it traps instead
// of hanging.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/arithmetic.cuh"
#include "gpu/tma.cuh"

namespace flash_ext::sm90 {

using cuda::barrier_arrive, cuda::barrier_expect, cuda::barrier_init, cuda::barrier_try_wait, cuda::barrier_wait;
using cuda::BoxStart, cuda::exp2_fast, cuda::fence_barrier_init, cuda::multiply_bf16, cuda::reciprocal_fast,
    cuda::spread_byte_signs, cuda::spread_high_bits, cuda::tanh_fast;
using cuda::prefetch_map, cuda::tma_load, cuda::tma_store;

// The block's dynamic shared memory.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ char smem[];
  return smem;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// elect.sync: true in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// redux.sync: x, which is the same in all lanes, so that ptxas knows. NOTE: a loop that ends by a number out of shared
// memory makes it take all behind for divergent: each wgmma then has its descriptor out of ordinary registers (R2UR).
// Backward in order, head dim 128: 698 instructions a tile of queries, and 560 with this.
__device__ __forceinline__ int uniform(int x) {
  return static_cast<int>(__reduce_or_sync(~0u, static_cast<unsigned>(x)));
}

// setmaxnreg.inc / .dec.sync.aligned: registers a thread of this warpgroup, a multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync and bar.arrive of a named barrier. Number 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// fence.proxy.async.shared::cta: ordinary writes to shared memory before it are seen by TMA and wgmma after it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// cp.async.mbarrier.arrive.noinc: arrives when this thread's cp.async are done.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- TMA, but for tensor loads (gpu/tma.cuh) -----------------------------------------------------------------------

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

// cp.async.bulk.prefetch.tensor.5d: global to L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, BoxStart at) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(at.col),
               "r"(at.row), "r"(at.head), "r"(at.b0), "r"(at.b1)
               : "memory");
}
// cp.async.bulk.commit_group
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// cp.async.bulk.wait_group.read 0: this thread's stores have read shared memory; they may not be visible yet.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// cp.async.bulk.wait_group 0: this thread's stores and additions are done, and visible to it.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- ordinary copies ------------------------------------------------------------------------------------------------

// cp.async.cg.shared.global, 16 bytes of which the first `bytes` are read and the others become zeros.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// cp.async.wait_all
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- counts in global memory ----------------------------------------------------------------------------------------

// ld.global.acquire.gpu until the count is `wanted`, then fence.proxy.async: this thread's bulk copies and additions
// come after those whose thread counted them.
__device__ __forceinline__ void wait_count(const uint32_t* count, uint32_t wanted) {
  uint32_t seen;
#ifdef FLASH_EXT_BOUNDED_WAITS
  int polls = 0;
#endif
  do {
    asm volatile("ld.global.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
#ifdef FLASH_EXT_BOUNDED_WAITS
    if (++polls > 1 << 22) __trap();
#endif
  } while (seen != wanted);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// fence.proxy.async, red.release.gpu.global.add: counts one whose bulk copies or additions this thread has waited for.
__device__ __forceinline__ void add_count(uint32_t* count) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

// ---- registers ------------------------------------------------------------------------------------------------------

// stmatrix.sync.aligned.m8n8.x4: lanes 8i..8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4: lanes 8i..8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans: the same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// movmatrix.sync.aligned.m8n8.trans: an 8x8 matrix of 16-bit numbers, transposed across the warp.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t value) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// ld.shared.u16
__device__ __forceinline__ uint32_t load_shared_short(uint32_t address) {
  uint16_t result;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(address) : "memory");
  return result;
}

// st.shared.v4.f32
__device__ __forceinline__ void store_shared4(uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// st.shared.f32
__device__ __forceinline__ void store_shared1(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// ld.shared.v4.u32
__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 result;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address)
               : "memory");
  return result;
}

// ld.shared.s32
__device__ __forceinline__ int load_shared_int(uint32_t address) {
  int result;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.f32
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float result;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.v2.f32
__device__ __forceinline__ float2 load_shared2(uint32_t address) {
  float2 result;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address));
  return result;
}

// st.shared.v4 and ld.shared.v4: a small structure of words, a multiple of 16 bytes.
template <class Words>
__device__ __forceinline__ void store_shared(uint32_t address, const Words& words) {
  static_assert(sizeof(Words) % 16 == 0);
  const auto* from = reinterpret_cast<const uint32_t*>(&words);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Words)) / 4; i += 4) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address + 4 * i), "r"(from[i]), "r"(from[i + 1]),
                 "r"(from[i + 2]), "r"(from[i + 3])
                 : "memory");
  }
}
template <class Words>
__device__ __forceinline__ void load_shared(Words& words, uint32_t address) {
  static_assert(sizeof(Words) % 16 == 0);
  auto* to = reinterpret_cast<uint32_t*>(&words);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Words)) / 4; i += 4) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                 : "r"(address + 4 * i)
                 : "memory");
  }
}

// mma.sync.aligned.m16n8k16: C[16, 8] += A[16, 16] B[8, 16] of one warp, in float.
__device__ __forceinline__ void mma_16_8_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16_8_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                            __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rn.f16x2.f32 and cvt.rn.bf16x2.f32: two numbers of one register, x in the low half.
__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
  return result;
}
__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
  return result;
}
// The two numbers of a register.
__device__ __forceinline__ void unpack(uint32_t packed, float& x, float& y, __half) {
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(packed));
  x = pair.x;
  y = pair.y;
}
__device__ __forceinline__ void unpack(uint32_t packed, float& x, float& y, __nv_bfloat16) {
  x = __uint_as_float(packed << 16);
  y = __uint_as_float(packed & 0xFFFF0000U);
}

}  // namespace flash_ext::sm90
