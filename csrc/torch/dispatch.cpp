// Who may choose among the backends, see dispatch.h.
#include "torch/dispatch.h"

#include <ATen/Parallel.h>

#include <cstdlib>

#include "core/library.h"
#include "torch/cuda_runtime.h"

namespace flash_ext {
namespace {

thread_local std::optional<std::string_view> requested;

const Backend* find_backend(std::string_view name) {
  for (const Backend* backend : backends()) {
    if (name == backend->name) return backend;
  }
  return nullptr;
}

// What a backend is asked about, in either pass.
struct Asked {
  const ForwardArgs& forward;
  const BackwardArgs* backward = nullptr;
};

Pass pass_of(const Asked& asked) { return asked.backward == nullptr ? Pass::kForward : Pass::kBackward; }

std::string reason_to_refuse(const Backend& backend, const Asked& asked, const DeviceInfo& device) {
  const Problem& problem = asked.forward.problem;
  if (backend.device != device.type) {
    return backend.device == DeviceType::kCpu ? "the tensors are not on the CPU"
                                              : "the tensors are not on a CUDA device";
  }
  if (problem.batch_rank > kMaxBatchDims) {
    return "the leading dimensions do not merge into " + std::to_string(kMaxBatchDims);
  }
  // Valid and rare: the scores are all 0, or there is no output. No tile has to think of it.
  if (problem.head_dim == 0) return "head_dim is 0";
  if (problem.head_dim_v == 0) return "head_dim_v is 0";
  std::string reason = backend.refuses(problem, pass_of(asked), device);
  if (reason.empty() && backend.refuses_views != nullptr) {
    reason = backend.refuses_views(asked.forward, asked.backward);
  }
  return reason;
}

std::string reason_to_yield(const Backend& backend, const Asked& asked) {
  return backend.yields == nullptr ? "" : backend.yields(asked.forward.problem, pass_of(asked));
}

const Backend* select(const Asked& asked, const DeviceInfo& device, std::optional<std::string_view> name) {
  if (name == kChunked) return nullptr;
  if (name.has_value()) {
    check_backend_name(*name);
    const Backend* named = find_backend(*name);
    const std::string reason = reason_to_refuse(*named, asked, device);
    if (!reason.empty()) throw AttentionError(named->name, "refuses: " + reason);
    return named;
  }
  const Backend* yielding = nullptr;
  for (const Backend* backend : backends()) {
    if (!reason_to_refuse(*backend, asked, device).empty()) continue;
    if (reason_to_yield(*backend, asked).empty()) return backend;
    if (yielding == nullptr) yielding = backend;
  }
  return yielding;
}

std::vector<Refusal> all_refusals(const Asked& asked, const DeviceInfo& device, std::optional<std::string_view> name) {
  std::vector<Refusal> result;
  const Backend* const selected = name.has_value() ? nullptr : select(asked, device, name);
  for (const Backend* backend : backends()) {
    std::string reason = reason_to_refuse(*backend, asked, device);
    const bool yields = reason.empty() && selected != nullptr && selected != backend;
    if (yields) reason = reason_to_yield(*backend, asked);
    if (!reason.empty()) result.push_back({backend->name, std::move(reason), yields});
  }
  return result;
}

}  // namespace

void check_backend_name(std::string_view name) {
  if (name == kChunked || find_backend(name) != nullptr) return;
  std::string known;
  for (const Backend* backend : backends()) known += std::string(backend->name) + ", ";
  throw AttentionError("backend", concat("is \"", name, "\"; this build has ", known, kChunked));
}

std::string_view stored_name(std::string_view name) {
  check_backend_name(name);
  const Backend* backend = find_backend(name);
  return backend != nullptr ? std::string_view(backend->name) : kChunked;
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

const Backend* select_backend(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name) {
  return select({args}, device, name);
}

const Backend* select_backend(const BackwardArgs& args, const DeviceInfo& device,
                              std::optional<std::string_view> name) {
  return select({args.fwd, &args}, device, name);
}

std::optional<BiasGradientStep> bias_gradient_step(const Backend& backend, const BackwardArgs& args,
                                                   const DeviceInfo& device) {
  if (backend.leaves_bias_gradient == nullptr || !backend.leaves_bias_gradient(args.fwd.problem)) return std::nullopt;
  BiasGradientStep step{nullptr, args, {}};
  Problem& problem = step.args.fwd.problem;
  problem.wants_dq = problem.wants_dk = problem.wants_dv = problem.wants_dalibi = false;
  step.args.dq = step.args.dk = step.args.dv = TensorView();
  step.args.dalibi = nullptr;
  step.backend = select(Asked{step.args.fwd, &step.args}, device, std::nullopt);
  if (step.backend == nullptr || step.backend == &backend) {
    throw AttentionError(backend.name, "leaves the gradient of the bias to another backend, and none takes it");
  }
  step.plan = step.backend->plan(problem, Pass::kBackward, device);
  return step;
}

std::vector<Refusal> refusals(const ForwardArgs& args, const DeviceInfo& device, std::optional<std::string_view> name) {
  return all_refusals({args}, device, name);
}

std::vector<Refusal> refusals(const BackwardArgs& args, const DeviceInfo& device,
                              std::optional<std::string_view> name) {
  return all_refusals({args.fwd, &args}, device, name);
}

}  // namespace flash_ext
