// Stands in for csrc/gpu/ptx.cuh: the same names, each doing on the host what its instruction does. Shared-memory
// addresses are offsets of the block's dynamic shared memory. TMA's copies arrive when the emulator's engine likes;
// what a thread stores or adds by TMA is read when it waits for it.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "warp.h"

namespace flash_ext {

using emulated::at_shared;
using emulated::multiply_fragments;

// ---- numbers --------------------------------------------------------------------------------------------------------

inline float exp2_fast(float x) { return x < -126.f ? 0.f : exp2f(x); }
inline float reciprocal_fast(float x) { return 1.f / x; }
inline float tanh_fast(float x) { return tanhf(x) * (1.f + 0x1p-12f); }

inline float maximum(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
inline float minimum(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }

template <class T>
uint32_t at_least_zero(uint32_t x, T) {
  const auto larger = [&](int shift) -> uint32_t {
    const uint16_t bits = static_cast<uint16_t>(x >> shift);
    const T result(maximum(static_cast<float>(reinterpret_cast<const T&>(bits)), 0.f));
    return reinterpret_cast<const uint16_t&>(result);
  };
  return larger(0) | larger(16) << 16;
}

inline uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  const auto product = [&](int shift) -> uint32_t {
    const __nv_bfloat16 rounded(__uint_as_float(x >> shift << 16) * __uint_as_float(y >> shift << 16));
    return reinterpret_cast<const uint16_t&>(rounded);
  };
  return product(0) | product(16) << 16;
}

inline uint32_t spread_high_bits(uint32_t x) { return (x >> 15 & 1) * 0xFFFFu | (x >> 31) * 0xFFFF0000u; }
template <int kByte>
uint32_t spread_byte_signs(uint32_t x, uint32_t y) {
  return (x >> (8 * kByte + 7) & 1) * 0xFFFFu | (y >> (8 * kByte + 7) & 1) * 0xFFFF0000u;
}

// ---- mbarrier -------------------------------------------------------------------------------------------------------

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  emulated::init_phase(barrier, static_cast<int>(arrivals));
}
inline void fence_barrier_init() {}
inline void barrier_arrive(uint32_t barrier) { emulated::arrive_phase(barrier, 1, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  emulated::arrive_phase(barrier, 1, static_cast<int>(bytes));
}
inline bool barrier_try_wait(uint32_t barrier, uint32_t parity) {
  if (!emulated::is_past(barrier, parity)) emulated::yield();
  return emulated::is_past(barrier, parity);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulated::wait_phase(barrier, parity); }

// ---- TMA ------------------------------------------------------------------------------------------------------------

struct BoxStart {
  int col, row, head, b0, b1;
};

// What emulated cuTensorMapEncodeTiled writes.
struct EncodedMap {
  char* data;
  uint64_t size[5], stride[4];  // stride in bytes, of dimensions 1 to 4
  uint32_t box[5];
};
static_assert(sizeof(EncodedMap) <= sizeof(CUtensorMap));

// fn(address in shared memory, address in global memory, null outside of the tensor) for each 16-bit number of a box.
template <class Fn>
void visit_box(const CUtensorMap* map, uint32_t shared, const BoxStart& at, const Fn& fn) {
  EncodedMap encoded;
  std::memcpy(&encoded, map, sizeof(encoded));
  const int64_t start[5] = {at.col, at.row, at.head, at.b0, at.b1};
  uint32_t row_address = shared;
  for (int64_t head = 0; head < encoded.box[2]; ++head) {
    for (int64_t row = 0; row < encoded.box[1]; ++row, row_address += encoded.box[0] * 2) {
      for (int64_t col = 0; col < encoded.box[0]; ++col) {
        const int64_t place[5] = {start[0] + col, start[1] + row, start[2] + head, start[3], start[4]};
        bool inside = true;
        uint64_t address = reinterpret_cast<uint64_t>(encoded.data) + static_cast<uint64_t>(place[0]) * 2;
        for (int i = 0; i < 5; ++i)
          inside = inside && place[i] >= 0 && place[i] < static_cast<int64_t>(encoded.size[i]);
        for (int i = 1; i < 5; ++i) address += static_cast<uint64_t>(place[i]) * encoded.stride[i - 1];  // wraps around
        char* const global = reinterpret_cast<char*>(address);
        const uint32_t linear = row_address + static_cast<uint32_t>(col) * 2;
        const uint32_t swizzle = encoded.box[0] == 64 ? 7 : 3;  // of 128 or 64 bytes
        fn(linear ^ (linear >> 7 & swizzle) << 4, inside ? global : nullptr);
      }
    }
  }
}

inline void prefetch_map(const CUtensorMap*) {}
inline void prefetch_l1(const void*) {}
inline void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, BoxStart at) {
  if (shared % 1024 != 0) emulated::give_up("a box that does not start at a multiple of 1024 bytes");
  emulated::engine([=] {
    int bytes = 0;
    visit_box(map, shared, at, [&](uint32_t address, const char* from) {
      const uint16_t number = from == nullptr ? 0 : *reinterpret_cast<const uint16_t*>(from);
      std::memcpy(emulated::place(address), &number, sizeof(number));
      bytes += 2;
    });
    emulated::arrive_phase(barrier, 0, -bytes);
  });
}
inline void tma_store(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  emulated::store_later([=] {
    visit_box(map, shared, at, [](uint32_t address, char* to) {
      if (to != nullptr) *reinterpret_cast<uint16_t*>(to) = emulated::at_shared<uint16_t>(address);
    });
  });
}
// Of bf16.
inline void tma_add(const CUtensorMap* map, uint32_t shared, BoxStart at) {
  emulated::store_later([=] {
    visit_box(map, shared, at, [](uint32_t address, char* to) {
      if (to == nullptr) return;
      __nv_bfloat16& sum = *reinterpret_cast<__nv_bfloat16*>(to);
      sum = __nv_bfloat16(static_cast<float>(sum) + static_cast<float>(emulated::at_shared<__nv_bfloat16>(address)));
    });
  });
}

// ---- shared memory, warps -------------------------------------------------------------------------------------------

inline char* dynamic_shared() { return emulated::shared_memory(); }
inline char* dynamic_shared_128() { return emulated::shared_memory(); }
inline char* dynamic_shared_1024() { return emulated::shared_memory(); }
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - emulated::shared_memory());
}
template <class T>
void to_shared(uint32_t address, const T& value) {
  std::memcpy(emulated::aligned(address, std::min<int>(sizeof(T), 16)), &value, sizeof(T));
}

inline uint32_t thread_index_again() { return threadIdx.x; }
inline bool elect_one() { return emulated::lane() == 0; }
inline uint32_t from_here(uint32_t x) { return x; }
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

// ---- bytes in a row -------------------------------------------------------------------------------------------------

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
  emulated::store_later([=] { std::memcpy(global, emulated::place(shared), bytes); });
}
inline void bulk_commit() {}
inline void bulk_wait_read() { emulated::wait_stores(); }
inline void bulk_wait() { emulated::wait_stores(); }

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

inline uint32_t load_shared_byte(uint32_t address) { return at_shared<uint8_t>(address); }
inline uint16_t load_shared_16(uint32_t address) { return at_shared<uint16_t>(address); }
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

struct E4m3 {};
inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, E4m3) {
  const uint32_t b[2] = {b0, b1};
  __nv_fp8_e4m3 x[16], y[8];
  std::memcpy(static_cast<void*>(x), a, sizeof(x));
  std::memcpy(static_cast<void*>(y), b, sizeof(y));
  emulated::multiply_fp8_fragments(c, x, y);
}
template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  const uint32_t b[2] = {b0, b1};
  T x[8], y[4];
  std::memcpy(x, a, sizeof(x));
  std::memcpy(y, b, sizeof(y));
  multiply_fragments(c, x, y);
}

template <class T>
uint32_t pack(float x, float y, T) {
  const T pair[2] = {T(x), T(y)};
  uint32_t result;
  std::memcpy(&result, pair, 4);
  return result;
}
inline uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  const float x[] = {x0, x1, x2, x3};
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3)) << 8 * i;
  }
  return result;
}
template <class T>
void unpack(uint32_t packed, float& x, float& y, T) {
  T pair[2];
  std::memcpy(pair, &packed, 4);
  x = static_cast<float>(pair[0]);
  y = static_cast<float>(pair[1]);
}

// ---- what sm80 alone uses -------------------------------------------------------------------------------------------

template <class T>
T no_hoist(T x) {
  return x;
}

inline void cp_async_16(uint32_t shared, const void* global) { emulated::copy_later(shared, global, 16, 16); }
inline void cp_async_4(uint32_t shared, const void* global, bool inside) {
  emulated::copy_later(shared, global, inside ? 4 : 0, 4);
}
inline void cp_async_commit() { emulated::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulated::wait_copies(kPending);
}

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
inline void append_carry(uint32_t& flags, uint32_t word, uint32_t not_below) {
  flags = flags * 2 + (uint64_t{word} + not_below >> 32);
}
inline void pair_arrive(int barrier) { emulated::barrier(barrier, 64, false); }
inline void pair_wait(int barrier) { emulated::barrier(barrier, 64); }

inline void mma_m16n8k8(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  float x[4], y[2];
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(a[i] & ~0x1FFFu);  // the last 13 bits are not read
  for (int i = 0; i < 2; ++i) y[i] = __uint_as_float(b[i] & ~0x1FFFu);
  multiply_fragments(c, x, y);
}

inline uint32_t to_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & ~0x1FFFu; }

inline uint32_t load_shared(uint32_t address) { return at_shared<uint32_t>(address); }
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

}  // namespace flash_ext
