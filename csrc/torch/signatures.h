// The flat C++ signatures of the operators, as schemas.h writes them, made from the lists of options.h, and adaptors
// between them and what takes the structures. CPU, CUDA, Meta, Autograd and Autocast share them.
#pragma once

#include <ATen/ops/empty.h>

#include "torch/options.h"

namespace flash_ext {

template <class... T>
struct Types {};

template <size_t kFirst, size_t... kOffsets>
constexpr auto from(std::index_sequence<kOffsets...>) {
  return std::index_sequence<kFirst + kOffsets...>();
}
// first, first + 1, ... last - 1
template <size_t kFirst, size_t kLast>
using Indices = decltype(from<kFirst>(std::make_index_sequence<kLast - kFirst>()));

template <size_t... kFirst, size_t... kSecond>
constexpr auto joined(std::index_sequence<kFirst...>, std::index_sequence<kSecond...>) {
  return std::index_sequence<kFirst..., kSecond...>();
}

template <size_t kIndex>
using InputArgument = std::conditional_t<kInputs[kIndex].required, const Tensor&, const OptionalTensor&>;
template <size_t kIndex>
using OptionArgument = typename std::tuple_element_t<kIndex, std::remove_const_t<decltype(kOptions)>>::Type;

// An operator that takes a call's inputs and options and has arguments of its own among them:
//
//   (Lead..., required inputs, Middle..., other inputs, *, options, Last..., options of later versions)
//
// Tensors are only ever appended behind the other inputs, and options, which are keyword-only, at the end, so that
// programs exported by an older version keep loading. NOTE: a rule of vmap is given positional tensors alone.
template <class Result, class Lead, class Middle, class Last, class = Indices<0, kRequiredInputs>,
          class = Indices<kRequiredInputs, std::size(kInputs)>, class = Indices<0, kFirstOptions>,
          class = Indices<kFirstOptions, kOptionCount>>
struct Signature;

template <class Result, class... Lead, class... Middle, class... Last, size_t... kRequired, size_t... kOther,
          size_t... kOption, size_t... kLaterOption>
struct Signature<Result, Types<Lead...>, Types<Middle...>, Types<Last...>, std::index_sequence<kRequired...>,
                 std::index_sequence<kOther...>, std::index_sequence<kOption...>,
                 std::index_sequence<kLaterOption...>> {
  using Function = Result(Lead..., InputArgument<kRequired>..., Middle..., InputArgument<kOther>...,
                          OptionArgument<kOption>..., Last..., OptionArgument<kLaterOption>...);

  // What is registered for an operator: kernel(keys, inputs, options, lead..., middle..., last...).
  template <auto kernel>
  static Result run(c10::DispatchKeySet keys, Lead... lead, InputArgument<kRequired>... required, Middle... middle,
                    InputArgument<kOther>... other, OptionArgument<kOption>... option, Last... last,
                    OptionArgument<kLaterOption>... later_option) {
    Inputs in;
    ((in.*kInputs[kRequired].tensor = required), ...);
    ((in.*kInputs[kOther].tensor = other.value_or(Tensor())), ...);
    Options options;
    ((options.*std::get<kOption>(kOptions).field = option), ...);
    ((options.*std::get<kLaterOption>(kOptions).field = later_option), ...);
    return kernel(keys, in, options, lead..., middle..., last...);
  }

  // call(everything, flat)
  template <class Call>
  static Result call(const Call& call, const Inputs& in, const Options& options, Lead... lead, Middle... middle,
                     Last... last) {
    return call(lead..., in.*kInputs[kRequired].tensor..., middle..., optional(in.*kInputs[kOther].tensor)...,
                options.*std::get<kOption>(kOptions).field..., last...,
                options.*std::get<kLaterOption>(kOptions).field...);
  }

  // The arguments in a schema's words, where `lead` and `middle` end with a comma and `last` does not.
  static std::string schema(const std::string& lead, const std::string& middle, const std::string& last) {
    std::string text = lead;
    ((text += std::string("Tensor ") + kInputs[kRequired].name + ", "), ...);
    text += middle;
    ((text += std::string("Tensor? ") + kInputs[kOther].name + "=None, "), ...);
    text += "*, ";
    ((text += std::string(std::get<kOption>(kOptions).schema) + ", "), ...);
    text += last;
    ((text += std::string(", ") + std::get<kLaterOption>(kOptions).schema), ...);
    return text;
  }
};

template <size_t>
using TensorAt = Tensor;
template <size_t... kIndex>
std::tuple<TensorAt<kIndex>...> as_tuple(Gradients&& grads, std::index_sequence<kIndex...>) {
  return {std::move(grads[kIndex])...};
}
using GradientTuple = decltype(as_tuple({}, std::make_index_sequence<kGradients>()));

using AttentionSignature = Signature<std::tuple<Tensor, Tensor, Tensor>, Types<>, Types<>, Types<bool>>;
using AttentionWithRngStateSignature =
    Signature<std::tuple<Tensor, Tensor>, Types<>, Types<const Tensor&>, Types<bool>>;
using AttentionBackwardSignature = Signature<GradientTuple, Types<const OptionalTensor&, const OptionalTensor&>,
                                             Types<const Tensor&, const Tensor&, const Tensor&>, Types<GradMask>>;
using ExplainSignature = Signature<std::string, Types<>, Types<>, Types<c10::string_view, GradMask>>;

// Kernels of an operator, which take structures, as what is registered for it.

template <ForwardResult (*kernel)(c10::DispatchKeySet, const Inputs&, const Options&, bool)>
std::tuple<Tensor, Tensor, Tensor> attention_op(c10::DispatchKeySet keys, const Inputs& in, const Options& options,
                                                bool return_lse) {
  ForwardResult result = kernel(keys, in, options, return_lse);
  return {std::move(result.out), std::move(result.lse), std::move(result.rng_state)};
}

template <ForwardResult (*kernel)(c10::DispatchKeySet, const Inputs&, const Tensor&, const Options&, bool)>
std::tuple<Tensor, Tensor> attention_with_rng_state_op(c10::DispatchKeySet keys, const Inputs& in,
                                                       const Options& options, const Tensor& rng_state,
                                                       bool return_lse) {
  ForwardResult result = kernel(keys, in, rng_state, options, return_lse);
  return {std::move(result.out), std::move(result.lse)};
}

// An operator returns tensors: an empty one stands for a gradient that was not asked for.
template <Gradients (*kernel)(c10::DispatchKeySet, const Tensor&, const Tensor&, const Inputs&, const ForwardResult&,
                              const Options&, const GradMask&)>
GradientTuple attention_backward_op(c10::DispatchKeySet keys, const Inputs& in, const Options& options,
                                    const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& out,
                                    const Tensor& lse, const Tensor& rng_state, GradMask grad_mask) {
  Gradients grads = kernel(keys, grad_out.value_or(Tensor()), grad_lse.value_or(Tensor()), in, {out, lse, rng_state},
                           options, existing(grad_mask, in));
  for (Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, in.query.options().dtype(result_type(in, options)));
  }
  return as_tuple(std::move(grads), std::make_index_sequence<kGradients>());
}

}  // namespace flash_ext
