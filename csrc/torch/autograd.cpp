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
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "torch/checks.h"
#include "torch/chunked.h"
#include "torch/dispatch.h"
#include "torch/nodes.h"
#include "torch/nvtx.h"
#include "torch/quantize.h"
#include "torch/signatures.h"

namespace flash_ext {
namespace {

bool has_tangent(const Inputs& in) {
  return with_differentiable(in, [](const auto&... t) { return (torch::autograd::isFwGradDefined(t) || ...); });
}

// What backward must not ask for again: the switches as they stand at forward time.
Options resolve(Options options) {
  if (!options.deterministic.has_value()) options.deterministic = at::globalContext().deterministicAlgorithms();
  // A node keeps the options longer than the caller keeps the name that it passed.
  options.backend = options.backend.has_value() ? stored_name(*options.backend) : requested_backend();
  return options;
}

ForwardResult differentiable(const Inputs& in, const Tensor& rng_state, const Options& options) {
  if (fp8::has(in)) {
    check_call<c10::SymInt>(in, options);
    fp8::check_no_gradient(in);
    fp8::check_not_recorded(in, "a tangent (forward-mode AD)");
    return differentiable(fp8::dequantised(in, options), rng_state, options);
  }
  const nvtx::Range range(nvtx::Op::kAttention, in, options);
  const chunked::Forward result = chunked::forward(in, rng_state, options);
  return {result.out.to(in.query.scalar_type()), result.lse, rng_state};
}

// `compute(return_lse)` runs the operator below autograd.
template <class Compute>
ForwardResult record(const Inputs& in, const Options& options, bool return_lse, const Compute& compute) {
  if (fp8::has(in)) fp8::check_no_gradient(in);
  const bool requires_grad =
      with_differentiable(in, [](const auto&... t) { return torch::autograd::compute_requires_grad(t...); });
  if (!requires_grad) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute(return_lse);
  }
  auto edges = with_differentiable(in, [](const auto&... t) { return torch::autograd::collect_next_edges(t...); });
  const fp8::Leaves leaves = fp8::has(in) ? fp8::go_past_quantize(edges, 0, in) : fp8::Leaves{};
  const auto node = compat::make_node<AttentionBackward>(options, leaves);
  node->set_next_edges(std::move(edges));
  ForwardResult result = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return compute(true);
  }();
  torch::autograd::set_history(result.out, node);
  if (return_lse) torch::autograd::set_history(result.lse, node);
  node->save(in);
  node->save(result.out, true);
  node->save(result.lse, return_lse);
  node->save(result.rng_state);
  compat::node_is_complete(node);
  if (!return_lse) result.lse = at::empty({0}, result.lse.options());
  return result;
}

ForwardResult attention_autograd(c10::DispatchKeySet keys, const Inputs& in, const Options& given, bool return_lse) {
  const Options options = resolve(given);
  if (options.dropout_p > 0) {
    check_call<c10::SymInt>(in, options);  // a wrong call draws no random numbers
    return call_attention_with_rng_state(in, call_draw_rng_state(in), options, return_lse);
  }
  if (has_tangent(in)) {
    return differentiable(in, at::empty({0}, in.query.options().dtype(at::kLong)), options);
  }
  return record(in, options, return_lse, [&](bool with_lse) {
    return call_attention(keys & c10::after_autograd_keyset, in, options, with_lse);
  });
}

ForwardResult attention_with_rng_state_autograd(c10::DispatchKeySet keys, const Inputs& in, const Tensor& rng_state,
                                                const Options& given, bool return_lse) {
  const Options options = resolve(given);
  if (has_tangent(in)) return differentiable(in, rng_state, options);
  return record(in, options, return_lse, [&](bool with_lse) {
    return call_attention_with_rng_state(keys & c10::after_autograd_keyset, in, rng_state, options, with_lse);
  });
}

Gradients attention_backward_autograd(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& grad_lse,
                                      const Inputs& in, const ForwardResult& saved, const Options& given,
                                      const GradMask& grad_mask) {
  const Options options = resolve(given);
  using torch::autograd::isFwGradDefined;
  if (isFwGradDefined(grad_out) || isFwGradDefined(grad_lse) || has_tangent(in)) {
    const nvtx::Range range(nvtx::Op::kAttentionBackward, in, options);
    if (fp8::has(in)) {
      check_call<c10::SymInt>(in, options);
      fp8::check_not_recorded(in, "a tangent (forward-mode AD)");
    }
    const Inputs read = fp8::has(in) ? fp8::dequantised(in, options) : in;
    Gradients grads = chunked::backward(grad_out, grad_lse, read, saved, options, grad_mask);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) grads[i] = grads[i].to((read.*kDifferentiable[i].tensor).scalar_type());
    }
    return grads;
  }
  compat::NodePtr<AttentionDoubleBackward> node;
  const bool requires_grad = with_differentiable(
      in, [&](const auto&... t) { return torch::autograd::compute_requires_grad(grad_out, grad_lse, t...); });
  if (requires_grad) {
    auto edges = with_differentiable(
        in, [&](const auto&... t) { return torch::autograd::collect_next_edges(grad_out, grad_lse, t...); });
    const fp8::Leaves leaves = fp8::has(in) ? fp8::go_past_quantize(edges, 2, in) : fp8::Leaves{};
    node = compat::make_node<AttentionDoubleBackward>(options, leaves);
    node->set_next_edges(std::move(edges));
    node->save(in);
    for (const Tensor* tensor : {&grad_out, &grad_lse, &saved.rng_state}) node->save(*tensor);
  }
  Gradients grads = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_attention_backward(keys & c10::after_autograd_keyset, grad_out, grad_lse, in, saved, options,
                                   grad_mask);
  }();
  if (node) {
    for (size_t i = 0; i < grads.size(); ++i) {
      Tensor grad = grad_mask[i] ? grads[i] : Tensor();
      torch::autograd::set_history(grad, node);
    }
    compat::node_is_complete(node);
  }
  return grads;
}

// ---- autocast -------------------------------------------------------------------------------------------------------

// float64 stays; a bias may be float32 beside half queries; slopes and sinks are float32. The casts are recorded by
// autograd, so that gradients come back in the caller's dtypes.
template <c10::DeviceType device>
Inputs cast(const Inputs& in, Options& options) {
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  Inputs result = in;
  if (fp8::has_any(in)) {  // e4m3 stays, and out is of autocast's dtype
    if (fp8::has(in) && !options.out_dtype.has_value()) options.out_dtype = dtype;
  } else {
    for (Tensor* tensor : {&result.query, &result.key, &result.value}) {
      *tensor = at::autocast::cached_cast(dtype, *tensor, device);
    }
  }
  if (in.bias.defined() && in.bias.scalar_type() != at::kFloat &&
      in.bias.scalar_type() != result_type(result, options)) {
    result.bias = at::autocast::cached_cast(dtype, in.bias, device);
  }
  for (Tensor Inputs::*const of_heads : {&Inputs::alibi_slopes, &Inputs::sinks}) {
    const Tensor& given = in.*of_heads;
    if (given.defined() && given.scalar_type() != at::kDouble) {
      result.*of_heads = at::autocast::cached_cast(at::kFloat, given, device);
    }
  }
  return result;
}

template <c10::DeviceType device>
ForwardResult attention_autocast(c10::DispatchKeySet, const Inputs& in, const Options& given, bool return_lse) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  Options options = given;
  const Inputs read = cast<device>(in, options);
  return call_attention(read, options, return_lse);
}

template <c10::DeviceType device>
ForwardResult attention_with_rng_state_autocast(c10::DispatchKeySet, const Inputs& in, const Tensor& rng_state,
                                                const Options& given, bool return_lse) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  Options options = given;
  const Inputs read = cast<device>(in, options);
  return call_attention_with_rng_state(read, rng_state, options, return_lse);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_ext, Autograd, m) {
  m.impl("draw_rng_state", torch::CppFunction::makeFallthrough());  // whole numbers have no derivative
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<attention_autograd>>)));
  m.impl(
      "attention_with_rng_state",
      TORCH_FN((AttentionWithRngStateSignature::run<attention_with_rng_state_op<attention_with_rng_state_autograd>>)));
  m.impl("attention_backward",
         TORCH_FN((AttentionBackwardSignature::run<attention_backward_op<attention_backward_autograd>>)));
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCPU, m) {
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<attention_autocast<c10::kCPU>>>)));
  m.impl("attention_with_rng_state",
         TORCH_FN((AttentionWithRngStateSignature::run<
                   attention_with_rng_state_op<attention_with_rng_state_autocast<c10::kCPU>>>)));
}

TORCH_LIBRARY_IMPL(flash_ext, AutocastCUDA, m) {
  m.impl("attention", TORCH_FN((AttentionSignature::run<attention_op<attention_autocast<c10::kCUDA>>>)));
  m.impl("attention_with_rng_state",
         TORCH_FN((AttentionWithRngStateSignature::run<
                   attention_with_rng_state_op<attention_with_rng_state_autocast<c10::kCUDA>>>)));
}

}  // namespace flash_ext
