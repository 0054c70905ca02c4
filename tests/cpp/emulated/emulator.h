// Runs kernels of csrc/kernels/sm80 and csrc/kernels/sm90 on the host, thread by thread, so that a machine without a
// GPU can say whether they are right. Each thread of a block is a fiber of one OS thread; blocks run one after another.
// What the kernels take from the device lies behind ptx.cuh, wgmma.cuh, arch.h and host/launch.h of csrc/gpu, which the
// headers of this folder replace, and behind the intrinsics below.
//
// It finds wrong indices, missing synchronisation that the chosen order of threads shows, reads of shared memory that
// nobody wrote (it begins as NaN), copies that are read before they were waited for (they are made when they are),
// warps that do not do the same, threads that wait for ever, and addresses that are not aligned as their instruction
// wants it: those of wrappers by aligned() below, those of plain C++ by -fsanitize=alignment, with which the tests are
// compiled. It says nothing of speed, registers or memory models.
// Invariant: one kernel at a time; a kernel is run by run() and by nothing else.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__

namespace flash_ext::emulated {

constexpr int kSharedBytes = 227 * 1024;

struct Index {
  unsigned x;
};

// Runs body once for each thread of each block. `seed` chooses which of the threads that can go on does.
void run(int64_t blocks, int threads, int64_t shared_bytes, unsigned seed, const std::function<void()>& body);

// Dynamic shared memory, at address 0. What a kernel declares statically lies before or behind it.
char* shared_memory();
inline char* place(uint32_t address) { return shared_memory() + static_cast<int32_t>(address); }
[[noreturn]] void give_up(const char* why);
// The same of an access to so many bytes at once, in shared or global memory.
inline char* aligned(uint32_t address, int bytes) {
  if (address % static_cast<uint32_t>(bytes) != 0) give_up("an address in shared memory that is not aligned");
  return place(address);
}
template <class T>
T* aligned(T* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
    give_up("an address in global memory that is not aligned");
  }
  return address;
}
Index thread_index();
Index block_index();
Index threads();
Index blocks();

// Waits until `count` threads have come to this barrier of the block; with `waits` false it is only counted.
void barrier(int id, int count, bool waits = true);
// Lets the other threads go on; ends the process where nobody can.
void yield();

constexpr int kSlotBytes = 64;
// Every lane's `bytes` of data, valid until the warp's next exchange but one. `operation` must be the same in all
// lanes.
const char* exchange(const char* operation, const void* data, int bytes);

template <class T>
struct Lanes {
  const char* slots;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, slots + lane * kSlotBytes, sizeof(T));
    return value;
  }
};

template <class T>
Lanes<T> exchange(const char* operation, const T& value) {
  static_assert(sizeof(T) <= kSlotBytes);
  return {exchange(operation, &value, sizeof(T))};
}

// What static_cast<float> gives. NOTE: the toolkit's host code takes fp16 bit by bit, which was a tenth of the tests.
inline float to_float(float x) { return x; }
inline float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
inline float to_float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline float to_float(__half x) {
  const uint32_t bits = static_cast<__half_raw>(x).x, magnitude = (bits & 0x7FFF) << 13;
  const bool is_finite = (bits & 0x7C00) != 0x7C00;
  const uint32_t scaled = is_finite ? magnitude : magnitude | 0x7F800000;  // 2^-112 of a number
  float result;
  std::memcpy(&result, &scaled, 4);
  return std::copysign(is_finite ? result * 0x1p112f : result, (bits & 0x8000) != 0 ? -1.f : 1.f);
}

inline int lane() { return static_cast<int>(thread_index().x % 32); }

// Copies to shared memory, made when this thread waits for its group.
void copy_later(uint32_t to, const void* from, int bytes, int filled_to);
void commit_copies();
void wait_copies(int pending);
// What TMA takes out of shared memory, done when this thread waits for it.
void store_later(std::function<void()> store);
void wait_stores();
// What TMA brings, done some time later.
void engine(std::function<void()> work);
// Asynchronous products, made when this thread waits for their group.
void later(std::function<void()> work);
void commit_work();
void wait_work(int pending);

// mbarriers, by their address in shared memory. A phase ends with its last arrival and byte; `bytes` are expected by
// it, or, negative, have come.
void init_phase(uint32_t barrier, int arrivals);
void arrive_phase(uint32_t barrier, int arrivals, int bytes);
bool is_past(uint32_t barrier, uint32_t parity);
void wait_phase(uint32_t barrier, uint32_t parity);

}  // namespace flash_ext::emulated

#define threadIdx (flash_ext::emulated::thread_index())
#define blockIdx (flash_ext::emulated::block_index())
#define blockDim (flash_ext::emulated::threads())
#define gridDim (flash_ext::emulated::blocks())

using std::max;
using std::min;

inline void __syncthreads() { flash_ext::emulated::barrier(0, 0); }
int __syncthreads_or(int predicate);
int __syncthreads_count(int predicate);
inline void __syncwarp() { flash_ext::emulated::exchange("syncwarp", 0); }

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return flash_ext::emulated::exchange("shfl", value)[source % 32];
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  const int lane = flash_ext::emulated::lane();
  return flash_ext::emulated::exchange("shfl", value)[lane < delta ? lane : lane - delta];
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return flash_ext::emulated::exchange("shfl", value)[flash_ext::emulated::lane() ^ mask];
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const auto lanes = flash_ext::emulated::exchange("ballot", predicate);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= (lanes[i] != 0 ? 1u : 0u) << i;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

inline float __uint_as_float(unsigned x) {
  float result;
  std::memcpy(&result, &x, 4);
  return result;
}
inline unsigned __float_as_uint(float x) {
  unsigned result;
  std::memcpy(&result, &x, 4);
  return result;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.f ? std::min(x, 1.f) : 0.f; }  // of NaN, too
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift % 32));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << std::min(shift, 32u) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> std::min(shift, 32u));
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
  const auto lanes = flash_ext::emulated::exchange("redux", x);
  unsigned all = 0;
  for (int i = 0; i < 32; ++i) all |= lanes[i];
  return all;
}
inline int __reduce_max_sync(unsigned, int x) {
  const auto lanes = flash_ext::emulated::exchange("redux", static_cast<unsigned>(x));
  int most = x;
  for (int i = 0; i < 32; ++i) most = std::max(most, static_cast<int>(lanes[i]));
  return most;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto lanes = flash_ext::emulated::exchange("redux", x);
  for (int i = 0; i < 32; ++i) x = std::max(x, lanes[i]);
  return x;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
[[noreturn]] inline void __trap() { __builtin_trap(); }

template <class T, class Value>
T atomicAdd(T* address, Value value) {
  const T before = *address;
  *address += static_cast<T>(value);
  return before;
}
inline int atomicMax(int* address, int value) {
  const int before = *address;
  if (value > before) *address = value;
  return before;
}
inline int atomicMin(int* address, int value) {
  const int before = *address;
  if (value < before) *address = value;
  return before;
}
