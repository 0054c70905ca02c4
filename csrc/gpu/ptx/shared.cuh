// Shared memory by 32-bit addresses, offsets of its window.
#pragma once

#include <cstdint>

namespace flash_ext {

// The block's dynamic shared memory.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ char smem[];
  return smem;
}

// The same, at a multiple of 128 bytes.
__device__ __forceinline__ char* dynamic_shared_128() {
  extern __shared__ __align__(128) char smem_128[];
  return smem_128;
}

// The same, at a multiple of 1024 bytes.
__device__ __forceinline__ char* dynamic_shared_1024() {
  extern __shared__ __align__(1024) char smem_1024[];
  return smem_1024;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ld.shared.b32
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.u8
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t result;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(result) : "r"(address) : "memory");
  return result;
}

// ld.shared.u16
__device__ __forceinline__ uint16_t load_shared_16(uint32_t address) {
  uint16_t result;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(address) : "memory");
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

// ld.shared.v4.u32
__device__ __forceinline__ uint4 load_shared4(uint32_t address) {
  uint4 result;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address)
               : "memory");
  return result;
}

// st.shared.b32 and st.shared.v2.b32
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// st.shared.f32
__device__ __forceinline__ void store_shared1(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// st.shared.v4.f32
__device__ __forceinline__ void store_shared4(uint32_t address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
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

}  // namespace flash_ext
