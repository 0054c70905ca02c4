// Thin wrappers of the PTX instructions this backend uses; each names its instruction. Shared-memory addresses are
// 32-bit offsets of the shared window (shared_address).
// Called by the tile and matrix-product code of sm80/; nothing else in the folder contains asm but fp64.cuh, and
// tests/cpp/emulated/sm80/ptx.cuh has the same names for the host.
// Invariant: every lane of a warp takes part in ldmatrix, movmatrix and mma.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "gpu/arch.h"
#include "gpu/arithmetic.cuh"
#include "gpu/tma.cuh"

namespace flash_ext::sm80 {

using cuda::at_least_zero, cuda::exp2_fast, cuda::maximum, cuda::minimum, cuda::multiply_bf16, cuda::reciprocal_fast,
    cuda::spread_high_bits, cuda::tanh_fast;

// The block's dynamic shared memory.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char smem[];
  return smem;
}

// The same, at a multiple of 1024 bytes.
__device__ __forceinline__ char* dynamic_shared_of_boxes() {
  extern __shared__ __align__(1024) char smem_of_boxes[];
  return smem_of_boxes;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A number hidden from the compiler's loop-invariant code motion. NOTE: it would keep the swizzled addresses of all
// operands and the row offsets of all copies in registers across the main loop, some forty of them, and spill at 255;
// computing them anew costs a few instructions a tile.
template <class T>
__device__ __forceinline__ T opaque(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// cp.async.cg.shared.global 16
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same, but it copies `bytes` (0..16) of the 16 and fills the rest with zeros; 0 reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.ca.shared.global 4: four bytes, or zeros.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(inside ? 4 : 0)
               : "memory");
}

// cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: until at most kPending of this thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4: lanes 8i..8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans
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

// add.cc, addc: flags * 2 + (word + not_below carries), which with not_below = 2^32 - t says word >= t.
__device__ __forceinline__ void append_carry(uint32_t& flags, uint32_t word, uint32_t not_below) {
  asm("{\n\t.reg .u32 sum;\n\tadd.cc.u32 sum, %1, %2;\n\taddc.u32 %0, %0, %0;\n\t}"
      : "+r"(flags)
      : "r"(word), "r"(not_below));
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

// mma.sync.aligned.m16n8k16, float accumulators
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.sync.aligned.m16n8k8 of TF32 operands
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// cvt.rna.tf32.f32
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

// ld.shared.b32
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.u16
__device__ __forceinline__ uint16_t load_shared_16(uint32_t address) {
  uint16_t result;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.v4.b32 and st.shared.v4.b32: a whole chunk
__device__ __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// st.shared.b32 and st.shared.v2.b32
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// red.global.add.f32. NOTE: atomicAdd through a pointer of unknown state space asks for each number whether it lies in
// shared memory; without that backward took 4 to 14 % less time.
__device__ __forceinline__ void add_global(float* address, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}

// red.global.add.v2.f32: the address is a multiple of 8.
__device__ __forceinline__ void add_global(float* address, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
#else
  add_global(address, x);
  add_global(address + 1, y);
#endif
}

// ld.global.acquire.gpu.b32 and st.global.release.gpu.b32
__device__ __forceinline__ int load_acquire(const int* address) {
  int result;
  asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(result) : "l"(address) : "memory");
  return result;
}
__device__ __forceinline__ void store_release(int* address, int value) {
  asm volatile("st.global.release.gpu.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// ---- bulk additions, of compute capability 9.0 and above ------------------------------------------------------------

using cuda::kHasBulkAdditions;

// stmatrix.sync.aligned.m8n8.x4.trans: lanes 8i..8i+7 give the row addresses of matrix i, whose columns become rows.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// red.global.add.v4.f32: the address is a multiple of 16.
__device__ __forceinline__ void add_global(float* address, float x, float y, float z, float w) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}

// fence.proxy.async.shared::cta: what was stored to shared memory before it is seen by bulk additions after it.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// cp.reduce.async.bulk .add.f32, shared to global: addresses and bytes multiples of 16; one thread, in its bulk group.
__device__ __forceinline__ void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}
// cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// cp.async.bulk.wait_group.read 0: this thread's additions have read shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// cp.async.bulk.wait_group 0: they are done.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_ext::sm80
