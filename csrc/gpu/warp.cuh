// Sums and the like over the lanes of a warp.
//
// Called by kernels of sm80 and stages. Invariant: all lanes take part, and each has the same result, whose order is
// fixed.
#pragma once

namespace flash_ext {

// fn of the x of all lanes.
template <class T, class Fn>
__device__ __forceinline__ T warp_reduce(T x, const Fn& fn) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fn(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
  return warp_reduce(x, [](T a, T b) { return a + b; });
}
__device__ __forceinline__ float warp_max(float x) {
  return warp_reduce(x, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace flash_ext
