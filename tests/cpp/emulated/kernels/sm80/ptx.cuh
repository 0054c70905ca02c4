// Stands in for csrc/kernels/sm80/ptx.cuh: the same names, each doing on the host what its instruction does.
// Shared-memory addresses are offsets of the block's dynamic shared memory.
#pragma once

#include "gpu/arch.h"
#include "gpu/arithmetic.cuh"
#include "gpu/tma.cuh"
#include "warp.h"

namespace flash_ext::sm80 {

using cuda::at_least_zero, cuda::exp2_fast, cuda::maximum, cuda::minimum, cuda::multiply_bf16, cuda::reciprocal_fast,
    cuda::spread_high_bits, cuda::tanh_fast;
using cuda::kHasBulkAdditions;
using emulated::at_shared;
using emulated::multiply_fragments;

inline char* dynamic_shared() { return emulated::shared_memory(); }
inline char* dynamic_shared_of_boxes() { return emulated::shared_memory(); }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulated::shared_memory());
}
template <class T>
T opaque(T x) {
  return x;
}

inline void cp_async_16(uint32_t shared, const void* global) { emulated::copy_later(shared, global, 16, 16); }
inline void cp_async_16(uint32_t shared, const void* global, int bytes) {
  emulated::copy_later(shared, global, bytes, 16);
}
inline void cp_async_4(uint32_t shared, const void* global, bool inside) {
  emulated::copy_later(shared, global, inside ? 4 : 0, 4);
}
inline void cp_async_commit() { emulated::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulated::wait_copies(kPending);
}

inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix_x4(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix_x4_trans(r, address); }
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const auto rows = emulated::exchange("stmatrix", emulated::matrix_row(address));
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  const uint32_t words[4] = {r0, r1, r2, r3};
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      const uint16_t number = static_cast<uint16_t>(words[i] >> 16 * half);
      std::memcpy(emulated::place(rows[8 * i + 2 * t + half] + 2 * g), &number, 2);
    }
  }
  __syncwarp();
}
inline uint32_t movmatrix_trans(uint32_t value) { return emulated::movmatrix_trans(value); }

inline void append_carry(uint32_t& flags, uint32_t word, uint32_t not_below) {
  flags = flags * 2 + (uint64_t{word} + not_below >> 32);
}
inline void pair_arrive(int barrier) { emulated::barrier(barrier, 64, false); }
inline void pair_wait(int barrier) { emulated::barrier(barrier, 64); }

template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T) {
  T x[8], y[4];
  std::memcpy(x, a, sizeof(x));
  std::memcpy(y, b, sizeof(y));
  multiply_fragments(c, x, y);
}
inline void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  float x[4], y[2];
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(a[i] & ~0x1FFFu);  // the last 13 bits are not read
  for (int i = 0; i < 2; ++i) y[i] = __uint_as_float(b[i] & ~0x1FFFu);
  multiply_fragments(c, x, y);
}

inline uint32_t to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1FFFu; }

inline uint32_t load_shared(uint32_t address) { return at_shared<uint32_t>(address); }
inline uint16_t load_shared_16(uint32_t address) { return at_shared<uint16_t>(address); }
inline void load_shared(uint32_t (&r)[4], uint32_t address) { std::memcpy(r, emulated::aligned(address, 16), 16); }
inline void store_shared(uint32_t address, const uint32_t (&r)[4]) {
  std::memcpy(emulated::aligned(address, 16), r, 16);
}
inline void store_shared(uint32_t address, uint32_t value) { std::memcpy(emulated::aligned(address, 4), &value, 4); }
inline void store_shared(uint32_t address, float x, float y) {
  std::memcpy(emulated::aligned(address, 8), &x, 4);
  std::memcpy(emulated::place(address + 4), &y, 4);
}

inline void add_global(float* address, float x) { *address += x; }
inline void add_global(float* address, float x, float y) {
  emulated::aligned(address, 8);
  address[0] += x;
  address[1] += y;
}
inline void add_global(float* address, float x, float y, float z, float w) {
  emulated::aligned(address, 16);
  add_global(address, x, y);
  add_global(address + 2, z, w);
}

inline int load_acquire(const int* address) {
  emulated::yield();
  return *address;
}
inline void store_release(int* address, int value) { *address = value; }

inline void fence_async_proxy() {}
inline void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  emulated::aligned(global, 16);
  emulated::aligned(shared, 16);
  emulated::store_later([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) global[i] += at_shared<float>(shared + 4 * i);
  });
}
inline void bulk_commit() {}
inline void bulk_wait_read() { emulated::wait_stores(); }
inline void bulk_wait() { emulated::wait_stores(); }

}  // namespace flash_ext::sm80
