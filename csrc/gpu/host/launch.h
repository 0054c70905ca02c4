// The one way a kernel is started: on the caller's stream, with its shared memory asked for, and checked.
//
// Called by the host side of every GPU backend; operators in torch/ set the device guard before. Nothing here waits for
// the device. Invariant: a launch that fails throws and leaves no sticky error behind.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_ext::cuda {

// Throws what the runtime says of a failed call. Nothing stays behind for the next caller of the runtime.
void check(cudaError_t status, const char* what);

// A kernel's attribute, which blocks that pass 48 KiB with their static share need. It only grows.
void allow_shared(const void* kernel, int64_t shared_bytes);

// Kernels: plain functions or template instances.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared_bytes, void* stream,
            const Args&... args) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args...);
  check(cudaGetLastError(), "kernel launch");
}

// The same as a dependent of the kernel launched before it on this stream (compute capability 9.0): it may begin before
// that one has ended and waits for its results itself, by grid_dependency_wait (gpu/ptx/grid.cuh). What was launched
// earlier has ended, because that one was launched by launch() or has waited in its turn.
template <class... Params, class... Args>
void launch_dependent(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared_bytes, void* stream,
                      const Args&... args) {
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "kernel launch");
}

// A one-dimensional grid of `items` blocks; beyond 2^31 - 1 a kernel would have to loop.
dim3 grid_of(int64_t items);

// Whether what the device runs of a kernel was written for this architecture (90: 9.0) or a later one. It is not where
// a later card runs what the driver makes of PTX of an earlier one.
template <class... Params>
bool is_made_for(void (*kernel)(Params...), int architecture) {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, kernel), "kernel attributes");
  return attributes.ptxVersion >= architecture;
}

}  // namespace flash_ext::cuda
