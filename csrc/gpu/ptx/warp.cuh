// What is about a warp and its registers.
#pragma once

#include <cstdint>

namespace flash_ext {

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

// A number hidden from the compiler's loop-invariant code motion. NOTE: it would keep the swizzled addresses of all
// operands and the row offsets of all copies in registers across the main loop, some forty of them, and spill at 255;
// computing them anew costs a few instructions a tile.
template <class T>
__device__ __forceinline__ T no_hoist(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// threadIdx.x, read once more: no register keeps it until then.
__device__ __forceinline__ uint32_t thread_index_again() {
  uint32_t result;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(result));
  return result;
}

// x in a lane that is alone, from here on. NOTE: ptxas keeps such a lane's numbers in uniform registers, and moves the
// answer of an atomic there right behind the request, which waits for it; what goes through a shuffle it leaves where
// it came until then.
__device__ __forceinline__ uint32_t from_here(uint32_t x) {
  uint32_t lane, mask, result;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm volatile("mov.u32 %0, %%lanemask_eq;" : "=r"(mask));
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, %3;" : "=r"(result) : "r"(x), "r"(lane), "r"(mask));
  return result;
}

}  // namespace flash_ext
