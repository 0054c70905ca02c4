// What launch.h needs of the runtime beside the launch itself, compiled once.
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "gpu/host/launch.h"

namespace flash_ext::cuda {
namespace {

// The card has neither machine code nor PTX here that it could run.
[[noreturn]] void throw_no_image() {
  int device = 0, major = 0, minor = 0;
  (void)cudaGetDevice(&device);
  (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string major_text = std::to_string(major), minor_text = std::to_string(minor);
  throw std::runtime_error("flash_ext: this build has no kernels for compute capability " + major_text + "." +
                           minor_text + "; build it with FLASH_EXT_CUDA_ARCHS=native or with a list that has " +
                           major_text + minor_text);
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  // Which of the two it is depends on the call that finds out.
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) throw_no_image();
  throw std::runtime_error(std::string("flash_ext: ") + what + ": " + cudaGetErrorString(status));
}

// The attribute is a property of (kernel, device); only blocks that pass 48 KiB with their static share need it. It
// only grows, so that no thread lowers it between another's setting and its launch. NOTE: setting it took 0.4 to 0.6 us
// on an H200's host.
void allow_shared(const void* kernel, int64_t shared_bytes) {
  if (shared_bytes <= 40 * 1024) return;
  struct Allowed {
    std::mutex mutex;
    std::map<std::pair<const void*, int>, int64_t> bytes;  // at most one entry a (kernel, device)
  };
  static Allowed* const allowed = new Allowed();  // never destroyed: autograd's threads may outlive main()
  int device = 0;
  check(cudaGetDevice(&device), "device");
  const std::lock_guard<std::mutex> lock(allowed->mutex);
  int64_t& bytes = allowed->bytes[{kernel, device}];
  if (shared_bytes <= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        "shared memory");
  bytes = shared_bytes;
}

dim3 grid_of(int64_t items) {
  if (items > INT32_MAX) throw std::runtime_error("flash_ext: more than 2^31 - 1 tiles in one call");
  return dim3(static_cast<unsigned>(items));
}

}  // namespace flash_ext::cuda
