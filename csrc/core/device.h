// Where a problem runs: what planning asks of a device.
#pragma once

#include <cstdint>

namespace flash_ext {

enum class DeviceType : uint8_t { kCpu, kCuda };

// Where a problem would run; filled without touching the device, so that explain can plan for an absent one.
struct DeviceInfo {
  DeviceType type = DeviceType::kCpu;
  int compute_capability = 0;                    // 90 for 9.0; 0 on the CPU
  int multiprocessors = 0;                       // SMs, or threads on the CPU
  int64_t shared_memory_per_block = 0;           // bytes, opt-in maximum; 0 on the CPU
  int64_t shared_memory_per_multiprocessor = 0;  // bytes; what the blocks that share one have together
};

}  // namespace flash_ext
