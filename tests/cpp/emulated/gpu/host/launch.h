// Stands in for csrc/gpu/host/launch.h: a launch runs the kernel before it returns.
#pragma once

#include <stdexcept>
#include <string>

#include "emulator.h"

namespace flash_ext::cuda {

inline unsigned emulated_seed = 1;  // of the order of threads

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("flash_ext: ") + what);
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared_bytes, void*, const Args&... args) {
  emulated::run(grid.x, threads, shared_bytes, emulated_seed, [&] { kernel(args...); });
}

template <class... Params, class... Args>
void launch_dependent(void (*kernel)(Params...), dim3 grid, int threads, int64_t shared_bytes, void* stream,
                      const Args&... args) {
  launch(kernel, grid, threads, shared_bytes, stream, args...);
}

inline dim3 grid_of(int64_t items) { return dim3(static_cast<unsigned>(items)); }

template <class... Params>
bool is_made_for(void (*)(Params...), int) {
  return true;
}

}  // namespace flash_ext::cuda
