// What the device that a unit is compiled for can do; for device code alone.
#pragma once

namespace flash_ext {

#ifdef __CUDA_ARCH__
constexpr int kComputeCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kComputeCapability = 0;
#endif

// Bulk copies and additions between shared and global memory (cp.async.bulk).
constexpr bool kHasBulkAdditions = kComputeCapability >= 90;

}  // namespace flash_ext
