// Typed calls of the operators through the dispatcher, see options.h.
#include <ATen/core/dispatch/Dispatcher.h>

#include "torch/signatures.h"

namespace flash_ext {
namespace {

template <class Fn>
c10::TypedOperatorHandle<Fn> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Fn>();
}

const auto& attention_handle() {
  static const auto handle = find<AttentionSignature::Function>("flash_ext::attention");
  return handle;
}

const auto& attention_with_rng_state_handle() {
  static const auto handle = find<AttentionWithRngStateSignature::Function>("flash_ext::attention_with_rng_state");
  return handle;
}

const auto& attention_backward_handle() {
  static const auto handle = find<AttentionBackwardSignature::Function>("flash_ext::attention_backward");
  return handle;
}

template <class Call>
ForwardResult attention_by(const Call& call, const Inputs& in, const Options& options, bool return_lse) {
  auto [out, lse, rng_state] = AttentionSignature::call(call, in, options, return_lse);
  return {std::move(out), std::move(lse), std::move(rng_state)};
}

template <class Call>
ForwardResult with_rng_state_by(const Call& call, const Inputs& in, const Tensor& rng_state, const Options& options,
                                bool return_lse) {
  auto [out, lse] = AttentionWithRngStateSignature::call(call, in, options, rng_state, return_lse);
  return {std::move(out), std::move(lse), rng_state};
}

template <class Call>
Gradients backward_by(const Call& call, const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                      const ForwardResult& saved, const Options& options, const GradMask& grad_mask) {
  return std::apply([](auto&&... grad) { return Gradients{std::move(grad)...}; },
                    AttentionBackwardSignature::call(call, in, options, optional(grad_out), optional(grad_lse),
                                                     saved.out, saved.lse, saved.rng_state, grad_mask));
}

}  // namespace

ForwardResult call_attention(const Inputs& in, const Options& options, bool return_lse) {
  return attention_by([](const auto&... args) { return attention_handle().call(args...); }, in, options, return_lse);
}

ForwardResult call_attention(c10::DispatchKeySet keys, const Inputs& in, const Options& options, bool return_lse) {
  return attention_by([&](const auto&... args) { return attention_handle().redispatch(keys, args...); }, in, options,
                      return_lse);
}

ForwardResult call_attention_with_rng_state(const Inputs& in, const Tensor& rng_state, const Options& options,
                                            bool return_lse) {
  return with_rng_state_by([](const auto&... args) { return attention_with_rng_state_handle().call(args...); }, in,
                           rng_state, options, return_lse);
}

ForwardResult call_attention_with_rng_state(c10::DispatchKeySet keys, const Inputs& in, const Tensor& rng_state,
                                            const Options& options, bool return_lse) {
  return with_rng_state_by(
      [&](const auto&... args) { return attention_with_rng_state_handle().redispatch(keys, args...); }, in, rng_state,
      options, return_lse);
}

Gradients call_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                                  const ForwardResult& saved, const Options& options, const GradMask& grad_mask) {
  Gradients grads = backward_by([](const auto&... args) { return attention_backward_handle().call(args...); }, grad_out,
                                grad_lse, in, saved, options, grad_mask);
  const GradMask there = existing(grad_mask, in);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!there[i]) grads[i].reset();
  }
  return grads;
}

Gradients call_attention_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& grad_lse,
                                  const Inputs& in, const ForwardResult& saved, const Options& options,
                                  const GradMask& grad_mask) {
  return backward_by([&](const auto&... args) { return attention_backward_handle().redispatch(keys, args...); },
                     grad_out, grad_lse, in, saved, options, grad_mask);
}

Tensor call_draw_rng_state(const Inputs& in) {
  using Fn = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                    const OptionalTensor&);
  static const auto handle = find<Fn>("flash_ext::draw_rng_state");
  return handle.call(in.query, in.key, in.value, optional(in.mask), optional(in.bias), optional(in.alibi_slopes));
}

Tensor call_dropout_mask(const Tensor& rng_state, double dropout_p, c10::SymInt batch_heads, c10::SymInt rows,
                         c10::SymInt cols, c10::SymInt q0, c10::SymInt k0, c10::SymInt n0) {
  using Fn =
      Tensor(const Tensor&, double, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt);
  static const auto handle = find<Fn>("flash_ext::dropout_mask");
  return handle.call(rng_state, dropout_p, std::move(batch_heads), std::move(rows), std::move(cols), std::move(q0),
                     std::move(k0), std::move(n0));
}

}  // namespace flash_ext
