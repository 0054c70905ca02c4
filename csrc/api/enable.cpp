// Kernels for aten::scaled_dot_product_attention on the keys that decide who computes it. NOTE: patching the Python
// attribute would miss names that were imported earlier and C++ callers; a dispatcher registration reaches both.
// What stays PyTorch's: nested tensors, other devices, unknown tensor subclasses (they dispatch on other keys), and
// calls inside a sdpa_kernel(...) context, which asks for one of PyTorch's own backends.
#include "api/enable.h"

#include <ATen/Context.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "api/options.h"

namespace flash_ext {
namespace {

std::atomic<int64_t> calls{0};

bool all_sdp_backends_allowed() {
  const auto& context = at::globalContext();
  return context.userEnabledFlashSDP() && context.userEnabledMemEfficientSDP() && context.userEnabledMathSDP() &&
         context.userEnabledCuDNNSDP();
}

bool is_plain(const Tensor& tensor) {
  return !tensor.is_nested() && tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda());
}

Tensor kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
              double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (!all_sdp_backends_allowed() || !is_plain(query) || !is_plain(key) || !is_plain(value)) {
    return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                                    enable_gqa);
  }
  calls.fetch_add(1, std::memory_order_relaxed);
  return flash_ext::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

// Registering over functorch's own vmap rule warns; here that is the purpose.
class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

std::vector<std::unique_ptr<torch::Library>> register_all() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  std::vector<std::unique_ptr<torch::Library>> libraries;
  for (const auto key :
       {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
        c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("scaled_dot_product_attention", TORCH_FN(kernel));
    libraries.push_back(std::move(library));
  }
  return libraries;
}

}  // namespace

bool set_enabled(bool on) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  std::lock_guard<std::mutex> lock(mutex);
  const bool before = !libraries.empty();
  if (on && !before) libraries = register_all();
  if (!on) libraries.clear();
  return before;
}

int64_t enabled_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace flash_ext
