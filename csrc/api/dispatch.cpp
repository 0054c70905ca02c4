// The list of backends and who may choose among them, see dispatch.h.
#include "api/dispatch.h"

#include <ATen/Parallel.h>

#include <cstdlib>

#include "api/cuda_runtime.h"

namespace flash_ext {
namespace {

// Fastest first. A new backend is one name here.
const Backend* const kBackends[] = {
#ifdef FLASH_EXT_WITH_CUDA
    &sm80_backend,
#endif
    &cpu_backend,
};

thread_local std::optional<std::string_view> requested;

std::string reason_to_refuse(const Backend& backend, const Problem& problem, Pass pass, const DeviceInfo& device) {
  if (backend.device != device.type) {
    return backend.device == DeviceType::kCpu ? "the tensors are not on the CPU"
                                              : "the tensors are not on a CUDA device";
  }
  if (problem.batch_rank > kMaxBatchDims) {
    return "the leading dimensions do not merge into " + std::to_string(kMaxBatchDims);
  }
  return backend.refuses(problem, pass, device);
}

}  // namespace

void check_backend_name(std::string_view name) {
  if (name == kChunked) return;
  std::string known;
  for (const Backend* backend : kBackends) {
    if (name == backend->name) return;
    known += std::string(backend->name) + ", ";
  }
  throw AttentionError("backend", concat("is \"", name, "\"; this build has ", known, kChunked));
}

std::string_view stored_name(std::string_view name) {
  check_backend_name(name);
  for (const Backend* backend : kBackends) {
    if (name == backend->name) return backend->name;
  }
  return kChunked;
}

std::optional<std::string_view> requested_backend() {
  if (requested.has_value()) return requested;
  // Read once: the variable is the process's choice, use_backend the program's.
  static const std::optional<std::string_view> from_environment = []() -> std::optional<std::string_view> {
    const char* name = std::getenv("FLASH_EXT_BACKEND");
    if (name == nullptr || *name == '\0') return std::nullopt;
    return stored_name(name);
  }();
  return from_environment;
}

std::optional<std::string_view> set_requested_backend(std::optional<std::string_view> name) {
  const auto before = requested;
  if (name.has_value()) {
    requested = stored_name(*name);
  } else {
    requested.reset();
  }
  return before;
}

DeviceInfo device_info(const c10::Device& device) {
  DeviceInfo info;
  if (device.is_cpu()) {
    info.type = DeviceType::kCpu;
    info.multiprocessors = at::get_num_threads();
  } else if constexpr (kWithCuda) {
    return cuda_device_info(device);
  } else {
    info.type = DeviceType::kCuda;
  }
  return info;
}

const Backend* select_backend(const Problem& problem, Pass pass, const DeviceInfo& device,
                              std::optional<std::string_view> name) {
  if (name == kChunked) return nullptr;
  for (const Backend* backend : kBackends) {
    if (name.has_value() && *name != backend->name) continue;
    const std::string reason = reason_to_refuse(*backend, problem, pass, device);
    if (reason.empty()) return backend;
    if (name.has_value()) throw AttentionError(backend->name, "refuses: " + reason);
  }
  if (name.has_value()) check_backend_name(*name);
  return nullptr;
}

std::vector<Refusal> refusals(const Problem& problem, Pass pass, const DeviceInfo& device) {
  std::vector<Refusal> result;
  for (const Backend* backend : kBackends) {
    std::string reason = reason_to_refuse(*backend, problem, pass, device);
    if (!reason.empty()) result.push_back({backend->name, std::move(reason)});
  }
  return result;
}

}  // namespace flash_ext
