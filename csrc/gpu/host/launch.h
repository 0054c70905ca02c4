// The one way a kernel is started: on the caller's stream, with its shared memory asked for, and checked.
//
// Called by the host side of every GPU backend; the device guard is set by torch/ops.cpp before. Nothing here waits for
// the device. Invariant: a launch that fails throws and leaves no sticky error behind.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace flash_ext::cuda {

// The card has neither machine code nor PTX here that it could run.
[[noreturn]] inline void throw_no_image() {
  int device = 0, major = 0, minor = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string major_text = std::to_string(major), minor_text = std::to_string(minor);
  throw std::runtime_error("flash_ext: this build has no kernels for compute capability " + major_text + "." +
                           minor_text + "; build it with FLASH_EXT_CUDA_ARCHS=native or with a list that has " +
                           major_text + minor_text);
}

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  // Which of the two it is depends on the call that finds out.
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) throw_no_image();
  throw std::runtime_error(std::string("flash_ext: ") + what + ": " + cudaGetErrorString(status));
}

// The attribute is a property of (kernel, device); only blocks that pass 48 KiB with their static share need it. It
// only grows, so that no thread lowers it between another's setting and its launch. NOTE: setting it took 0.4 to 0.6 us
// on an H200's host.
inline void allow_shared(const void* kernel, int64_t shared_bytes) {
  if (shared_bytes <= 40 * 1024) return;
  struct Allowed {
    std::mutex mutex;
    std::map<std::pair<const void*, int>, int64_t> bytes;  // at most one entry a (kernel, device)
  };
  static Allowed* const allowed = new Allowed();  // never destroyed: autograd's threads may outlive main()
  int device = 0;
  check(cudaGetDevice(&device), "device");
  const std::lock_guard<std::mutex> lock(allowed->mutex);
  int64_t& bytes = allowed->bytes[{kernel, device}];
  if (shared_bytes <= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "shared memory");
  bytes = shared_bytes;
}

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
inline dim3 grid_of(int64_t items) {
  if (items > INT32_MAX) throw std::runtime_error("flash_ext: more than 2^31 - 1 tiles in one call");
  return dim3(static_cast<unsigned>(items));
}

// Whether what the device runs of a kernel was written for this architecture (90: 9.0) or a later one. It is not where
// a later card runs what the driver makes of PTX of an earlier one.
template <class... Params>
bool is_made_for(void (*kernel)(Params...), int architecture) {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, kernel), "kernel attributes");
  return attributes.ptxVersion >= architecture;
}

}  // namespace flash_ext::cuda
