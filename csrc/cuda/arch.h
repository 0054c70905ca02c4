// What the device that a unit is compiled for can do; for device code alone.
#pragma once

namespace flash_ext::cuda {

// Bulk copies and additions between shared and global memory (cp.async.bulk), compute capability 9.0.
#if __CUDA_ARCH__ >= 900
constexpr bool kHasBulkAdditions = true;
#else
constexpr bool kHasBulkAdditions = false;
#endif

}  // namespace flash_ext::cuda
