// Stands in for csrc/gpu/arch.h: a device of compute capability 9.0.
#pragma once

namespace flash_ext {

constexpr int kComputeCapability = 90;
constexpr bool kHasBulkAdditions = true;

}  // namespace flash_ext
