// An object that all threads of a block share.
//
// Called by kernels of sm80 and decode. Invariant: one thread writes it, and a barrier stands before the others read.
#pragma once

namespace flash_ext {

// A T in static shared memory, which may not have constructors.
template <class T>
struct SharedValue {
  alignas(T) unsigned char bytes[sizeof(T)];
  __device__ __forceinline__ T& get() { return reinterpret_cast<T&>(bytes); }
};

}  // namespace flash_ext
