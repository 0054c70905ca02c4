// The list of backends, see core/library.h.
#include "core/library.h"

namespace flash_ext {

extern const Backend cpu_backend;
extern const Backend sm80_backend;  // only in a build with CUDA
extern const Backend sm90_backend;  // only in one for compute capability 9.0

std::span<const Backend* const> backends() {
  // A new backend is one name here.
  static const Backend* const all[] = {
#ifdef FLASH_EXT_WITH_SM90
      &sm90_backend,
#endif
#ifdef FLASH_EXT_WITH_CUDA
      &sm80_backend,
#endif
      &cpu_backend,
  };
  return all;
}

#ifndef FLASH_EXT_WITH_CUDA
const std::vector<DeviceInfo>& cuda_devices() {
  static const std::vector<DeviceInfo> none;
  return none;
}
#endif

}  // namespace flash_ext
