// The flat C++ signatures of the operators, as schemas.h writes them, and adaptors from them to kernels that take the
// structures of options.h. Each signature stands here once; CPU, CUDA, Meta, Autograd and Autocast share it.
#pragma once

#include <ATen/ops/empty.h>

#include "torch/options.h"

namespace flash_ext {

using AttentionFn = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                       const OptionalTensor&, const OptionalTensor&,
                                                       const OptionalTensor&, bool, std::optional<int64_t>,
                                                       std::optional<int64_t>, bool, double, double,
                                                       std::optional<double>, bool, std::optional<bool>,
                                                       std::optional<c10::string_view>, bool);

using AttentionWithRngStateFn = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                           const OptionalTensor&, const OptionalTensor&,
                                                           const OptionalTensor&, bool, std::optional<int64_t>,
                                                           std::optional<int64_t>, bool, double, double,
                                                           std::optional<double>, bool, std::optional<bool>,
                                                           std::optional<c10::string_view>, bool);

using AttentionBackwardFn = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
    const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
    std::optional<int64_t>, std::optional<int64_t>, bool, double, double, std::optional<double>, bool,
    std::optional<bool>, std::optional<c10::string_view>, GradMask);

// Of the gradients that are asked for, those that there are.
inline GradMask existing(GradMask wanted, const Inputs& in) {
  wanted[3] = wanted[3] && in.bias.defined();
  wanted[4] = wanted[4] && in.alibi_slopes.defined();
  return wanted;
}

template <ForwardResult (*kernel)(c10::DispatchKeySet, const Inputs&, const Options&, bool)>
std::tuple<Tensor, Tensor, Tensor> attention_op(c10::DispatchKeySet keys, const Tensor& query, const Tensor& key,
                                                const Tensor& value, const OptionalTensor& mask,
                                                const OptionalTensor& bias, const OptionalTensor& alibi_slopes,
                                                bool causal, std::optional<int64_t> window_left,
                                                std::optional<int64_t> window_right, bool bottom_right, double softcap,
                                                double dropout_p, std::optional<double> scale, bool gqa,
                                                std::optional<bool> deterministic,
                                                std::optional<c10::string_view> backend, bool return_lse) {
  ForwardResult result = kernel(
      keys, Inputs(query, key, value, mask, bias, alibi_slopes),
      Options{causal, window_left, window_right, bottom_right, softcap, dropout_p, scale, gqa, deterministic, backend},
      return_lse);
  return {std::move(result.out), std::move(result.lse), std::move(result.rng_state)};
}

template <ForwardResult (*kernel)(c10::DispatchKeySet, const Inputs&, const Tensor&, const Options&, bool)>
std::tuple<Tensor, Tensor> attention_with_rng_state_op(
    c10::DispatchKeySet keys, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& rng_state,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& alibi_slopes, bool causal,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right, bool bottom_right, double softcap,
    double dropout_p, std::optional<double> scale, bool gqa, std::optional<bool> deterministic,
    std::optional<c10::string_view> backend, bool return_lse) {
  ForwardResult result = kernel(
      keys, Inputs(query, key, value, mask, bias, alibi_slopes), rng_state,
      Options{causal, window_left, window_right, bottom_right, softcap, dropout_p, scale, gqa, deterministic, backend},
      return_lse);
  return {std::move(result.out), std::move(result.lse)};
}

// An operator returns tensors: an empty one stands for a gradient that was not asked for.
template <Gradients (*kernel)(c10::DispatchKeySet, const Tensor&, const Tensor&, const Inputs&, const ForwardResult&,
                              const Options&, const GradMask&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward_op(
    c10::DispatchKeySet keys, const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& rng_state,
    const OptionalTensor& mask, const OptionalTensor& bias, const OptionalTensor& alibi_slopes, bool causal,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right, bool bottom_right, double softcap,
    double dropout_p, std::optional<double> scale, bool gqa, std::optional<bool> deterministic,
    std::optional<c10::string_view> backend, GradMask grad_mask) {
  const Inputs in(query, key, value, mask, bias, alibi_slopes);
  Gradients grads = kernel(
      keys, grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), in, {out, lse, rng_state},
      Options{causal, window_left, window_right, bottom_right, softcap, dropout_p, scale, gqa, deterministic, backend},
      existing(grad_mask, in));
  for (Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, query.options());
  }
  return {std::move(grads[0]), std::move(grads[1]), std::move(grads[2]), std::move(grads[3]), std::move(grads[4])};
}

}  // namespace flash_ext
