// The table of kernels, see core/library.h.
#include <vector>

#include "core/library.h"

namespace flash_ext {

namespace cpu {
std::span<const Kernel> kernels();
}
namespace sm80 {
std::span<const Kernel> kernels();  // only in a build with CUDA
}
namespace sm90 {
std::span<const Kernel> kernels();  // only in one for compute capability 9.0
}

std::span<const Kernel* const> kernels() {
  static const std::vector<const Kernel*> all = [] {
    std::vector<const Kernel*> rows;
    const auto add = [&](std::span<const Kernel> more) {
      for (const Kernel& kernel : more) rows.push_back(&kernel);
    };
    // A new backend is one line here.
#ifdef FLASH_EXT_WITH_SM90
    add(sm90::kernels());
#endif
#ifdef FLASH_EXT_WITH_CUDA
    add(sm80::kernels());
#endif
    add(cpu::kernels());
    return rows;
  }();
  return all;
}

#ifndef FLASH_EXT_WITH_CUDA
const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> none;
  return none;
}
#endif

}  // namespace flash_ext
