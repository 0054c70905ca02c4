// CUDA devices and torch's streams, see cuda_runtime.h. Only in a build with CUDA.
//
// libc10_cuda.so comes with a torch that has CUDA. What is used of it is weak, so that a torch without loads this
// library, too; no CUDA tensor is there then to ask for any of it.
#include "torch/cuda_runtime.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "core/library.h"

// NOTE: by the assembler, because #pragma weak leaves a member function as it is.
asm(".weak _ZN3c104cuda12device_countEv\n"
    ".weak _ZN3c104cuda14current_deviceEv\n"
    ".weak _ZN3c104cuda17hasPrimaryContextEa\n"
    ".weak _ZN3c104cuda20CUDACachingAllocator9allocatorE\n"
    ".weak _ZN3c104cuda20getCurrentCUDAStreamEa\n"
    ".weak _ZNK3c104cuda10CUDAStream6streamEv");

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
  if (cuda_devices().empty()) return false;
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::cuda::current_device();
  return index < c10::cuda::device_count() && c10::cuda::hasPrimaryContext(index);
}

void* current_cuda_stream(const c10::Device& device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

c10::Allocator* cuda_allocator() { return c10::cuda::CUDACachingAllocator::get(); }

}  // namespace flash_ext
