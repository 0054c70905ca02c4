// Derivatives and autocast of the operators, above every backend.
//
// NOTE: hand-written autograd nodes, as PyTorch's generated code has them: torch::autograd::Function in C++ raises
// under torch.func's transforms, a Node works there, nested and under torch.compile. Neither knows forward-mode AD (a
// tangent would silently become zero), so a call with a tangent computes with the differentiable composite instead.
//
//   attention            -> AttentionBackward:        calls attention_backward
//   attention_backward   -> AttentionDoubleBackward:  chunked::double_backward, whose operations are differentiable
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "api/chunked.h"
#include "api/dispatch.h"
#include "api/nvtx.h"
#include "api/signatures.h"

namespace flash_ext {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The caller's own tensors, by reference; unpacking one that was changed in place raises.
class SavedInputs {
 public:
  SavedInputs() = default;
  explicit SavedInputs(const Inputs& in)
      : query_(in.query, false),
        key_(in.key, false),
        value_(in.value, false),
        mask_(in.mask, false),
        bias_(in.bias, false),
        alibi_slopes_(in.alibi_slopes, false) {}

  Inputs unpack() const {
    Inputs in;
    in.query = query_.unpack();
    in.key = key_.unpack();
    in.value = value_.unpack();
    in.mask = mask_.unpack();
    in.bias = bias_.unpack();
    in.alibi_slopes = alibi_slopes_.unpack();
    return in;
  }
  void release() {
    for (SavedVariable* saved : {&query_, &key_, &value_, &mask_, &bias_, &alibi_slopes_}) saved->reset_data();
  }

 private:
  SavedVariable query_, key_, value_, mask_, bias_, alibi_slopes_;
};

bool any_defined(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const Tensor& tensor) { return tensor.defined(); });
}

struct AttentionBackward : torch::autograd::Node {
  SavedInputs inputs;
  SavedVariable out, lse, rng_state;
  const bool lse_is_output;
  const Options options;

  AttentionBackward(const Inputs& in, const Options& options_, bool return_lse)
      : inputs(in), lse_is_output(return_lse), options(options_) {}

  std::string name() const override { return "AttentionBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(5);
    if (!any_defined(grads)) return result;
    const auto self = shared_from_this();
    const ForwardResult saved{out.unpack(self), lse_is_output ? lse.unpack(self) : lse.unpack(), rng_state.unpack()};
    GradMask wanted;
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    const Tensor grad_lse = lse_is_output ? grads[1] : Tensor();
    Gradients gradients = call_attention_backward(grads[0], grad_lse, inputs.unpack(), saved, options, wanted);
    std::move(gradients.begin(), gradients.end(), result.begin());
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    inputs.release();
    for (SavedVariable* saved : {&out, &lse, &rng_state}) saved->reset_data();
  }
};

struct AttentionDoubleBackward : torch::autograd::Node {
  SavedInputs inputs;
  SavedVariable grad_out, grad_lse, rng_state;
  Options options;

  std::string name() const override { return "AttentionDoubleBackward"; }

  variable_list apply(variable_list&& cotangents) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(7);
    if (!any_defined(cotangents)) return result;
    const Inputs in = inputs.unpack();
    const nvtx::Range range(nvtx::Op::kAttentionDoubleBackward, in, options);
    const Tensor g = grad_out.unpack(), g_lse = grad_lse.unpack();
    Gradients given;
    std::copy(cotangents.begin(), cotangents.end(), given.begin());
    chunked::DoubleBackward grads = chunked::double_backward(given, g, g_lse, in, rng_state.unpack(), options);
    const std::pair<Tensor, const Tensor*> all[] = {{grads.grad_out, &g},
                                                    {grads.grad_lse, &g_lse},
                                                    {grads.inputs[0], &in.query},
                                                    {grads.inputs[1], &in.key},
                                                    {grads.inputs[2], &in.value},
                                                    {grads.inputs[3], &in.bias},
                                                    {grads.inputs[4], &in.alibi_slopes}};
    for (size_t i = 0; i < result.size(); ++i) {
      const auto& [grad, like] = all[i];
      if (like->defined() && grad.defined() && task_should_compute_output(i)) result[i] = grad.to(like->scalar_type());
    }
    return result;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    inputs.release();
    for (SavedVariable* saved : {&grad_out, &grad_lse, &rng_state}) saved->reset_data();
  }
};

template <class... Tensors>
bool has_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

// What backward must not ask for again: the switches as they stand at forward time.
Options resolve(Options options) {
  if (!options.deterministic.has_value()) options.deterministic = at::globalContext().deterministicAlgorithms();
  // A node keeps the options longer than the caller keeps the name that it passed.
  options.backend = options.backend.has_value() ? stored_name(*options.backend) : requested_backend();
  return options;
}

ForwardResult differentiable(const Inputs& in, const Tensor& rng_state, const Options& options) {
  const nvtx::Range range(nvtx::Op::kAttention, in, options);
  const chunked::Forward result = chunked::forward(in, rng_state, options);
  return {result.out.to(in.query.scalar_type()), result.lse, rng_state};
}

// `compute(return_lse)` runs the operator below autograd.
template <class Compute>
ForwardResult record(const Inputs& in, const Options& options, bool return_lse, const Compute& compute) {
  const bool requires_grad =
      torch::autograd::compute_requires_grad(in.query, in.key, in.value, in.bias, in.alibi_slopes);
  if (!requires_grad) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute(return_lse);
  }
  std::shared_ptr<AttentionBackward> node(new AttentionBackward(in, options, return_lse), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(in.query, in.key, in.value, in.bias, in.alibi_slopes));
  ForwardResult result = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute(true);
  }();
  torch::autograd::set_history(result.out, node);
  if (return_lse) torch::autograd::set_history(result.lse, node);
  node->out = SavedVariable(result.out, true);
  node->lse = SavedVariable(result.lse, return_lse);
  node->rng_state = SavedVariable(result.rng_state, false);
  if (!return_lse) result.lse = at::empty({0}, result.lse.options());
  return result;
}

ForwardResult attention_autograd(c10::DispatchKeySet keys, const Inputs& in, const Options& given, bool return_lse) {
  const Options options = resolve(given);
  if (has_tangent(in.query, in.key, in.value, in.bias, in.alibi_slopes)) {
    return differentiable(in, draw_rng_state(in.query, options.dropout_p), options);
  }
  return record(in, options, return_lse, [&](bool with_lse) {
    return call_attention(keys & c10::after_autograd_keyset, in, options, with_lse);
  });
}

ForwardResult attention_with_rng_state_autograd(c10::DispatchKeySet keys, const Inputs& in, const Tensor& rng_state,
                                                const Options& given, bool return_lse) {
  const Options options = resolve(given);
  if (has_tangent(in.query, in.key, in.value, in.bias, in.alibi_slopes)) return differentiable(in, rng_state, options);
  return record(in, options, return_lse, [&](bool with_lse) {
    return call_attention_with_rng_state(keys & c10::after_autograd_keyset, in, rng_state, options, with_lse);
  });
}

Gradients attention_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& grad_lse,
                                      const Inputs& in, const ForwardResult& saved, const Options& given,
                                      const GradMask& grad_mask) {
  const Options options = resolve(given);
  if (has_tangent(grad_out, grad_lse, in.query, in.key, in.value, in.bias, in.alibi_slopes)) {
    const nvtx::Range range(nvtx::Op::kAttentionBackward, in, options);
    Gradients grads = chunked::backward(grad_out, grad_lse, in, saved.rng_state, options, grad_mask);
    const Tensor* const inputs[] = {&in.query, &in.key, &in.value, &in.bias, &in.alibi_slopes};
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) grads[i] = grads[i].to(inputs[i]->scalar_type());
    }
    return grads;
  }
  std::shared_ptr<AttentionDoubleBackward> node;
  if (torch::autograd::compute_requires_grad(grad_out, grad_lse, in.query, in.key, in.value, in.bias,
                                             in.alibi_slopes)) {
    node = std::shared_ptr<AttentionDoubleBackward>(new AttentionDoubleBackward(), torch::autograd::deleteNode);
    node->set_next_edges(
        torch::autograd::collect_next_edges(grad_out, grad_lse, in.query, in.key, in.value, in.bias, in.alibi_slopes));
    node->inputs = SavedInputs(in);
    node->grad_out = SavedVariable(grad_out, false);
    node->grad_lse = SavedVariable(grad_lse, false);
    node->rng_state = SavedVariable(saved.rng_state, false);
    node->options = options;
  }
  Gradients grads = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_attention_backward(keys & c10::after_autograd_keyset, grad_out, grad_lse, in, saved, options,
                                   grad_mask);
  }();
  if (node) {
    for (size_t i = 0; i < grads.size(); ++i) {
      torch::autograd::set_history(grad_mask[i] ? grads[i] : Tensor(), node);
    }
  }
  return grads;
}

// ---- autocast -------------------------------------------------------------------------------------------------------

// float64 stays; a bias may be float32 beside half queries; slopes are float32. The casts are recorded by autograd, so
// that gradients come back in the caller's dtypes.
template <c10::DeviceType device>
Inputs cast(const Inputs& in) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  Inputs result = in;
  for (Tensor* tensor : {&result.query, &result.key, &result.value}) {
    *tensor = at::autocast::cached_cast(dtype, *tensor, device);
  }
  if (in.bias.defined() && in.bias.scalar_type() != at::kFloat && in.bias.scalar_type() != result.query.scalar_type()) {
    result.bias = at::autocast::cached_cast(dtype, in.bias, device);
  }
  if (in.alibi_slopes.defined()) result.alibi_slopes = at::autocast::cached_cast(at::kFloat, in.alibi_slopes, device);
  return result;
}

template <c10::DeviceType device>
ForwardResult attention_autocast(c10::DispatchKeySet, const Inputs& in, const Options& options, bool return_lse) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return call_attention(cast<device>(in), options, return_lse);
}

template <c10::DeviceType device>
ForwardResult attention_with_rng_state_autocast(c10::DispatchKeySet, const Inputs& in, const Tensor& rng_state,
                                                const Options& options, bool return_lse) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  return call_attention_with_rng_state(cast<device>(in), rng_state, options, return_lse);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("attention", TORCH_FN(attention_op<attention_autograd>));
  m.impl("attention_with_rng_state", TORCH_FN(attention_with_rng_state_op<attention_with_rng_state_autograd>));
  m.impl("attention_backward", TORCH_FN(attention_backward_op<attention_backward_autograd>));
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) {
  m.impl("attention", TORCH_FN(attention_op<attention_autocast<c10::kCPU>>));
  m.impl("attention_with_rng_state",
         TORCH_FN(attention_with_rng_state_op<attention_with_rng_state_autocast<c10::kCPU>>));
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) {
  m.impl("attention", TORCH_FN(attention_op<attention_autocast<c10::kCUDA>>));
  m.impl("attention_with_rng_state",
         TORCH_FN(attention_with_rng_state_op<attention_with_rng_state_autocast<c10::kCUDA>>));
}

}  // namespace flash_ext
