// Stand-ins for what a kernel of the lab takes from CUDA, so that g++ compiles it: each thread of a block is a fiber,
// and every read and write of a tensor or of shared memory is noted with its address. test_host.py includes this before
// a .cu file and after it defines call_kernel(). A float is told from its neighbours by the class Float, and float2 and
// float4 are noted as one access of 8 and 16 bytes. What flash_ext/lab/ptx.cuh has is here as well.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;

struct Access {
  int64_t block, thread, memory, address, width, store;
};

struct Region {
  const char* begin;
  int64_t size;
};

extern char __start_lab_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_lab_shared[] __attribute__((weak, visibility("hidden")));

inline Access* accesses;
inline int64_t count, capacity, current_block, current_thread;
inline Region regions[8];  // tensors in order, then shared memory
inline int64_t region_count;

inline void note(const void* at, int64_t width, bool store) {
  for (int64_t i = 0; i < region_count; ++i) {
    const int64_t address = static_cast<const char*>(at) - regions[i].begin;
    if (address < 0 || address >= regions[i].size) continue;
    if (count < capacity) accesses[count] = {current_block, current_thread, i, address, width, store};
    ++count;
  }
}

struct Float {
  float value;
  Float() = default;
  Float(float v) : value(v) {}
  Float(const Float& other) : value(other) {}
  operator float() const { return note(this, 4, false), value; }
  Float& operator=(float v) { return note(this, 4, true), value = v, *this; }
  Float& operator=(const Float& other) { return *this = static_cast<float>(other); }
  Float& operator+=(float v) { return *this = *this + v; }
  Float& operator*=(float v) { return *this = *this * v; }
};

template <int kParts>
struct Parts;
template <>
struct Parts<2> {
  Float x, y;
};
template <>
struct Parts<4> {
  Float x, y, z, w;
};

template <int kParts>
struct Vector : Parts<kParts> {
  static constexpr int kBytes = 4 * kParts;
  Vector() = default;
  Vector(const Vector& other) : Parts<kParts>() {
    note(&other, kBytes, false);
    copy(other);
  }
  Vector& operator=(const Vector& other) {
    note(&other, kBytes, false);
    note(this, kBytes, true);
    copy(other);
    return *this;
  }
  void copy(const Vector& other) { std::memcpy(static_cast<void*>(this), &other, kBytes); }
};

using float2 = Vector<2>;
using float4 = Vector<4>;

inline float2 make_float2(float x, float y) {
  float2 v;
  v.x.value = x, v.y.value = y;
  return v;
}

inline float4 make_float4(float x, float y, float z, float w) {
  float4 v;
  v.x.value = x, v.y.value = y, v.z.value = z, v.w.value = w;
  return v;
}

struct Place {
  unsigned x, y;
};

inline Place threadIdx, blockIdx, blockDim, gridDim;
inline ucontext_t scheduler, fibers[1024];
inline bool done[1024];
inline char stacks[1024][32 << 10];

// Of the threads of a block, or of a warp of it. Those that have ended are not waited for.
struct Barrier {
  int64_t first, size, arrived, round;

  bool all_are_here() const {
    int64_t running = 0;
    for (int64_t i = first; i < first + size; ++i) running += !done[i];
    return arrived >= running;
  }
  void wait() {
    const int64_t mine = round;
    ++arrived;
    while (round == mine) {
      if (all_are_here()) {
        arrived = 0, ++round;
      } else {
        swapcontext(&fibers[current_thread], &scheduler);
      }
    }
  }
};

inline Barrier of_block[32], of_warp[32];
inline int64_t block_threads;
inline bool others_run;  // several blocks at a time, see blocks_at_once.h

inline void __syncthreads() { of_block[current_thread / block_threads].wait(); }

// Where what other blocks do matters.
inline void let_others_run() {
  if (others_run) swapcontext(&fibers[current_thread], &scheduler);
}

// What every lane of the warp says, and the value of the one that `lane` is told.
template <class T>
T exchange(T value, int64_t lane) {
  static T values[1024];
  Barrier& barrier = of_warp[current_thread / 32];
  values[current_thread] = value;
  barrier.wait();
  const T other = values[lane < 0 || lane > 31 ? current_thread : current_thread / 32 * 32 + lane];
  barrier.wait();
  return other;
}

inline int64_t lane_id() { return current_thread % 32; }
inline Float __shfl_sync(unsigned, float v, int lane) { return exchange(v, lane); }
inline Float __shfl_up_sync(unsigned, float v, int by) { return exchange(v, lane_id() - by); }
inline Float __shfl_down_sync(unsigned, float v, int by) { return exchange(v, lane_id() + by); }
inline Float __shfl_xor_sync(unsigned, float v, int bits) { return exchange(v, lane_id() ^ bits); }

inline unsigned __ballot_sync(unsigned, bool vote) {
  unsigned votes = 0;
  for (int64_t lane = 0; lane < 32; ++lane) votes |= unsigned(exchange(vote, lane)) << lane;
  return votes;
}
inline bool __any_sync(unsigned lanes, bool vote) { return __ballot_sync(lanes, vote) != 0; }

inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline void __threadfence() { let_others_run(); }
inline int atomicAdd(int* at, int value) {
  let_others_run();
  const int before = *at;
  *at += value;
  return before;
}

// A copy is done at once; that it is not used before it is waited for, the lab sees.
inline void cp_async(Float* to, const Float* from, int width, int bytes) {
  if (bytes > 0) note(from, width, false);
  note(to, width, true);
  std::memset(static_cast<void*>(to), 0, width);
  if (bytes > 0) std::memcpy(static_cast<void*>(to), from, bytes);
}

inline void cp_async_4(Float* to, const Float* from, int bytes) { cp_async(to, from, 4, bytes); }
inline void cp_async_16(Float* to, const Float* from, int bytes) { cp_async(to, from, 16, bytes); }
inline void cp_async_commit() {}
inline void cp_async_wait(int) {}

inline Float to_tf32(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x1000) & 0xffffe000;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Every thread of the warp shows what it holds, then takes what it needs.
inline void mma_tf32(Float* c, const Float* a, const Float* b) {
  static float as[1024][4], bs[1024][2];
  for (int i = 0; i < 4; ++i) as[current_thread][i] = a[i].value;
  for (int i = 0; i < 2; ++i) bs[current_thread][i] = b[i].value;
  of_warp[current_thread / 32].wait();
  const int64_t warp = current_thread / 32 * 32, lane = current_thread % 32;
  for (int i = 0; i < 4; ++i) {
    const int64_t row = lane / 4, column = lane % 4 * 2 + i % 2;
    double sum = c[i].value;
    for (int k = 0; k < 8; ++k) {
      sum += double(as[warp + 4 * row + k % 4][i / 2 + k / 4 * 2]) * bs[warp + 4 * column + k % 4][k / 4];
    }
    c[i].value = sum;
  }
  of_warp[current_thread / 32].wait();
}

#define volatile
#define __global__
#define __device__ inline
#define __shared__ static __attribute__((section("lab_shared"), aligned(128)))

void call_kernel();

inline void fiber() {
  call_kernel();
  done[current_thread] = true;
}

// A block in the fibers from `first` on. Shared memory begins as NaN.
inline void start_block(int64_t first) {
  if (__start_lab_shared) std::memset(__start_lab_shared, 0xff, __stop_lab_shared - __start_lab_shared);
  for (int64_t i = first; i < first + block_threads; ++i) {
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i], fibers[i].uc_stack.ss_size = sizeof stacks[i];
    fibers[i].uc_link = &scheduler;
    makecontext(&fibers[i], fiber, 0);
    done[i] = false;
  }
  of_block[first / block_threads] = {first, block_threads, 0, 0};
  for (int64_t i = first; i < first + block_threads; i += 32) of_warp[i / 32] = {i, min(block_threads, 32L), 0, 0};
}

// Each of these threads goes on until it waits; whether any has not ended.
inline bool run_threads(int64_t first, int64_t count) {
  bool any = false;
  blockIdx = {unsigned(current_block % gridDim.x), unsigned(current_block / gridDim.x)};
  for (int64_t i = first; i < first + count; ++i) {
    if (done[i]) continue;
    const int64_t thread = i % block_threads;
    current_thread = i;
    threadIdx = {unsigned(thread % blockDim.x), unsigned(thread / blockDim.x)};
    swapcontext(&scheduler, &fibers[i]);
    any = any || !done[i];
  }
  return any;
}

inline char** tensors;
inline const int32_t* numbers;

// How many accesses there were; the first `room` of them are in `out`. shape: grid x, y, block x, y.
extern "C" inline int64_t __attribute__((used))
run(const uint32_t* shape, char** data, const int64_t* bytes, int64_t tensor_count, const int32_t* ints, Access* out,
    int64_t room) {
  tensors = data, numbers = ints, accesses = out, capacity = room, count = 0;
  gridDim = {shape[0], shape[1]}, blockDim = {shape[2], shape[3]};
  region_count = tensor_count + 1;
  for (int64_t i = 0; i < tensor_count; ++i) regions[i] = {data[i], bytes[i]};
  regions[tensor_count] = {__start_lab_shared, __stop_lab_shared - __start_lab_shared};
  block_threads = blockDim.x * blockDim.y, others_run = false;
  for (current_block = 0; current_block < int64_t(gridDim.x) * gridDim.y; ++current_block) {
    start_block(0);
    while (run_threads(0, block_threads)) {
    }
  }
  return count;
}

#define float Float
