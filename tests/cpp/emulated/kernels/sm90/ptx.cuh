// Stands in for csrc/kernels/sm90/ptx.cuh: the same names, each doing on the host what its instruction does. TMA's
// copies arrive when the emulator's engine likes; what a thread stores or adds by TMA is read when it waits for it.
#pragma once

#include "gpu/arithmetic.cuh"
#include "gpu/tma.cuh"
#include "warp.h"

namespace flash_ext::sm90 {

using cuda::barrier_arrive, cuda::barrier_expect, cuda::barrier_init, cuda::barrier_try_wait, cuda::barrier_wait;
using cuda::BoxStart, cuda::exp2_fast, cuda::fence_barrier_init, cuda::multiply_bf16, cuda::prefetch_map,
    cuda::reciprocal_fast, cuda::spread_byte_signs, cuda::spread_high_bits, cuda::tanh_fast, cuda::tma_load,
    cuda::tma_store, cuda::visit_box;
using emulated::at_shared;

inline char* dynamic_shared() { return emulated::shared_memory(); }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulated::shared_memory());
}
template <class T>
void to_shared(uint32_t address, const T& value) {
  std::memcpy(emulated::aligned(address, std::min<int>(sizeof(T), 16)), &value, sizeof(T));
}

inline bool elect_one() { return emulated::lane() == 0; }
inline int uniform(int x) {
  const auto lanes = emulated::exchange("redux", x);
  for (int i = 0; i < 32; ++i) {
    if (lanes[i] != x) emulated::give_up("uniform() of different numbers");
  }
  return x;
}

template <int kRegisters>
void more_registers() {}
template <int kRegisters>
void fewer_registers() {}

inline void named_barrier_sync(int id, int threads) { emulated::barrier(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulated::barrier(id, threads, false); }
inline void fence_async_proxy() {}

inline void barrier_arrive_copied(uint32_t barrier) {
  emulated::commit_copies();
  emulated::wait_copies(0);
  barrier_arrive(barrier);
}

// ---- TMA
// -------------------------------------------------------------------------------------------------------------

inline void tma_prefetch(const CUtensorMap*, BoxStart) {}
inline void bulk_load(uint32_t shared, const void* global, uint32_t barrier, uint32_t bytes) {
  emulated::aligned(global, 16);
  emulated::aligned(shared, 16);
  emulated::engine([=] {
    std::memcpy(emulated::place(shared), global, bytes);
    emulated::arrive_phase(barrier, 0, -static_cast<int>(bytes));
  });
}
inline void bulk_add(float* global, uint32_t shared, uint32_t bytes) {
  emulated::aligned(global, 16);
  emulated::aligned(shared, 16);
  emulated::store_later([=] {
    for (uint32_t i = 0; i < bytes / 4; ++i) global[i] += at_shared<float>(shared + 4 * i);
  });
}
inline void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
  emulated::aligned(global, 16);
  emulated::aligned(shared, 16);
  emulated::aligned(global, 16);
  emulated::aligned(shared, 16);
  emulated::store_later([=] { std::memcpy(global, emulated::place(shared), bytes); });
}
inline void tma_store_commit() {}
inline void tma_store_wait_read() { emulated::wait_stores(); }
inline void tma_store_wait() { emulated::wait_stores(); }

// ---- ordinary copies, counts ----------------------------------------------------------------------------------------

inline void cp_async_16(uint32_t shared, const void* global, int bytes) {
  emulated::copy_later(shared, global, bytes, 16);
}
inline void cp_async_wait_all() {
  emulated::commit_copies();
  emulated::wait_copies(0);
}

inline void wait_count(const uint32_t* count, uint32_t wanted) {
  while (*count != wanted) emulated::yield();
}
inline void add_count(uint32_t* count) { ++*count; }

// ---- registers ------------------------------------------------------------------------------------------------------

inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const auto rows = emulated::exchange("stmatrix", emulated::matrix_row(address));
  const int g = emulated::lane() / 4, t = emulated::lane() % 4;
  const uint32_t words[4] = {r0, r1, r2, r3};
  for (int i = 0; i < 4; ++i) to_shared(rows[8 * i + g] + 4 * t, words[i]);
  __syncwarp();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix_x4(r, address); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) { emulated::ldmatrix_x4_trans(r, address); }
inline uint32_t movmatrix_trans(uint32_t value) { return emulated::movmatrix_trans(value); }

inline uint32_t load_shared_short(uint32_t address) { return at_shared<uint16_t>(address); }
inline void store_shared4(uint32_t address, float x, float y, float z, float w) {
  const float numbers[4] = {x, y, z, w};
  to_shared(address, numbers);
}
inline void store_shared1(uint32_t address, float x) { to_shared(address, x); }
inline uint4 load_shared4(uint32_t address) { return at_shared<uint4>(address); }
inline int load_shared_int(uint32_t address) { return at_shared<int>(address); }
inline float load_shared_float(uint32_t address) { return at_shared<float>(address); }
inline float2 load_shared2(uint32_t address) { return at_shared<float2>(address); }
template <class Words>
void store_shared(uint32_t address, const Words& words) {
  to_shared(address, words);
}
template <class Words>
void load_shared(Words& words, uint32_t address) {
  std::memcpy(&words, emulated::aligned(address, 16), sizeof(Words));
}

template <class T>
void mma_16_8_16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  const uint32_t b[2] = {b0, b1};
  T x[8], y[4];
  std::memcpy(x, a, sizeof(x));
  std::memcpy(y, b, sizeof(y));
  emulated::multiply_fragments(c, x, y);
}

template <class T>
uint32_t pack(float x, float y, T) {
  const T pair[2] = {T(x), T(y)};
  uint32_t result;
  std::memcpy(&result, pair, 4);
  return result;
}
template <class T>
void unpack(uint32_t packed, float& x, float& y, T) {
  T pair[2];
  std::memcpy(pair, &packed, 4);
  x = static_cast<float>(pair[0]);
  y = static_cast<float>(pair[1]);
}

}  // namespace flash_ext::sm90
