// CUDA devices and torch's streams, see cuda_runtime.h. Only in a build with CUDA.
#include "torch/cuda_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "core/library.h"

namespace flash_ext {
namespace {

constexpr DeviceInfo kH200 = {DeviceType::kCuda, 90, 132, 232448, 233472};

}  // namespace

DeviceInfo cuda_device_info(const c10::Device& device) {
  const std::vector<DeviceInfo>& devices = cuda_devices();
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
