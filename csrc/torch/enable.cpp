// Kernels for aten::scaled_dot_product_attention on the keys that decide who computes it. NOTE: patching the Python
// attribute would miss names that were imported earlier and C++ callers; a dispatcher registration reaches both.
//
// They are registered by the first set_enabled(true) and stay; a flag decides. NOTE: registering and unregistering
// changes one key after the other, and a call of another thread in between was computed without its gradients.
// What stays PyTorch's: other devices and unknown tensor subclasses (they dispatch on other keys), and calls for which
// its user chose one of PyTorch's own kernels. Nested tensors of the jagged layout never come here, because Python
// decides about them (flash_ext/nested.py); those of the strided layout stay PyTorch's.
#include "torch/enable.h"

#include <ATen/Context.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "torch/dispatch.h"
#include "torch/options.h"
#include "torch/text.h"

namespace flash_ext {
namespace {

std::atomic<Enabled> enabled{Enabled::kNone};
thread_local std::optional<Enabled> enabled_here;
std::atomic<int64_t> calls{0};

// Why a call goes to PyTorch though enable() is on.
struct Reason {
  const char* text;
  bool warns;  // the first such call says so
  std::atomic<int64_t> calls{0};
};
std::array<Reason, 4> reasons{{
    {"it stands in a sdpa_kernel(...) context, which chooses among PyTorch's own kernels", true, 0},
    {"torch.backends.cuda.enable_*_sdp(False) leave one of PyTorch's own kernels, which is a choice of that one", true,
     0},
    {"a tensor is nested, not strided, or not on the CPU or a CUDA device", false, 0},
    {"varlen_attn has an argument that only PyTorch serves: a cache, pages, splits, numbers of 8 bits or a head dim of "
     "its own for value",
     false, 0},
}};

std::array<bool, 5> pytorch_kernels() {
  const auto& context = at::globalContext();
  return {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
          context.userEnabledCuDNNSDP(), context.userEnabledOverrideableSDP()};
}

void set_pytorch_kernels(const std::array<bool, 5>& kernels) {
  auto& context = at::globalContext();
  context.setSDPUseFlash(kernels[0]);
  context.setSDPUseMemEfficient(kernels[1]);
  context.setSDPUseMath(kernels[2]);
  context.setSDPUseCuDNN(kernels[3]);
  context.setSDPUseOverrideable(kernels[4]);
}

Enabled enabled_now() { return enabled_here.value_or(enabled.load(std::memory_order_relaxed)); }

bool is_enabled() { return enabled_now() != Enabled::kNone; }

// A flag that switches one of PyTorch's kernels off is not a choice: it is how its users avoid a wrong one.
Reason* chosen_kernel() {
  const auto kernels = pytorch_kernels();
  if (kernels[0] && enabled_now() == Enabled::kFlash) return nullptr;
  // NOTE: only sdpa_kernel(...) switches the overrideable kernel off, which no context lists.
  if (!kernels[4]) return &reasons[0];
  return std::count(kernels.begin(), kernels.begin() + 4, true) <= 1 ? &reasons[1] : nullptr;
}

bool is_plain(const Tensor& tensor) {
  return !tensor.is_nested() && tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_cuda());
}

// Whether a call runs here, for which there may be an obstacle; it is counted either way, and the first one that is
// left for a choice warns.
bool takes_call(Reason* obstacle) {
  if (!is_enabled()) return false;
  Reason* reason = chosen_kernel();
  if (reason == nullptr) reason = obstacle;
  if (reason == nullptr) {
    calls.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  if (reason->calls.fetch_add(1, std::memory_order_relaxed) == 0 && reason->warns) {
    TORCH_WARN("flash_ext.enable(): a call of attention goes to PyTorch, because ", reason->text,
               "; flash_ext.why_not() counts such calls.");
  }
  return false;
}

Tensor kernel(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
              double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (!takes_call(is_plain(query) && is_plain(key) && is_plain(value) ? nullptr : &reasons[2])) {
    return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale,
                                                    enable_gqa);
  }
  return flash_ext::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa);
}

// Registering over functorch's own vmap rule warns; here that is the purpose.
class Quiet : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// The keys of autograd first: until they are all there, another thread's call finds PyTorch's way or this one, whole.
void register_kernels() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  for (const auto key :
       {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::FuncTorchBatched,
        c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl("scaled_dot_product_attention", TORCH_FN(kernel));
    libraries.push_back(std::move(library));
  }
}

void register_kernels_once() {
  static std::once_flag once;
  std::call_once(once, register_kernels);
}

}  // namespace

bool takes_nested_call() { return takes_call(nullptr); }

bool takes_varlen_call(bool is_served) { return takes_call(is_served ? nullptr : &reasons[3]); }

void set_enabled(bool on, bool as_flash) {
  if (on) register_kernels_once();
  enabled.store(!on ? Enabled::kNone : as_flash ? Enabled::kFlash : Enabled::kUnchosen, std::memory_order_relaxed);
}

Choice current_choice() { return {enabled_now(), requested_backend(), pytorch_kernels()}; }

Choice set_choice(const Choice& choice) {
  if (choice.enabled.value_or(Enabled::kNone) != Enabled::kNone) register_kernels_once();
  const Choice before{std::exchange(enabled_here, choice.enabled), set_requested_backend(choice.backend),
                      pytorch_kernels()};
  if (choice.kernels != before.kernels) set_pytorch_kernels(choice.kernels);
  return before;
}

std::string choice_text() {
  const bool here = is_enabled() && chosen_kernel() == nullptr;
  return concat(here ? "flash_ext" : "pytorch", ":", requested_backend().value_or("any"));
}

int64_t enabled_calls() { return calls.load(std::memory_order_relaxed); }

std::vector<std::pair<std::string, int64_t>> calls_left() {
  std::vector<std::pair<std::string, int64_t>> result;
  for (const Reason& reason : reasons) {
    const int64_t count = reason.calls.load(std::memory_order_relaxed);
    if (count > 0) result.emplace_back(reason.text, count);
  }
  return result;
}

}  // namespace flash_ext
