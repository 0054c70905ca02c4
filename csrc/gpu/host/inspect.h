// What the driver says about a compiled kernel, for explain: registers, memory and how many blocks share a
// multiprocessor.
//
// Called by the inspect functions of the GPU backends, never on the way to a launch. The current device is asked;
// nothing is launched. Invariant: a kernel is asked with the threads and bytes that its launch has.
#pragma once

#include <algorithm>

#include "core/plan.h"
#include "gpu/host/launch.h"

namespace flash_ext::cuda {

// A kernel that the pass starts beside its main one: only its local memory counts.
template <class... Params>
cudaFuncAttributes inspect_beside(void (*kernel)(Params...), Plan& plan) {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, kernel), "kernel attributes");
  plan.local_bytes = std::max(plan.local_bytes, static_cast<int64_t>(attributes.localSizeBytes));
  return attributes;
}

template <class... Params>
void inspect(void (*kernel)(Params...), int threads, int64_t shared_bytes, Plan& plan) {
  const cudaFuncAttributes attributes = inspect_beside(kernel, plan);
  plan.registers = attributes.numRegs;
  plan.static_bytes = static_cast<int64_t>(attributes.sharedSizeBytes);
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&plan.resident_blocks, kernel, threads, shared_bytes),
        "occupancy");
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxThreadsPerMultiProcessor, device), "device attribute");
  plan.occupancy = static_cast<double>(plan.resident_blocks * threads) / most;
}

// A kernel whose on_chip is declared statically.
template <class... Params>
void inspect_static(void (*kernel)(Params...), int threads, Plan& plan) {
  inspect(kernel, threads, 0, plan);
  plan.static_bytes -= plan.on_chip_bytes();
}

}  // namespace flash_ext::cuda
