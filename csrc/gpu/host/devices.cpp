// The CUDA devices of the machine, see core/library.h.
#include <cuda_runtime_api.h>

#include "core/library.h"

namespace flash_ext {
namespace {

// NOTE: attributes are read without making a context, which would cost hundreds of MiB on a device that is only asked.
int64_t attribute(cudaDeviceAttr what, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, what, device) != cudaSuccess) (void)cudaGetLastError();
  return value;
}

std::vector<DeviceInfo> read_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // no driver, no device
    count = 0;
  }
  std::vector<DeviceInfo> devices(count);
  for (int i = 0; i < count; ++i) {
    DeviceInfo& info = devices[i];
    info.type = DeviceType::kCuda;
    info.compute_capability = static_cast<int>(10 * attribute(cudaDevAttrComputeCapabilityMajor, i) +
                                               attribute(cudaDevAttrComputeCapabilityMinor, i));
    info.multiprocessors = static_cast<int>(attribute(cudaDevAttrMultiProcessorCount, i));
    info.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, i);
    info.shared_memory_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, i);
  }
  return devices;
}

}  // namespace

const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> devices = read_devices();
  return devices;
}

}  // namespace flash_ext
