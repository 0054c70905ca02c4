// CUDA devices and torch's streams, see cuda_runtime.h. Only in a build with CUDA.
#include "torch/cuda_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <vector>

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

constexpr DeviceInfo kH200 = {DeviceType::kCuda, 90, 132, 232448, 233472};

}  // namespace

DeviceInfo cuda_device_info(const c10::Device& device) {
  static const std::vector<DeviceInfo> devices = read_devices();
  if (devices.empty()) return kH200;
  const size_t index = device.has_index() ? device.index() : c10::cuda::current_device();
  return index < devices.size() ? devices[index] : kH200;
}

bool is_in_use(const c10::Device& device) {
  if (c10::cuda::device_count() == 0) return false;
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  return index < c10::cuda::device_count() && c10::cuda::hasPrimaryContext(index);
}

void* current_cuda_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

c10::Allocator* cuda_allocator() { return c10::cuda::CUDACachingAllocator::get(); }

}  // namespace flash_ext
