// What torch/ asks about CUDA devices. Defined in cuda_runtime.cpp, which only a build with CUDA has: a build without
// has kWithCuda = false and must ask inside `if constexpr (kWithCuda)`.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "core/device.h"

namespace flash_ext {

#ifdef FLASH_EXT_WITH_CUDA
inline constexpr bool kWithCuda = true;
#else
inline constexpr bool kWithCuda = false;
#endif

// Without an index: the current device. A device that is not there is planned for as an H200.
DeviceInfo cuda_device_info(const c10::Device& device);

// Whether the device is there and in use by this process, so that asking it about a kernel makes no context.
bool is_in_use(const c10::Device& device);

// The current stream of torch on that device, a cudaStream_t.
void* current_cuda_stream(const c10::Device& device);

// torch's, of the current device and its current stream.
c10::Allocator* cuda_allocator();

}  // namespace flash_ext
