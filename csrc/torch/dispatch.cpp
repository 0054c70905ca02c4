// Who may choose among the kernels, see dispatch.h.
#include "torch/dispatch.h"

#include <ATen/Parallel.h>

#include <cstdlib>

#include "core/library.h"
#include "torch/cuda_runtime.h"

namespace flash_ext {
namespace {

thread_local std::optional<std::string_view> requested;

// The name as the table has it, of a backend or of a kernel; empty: nobody's.
std::string_view known_name(std::string_view name) {
  for (const Kernel* kernel : kernels()) {
    if (name == kernel->backend) return kernel->backend;
    if (name == kernel->name) return kernel->name;
  }
  return {};
}

// A named kernel that refuses is an error.
void check_chosen(const Kernel* chosen, Pass pass, const Asked& asked, const DeviceInfo& device,
                  std::string_view name) {
  if (chosen != nullptr || name.empty()) return;
  const std::vector<Considered> rows = consider(kernels(), pass, asked, device);
  const Considered* const row = nearest(kernels(), pass, name, rows);
  const char* const missing = pass == Pass::kForward ? "it has no forward" : "it has no backward";
  throw AttentionError(std::string(name), "refuses: " + (row == nullptr ? missing : row->reason));
}

}  // namespace

void check_backend_name(std::string_view name) {
  if (name == kChunked || !known_name(name).empty()) return;
  std::string known;
  std::string_view last;
  for (const Kernel* kernel : kernels()) {
    if (last == kernel->backend) continue;
    last = kernel->backend;
    known += std::string(last) + ", ";
  }
  throw AttentionError("backend", concat("is \"", name, "\"; this build has ", known, kChunked));
}

std::string_view stored_name(std::string_view name) {
  check_backend_name(name);
  return name == kChunked ? kChunked : known_name(name);
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

const Kernel* find_kernel(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name) {
  if (name == kChunked) return nullptr;
  return select_forward(kernels(), args, device, name.has_value() ? stored_name(*name) : std::string_view());
}

const Kernel* choose_kernel(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name) {
  const Kernel* const kernel = find_kernel(args, device, name);
  if (name != kChunked) {
    check_chosen(kernel, Pass::kForward, {args}, device, name.has_value() ? stored_name(*name) : std::string_view());
  }
  return kernel;
}

Stages choose_stages(const BackwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name) {
  if (name == kChunked) return {};
  const std::string_view wanted = name.has_value() ? stored_name(*name) : std::string_view();
  const Stages chosen = select_backward(kernels(), args, device, wanted);
  check_chosen(chosen.main(), Pass::kBackward, {args.fwd, &args}, device, wanted);
  return chosen;
}

}  // namespace flash_ext
