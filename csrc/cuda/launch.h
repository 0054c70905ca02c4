// The one way a kernel is started: on the caller's stream, with its shared memory asked for, and checked.
//
// Called by the host side of every GPU backend; the device guard is set by api/ops.cpp before. Nothing here waits for
// the device. Invariant: a launch that fails throws and leaves no sticky error behind.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flash_ext::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw std::runtime_error(std::string("flash_ext: ") + what + ": " + cudaGetErrorString(status));
}

// Kernels: plain functions or template instances. The attribute is a property of (kernel, device); setting it costs
// about as much as asking whether it is set, and only blocks that pass 48 KiB with their static share need it.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared_bytes, void* stream,
            const Args&... args) {
  if (shared_bytes > 40 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "shared memory");
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  check(cudaGetLastError(), "kernel launch");
}

// A one-dimensional grid of `items` blocks; beyond 2^31 - 1 a kernel would have to loop.
inline dim3 grid_of(int64_t items) {
  if (items > INT32_MAX) throw std::runtime_error("flash_ext: more than 2^31 - 1 tiles in one call");
  return dim3(static_cast<unsigned>(items));
}

}  // namespace flash_ext::cuda
