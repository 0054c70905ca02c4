// The options of an attention call as one structure, its tensors as another, and calls of the operators with them.
// The operators themselves take everything flat (schemas.h); signatures.h turns one form into the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

namespace flash_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using GradMask = std::array<bool, 5>;  // query, key, value, bias, alibi_slopes

struct Options {
  bool causal = false;
  std::optional<int64_t> window_left;
  std::optional<int64_t> window_right;
  bool bottom_right = false;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::optional<double> scale;
  bool gqa = false;                         // key and value heads may be fewer than query heads
  std::optional<bool> deterministic;        // none: torch's global switch, read at forward time
  std::optional<std::string_view> backend;  // none: use_backend, FLASH_EXT_BACKEND, else the first that accepts
};

// The tensors of a call; an undefined tensor is an absent one.
struct Inputs {
  Tensor query, key, value, mask, bias, alibi_slopes;

  Inputs() = default;
  Inputs(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask_, const OptionalTensor& bias_,
         const OptionalTensor& alibi)
      : query(q),
        key(k),
        value(v),
        mask(mask_.value_or(Tensor())),
        bias(bias_.value_or(Tensor())),
        alibi_slopes(alibi.value_or(Tensor())) {}
};

inline OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

struct ForwardResult {
  Tensor out, lse, rng_state;
};

using Gradients = std::array<Tensor, 5>;  // query, key, value, bias, alibi_slopes

// Calls through the dispatcher; with a key set, from below the key (autograd, autocast) whose kernel is calling, which
// hands on what it gets: there a gradient that was not asked for is an empty tensor, else an undefined one.
ForwardResult call_attention(const Inputs& in, const Options& options, bool return_lse);
ForwardResult call_attention(c10::DispatchKeySet keys, const Inputs& in, const Options& options, bool return_lse);
ForwardResult call_attention_with_rng_state(const Inputs& in, const Tensor& rng_state, const Options& options,
                                            bool return_lse);
ForwardResult call_attention_with_rng_state(c10::DispatchKeySet keys, const Inputs& in, const Tensor& rng_state,
                                            const Options& options, bool return_lse);
Gradients call_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                                  const ForwardResult& saved, const Options& options, const GradMask& grad_mask);
Gradients call_attention_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& grad_lse,
                                  const Inputs& in, const ForwardResult& saved, const Options& options,
                                  const GradMask& grad_mask);
Tensor call_dropout_mask(const Tensor& rng_state, double dropout_p, c10::SymInt batch_heads, c10::SymInt rows,
                         c10::SymInt cols, c10::SymInt q0, c10::SymInt k0);

// {seed, offset} of the dropout map, by the operator draw_rng_state.
Tensor call_draw_rng_state(const Inputs& in);

// The drop-in, with its own checks: what ops.cpp and bindings.cpp expose.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa);

}  // namespace flash_ext
