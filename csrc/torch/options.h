// The arguments of an attention call: its tensors and its options, each a structure and a list. All that repeats them
// follows from the lists: schemas (schemas.h), signatures and adaptors (signatures.h), nodes, bindings, explain.
//
// A new one is a member and a line of its list, here; what it means is for checks.cpp, problem.cpp and the reference.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace flash_ext {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- tensors --------------------------------------------------------------------------------------------------------

// An undefined tensor is an absent one.
struct Inputs {
  Tensor query, key, value, mask, bias, alibi_slopes;
  // With cu_seqlens_q query, key and value are packed sequences, (rows, heads, head_dim), see core/sequences.h.
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Tensor sinks;
  Tensor q_descale, k_descale, v_descale;  // of e4m3 inputs, see fp8.h

  bool packed() const { return cu_seqlens_q.defined(); }
};

struct Input {
  const char* name;
  Tensor Inputs::*tensor;
  bool required;
  bool differentiable;
};

// In the order of the schemas: those that are required, then the others, the last of which came after the first
// version.
inline constexpr Input kInputs[] = {
    {"query", &Inputs::query, true, true},
    {"key", &Inputs::key, true, true},
    {"value", &Inputs::value, true, true},
    {"mask", &Inputs::mask, false, false},
    {"bias", &Inputs::bias, false, true},
    {"alibi_slopes", &Inputs::alibi_slopes, false, true},
    {"cu_seqlens_q", &Inputs::cu_seqlens_q, false, false},
    {"cu_seqlens_k", &Inputs::cu_seqlens_k, false, false},
    {"seqused_q", &Inputs::seqused_q, false, false},
    {"seqused_k", &Inputs::seqused_k, false, false},
    {"sinks", &Inputs::sinks, false, false},  // their gradient is an operator of its own, sinks_gradient
    {"q_descale", &Inputs::q_descale, false, false},
    {"k_descale", &Inputs::k_descale, false, false},
    {"v_descale", &Inputs::v_descale, false, false},
};
inline constexpr size_t kRequiredInputs = 3, kFirstInputs = 6;

constexpr size_t count_gradients() {
  size_t count = 0;
  for (const Input& input : kInputs) count += input.differentiable;
  return count;
}
inline constexpr size_t kGradients = count_gradients();

// Of the differentiable inputs, in their order.
using GradMask = std::array<bool, kGradients>;
using Gradients = std::array<Tensor, kGradients>;

// Which of kInputs the gradients belong to.
inline constexpr std::array<Input, kGradients> kDifferentiable = [] {
  std::array<Input, kGradients> result{};
  size_t next = 0;
  for (const Input& input : kInputs) {
    if (input.differentiable) result[next++] = input;
  }
  return result;
}();

// The place of an input's gradient.
constexpr size_t gradient_of(Tensor Inputs::*tensor) {
  size_t place = 0;
  while (kDifferentiable[place].tensor != tensor) ++place;
  return place;
}

inline constexpr size_t kDq = gradient_of(&Inputs::query), kDk = gradient_of(&Inputs::key),
                        kDv = gradient_of(&Inputs::value), kDbias = gradient_of(&Inputs::bias),
                        kDslopes = gradient_of(&Inputs::alibi_slopes);

// function(in.query, in.key, ..., in.sinks) of all that autograd knows: the differentiable inputs, and sinks.
template <class Function>
decltype(auto) with_differentiable(const Inputs& in, const Function& function) {
  return [&]<size_t... I>(std::index_sequence<I...>)->decltype(auto) {
    return function(in.*kDifferentiable[I].tensor..., in.sinks);
  }
  (std::make_index_sequence<kGradients>());
}

// Of the gradients that are asked for, those that there are.
inline GradMask existing(GradMask wanted, const Inputs& in) {
  for (size_t i = 0; i < kGradients; ++i) wanted[i] = wanted[i] && (in.*kDifferentiable[i].tensor).defined();
  return wanted;
}

inline OptionalTensor optional(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// ---- options --------------------------------------------------------------------------------------------------------

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
  std::optional<std::string_view> backend;  // none: use_backend, FLASH_EXT_BACKEND, else by cost
  c10::SymInt max_q = 0, max_k = 0;         // packed sequences: the longest ones, at most
  bool batch_invariant = false;             // bits of a sequence depend on nothing else in the batch
  // Of which part of a larger call's dropout map this call has the numbers: its first query, key and head there, and
  // how many heads that call has (0: as many as this one).
  c10::SymInt dropout_first_query = 0, dropout_first_key = 0, dropout_first_head = 0, dropout_heads = 0;
  // Backward takes lse for a constant, as where a row has keys beside these: P = e^(S - lse), whatever it sums up to,
  // and dS = P o (dP + dlse); out is not read.
  bool constant_lse = false;
  std::optional<at::ScalarType> out_dtype;  // none: query's; of e4m3 inputs bfloat16
};

// The dtype of out, in which the inputs are computed with; that of query but for e4m3.
inline at::ScalarType result_type(const Inputs& in, const Options& options) {
  const auto dtype = in.query.scalar_type();
  return dtype == at::kFloat8_e4m3fn ? options.out_dtype.value_or(at::kBFloat16) : dtype;
}

template <class T>
struct Option {
  using Type = T;
  const char* schema;  // type, name and default
  T Options::*field;

  constexpr std::string_view name() const {
    const std::string_view text(schema);
    const size_t first = text.find(' ') + 1;
    return text.substr(first, text.find('=') - first);
  }
};

// In the order of the schemas.
inline constexpr std::tuple kOptions{
    Option{"bool causal=False", &Options::causal},
    Option{"int? window_left=None", &Options::window_left},
    Option{"int? window_right=None", &Options::window_right},
    Option{"bool bottom_right=False", &Options::bottom_right},
    Option{"float softcap=0.", &Options::softcap},
    Option{"float dropout_p=0.", &Options::dropout_p},
    Option{"float? scale=None", &Options::scale},
    Option{"bool gqa=False", &Options::gqa},
    Option{"bool? deterministic=None", &Options::deterministic},
    Option{"str? backend=None", &Options::backend},
    Option{"SymInt max_q=0", &Options::max_q},
    Option{"SymInt max_k=0", &Options::max_k},
    Option{"bool batch_invariant=False", &Options::batch_invariant},
    Option{"SymInt dropout_first_query=0", &Options::dropout_first_query},
    Option{"SymInt dropout_first_key=0", &Options::dropout_first_key},
    Option{"SymInt dropout_first_head=0", &Options::dropout_first_head},
    Option{"SymInt dropout_heads=0", &Options::dropout_heads},
    Option{"bool constant_lse=False", &Options::constant_lse},
    Option{"ScalarType? out_dtype=None", &Options::out_dtype},
};
inline constexpr size_t kOptionCount = std::tuple_size_v<decltype(kOptions)>, kFirstOptions = 10;
// Those that make a call a part of a larger one, which attention and explain in Python have not.
inline constexpr size_t kFirstPartOption = 13, kLastPartOption = 17;

// function(option) for each, in order.
template <class Function>
void for_each_option(const Function& function) {
  std::apply([&](const auto&... option) { (function(option), ...); }, kOptions);
}

// ---- calls ----------------------------------------------------------------------------------------------------------

struct ForwardResult {
  Tensor out, lse, rng_state;
};

// Calls through the dispatcher; with a key set, from below the key (autograd, autocast) whose kernel is calling, which
// hands on what it gets: there a gradient that was not asked for is an empty tensor, else an undefined one.
ForwardResult call_attention(const Inputs& in, const Options& options, bool return_lse);
ForwardResult call_attention(c10::DispatchKeySet keys, const Inputs& in, const Options& options, bool return_lse);
ForwardResult call_attention_with_rng_state(const Inputs& in, const Tensor& rng_state, const Options& options,
                                            bool return_lse);
ForwardResult call_attention_with_rng_state(c10::DispatchKeySet keys, const Inputs& in, const Tensor& rng_state,
                                            const Options& options, bool return_lse);
// Gradient of <grad_out, out> + <grad_lse, lse> by the sinks, of what forward gave; in.packed() says how out lies.
Tensor call_sinks_gradient(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                           const ForwardResult& saved);
Gradients call_attention_backward(const Tensor& grad_out, const Tensor& grad_lse, const Inputs& in,
                                  const ForwardResult& saved, const Options& options, const GradMask& grad_mask);
Gradients call_attention_backward(c10::DispatchKeySet keys, const Tensor& grad_out, const Tensor& grad_lse,
                                  const Inputs& in, const ForwardResult& saved, const Options& options,
                                  const GradMask& grad_mask);
Tensor call_dropout_mask(const Tensor& rng_state, double dropout_p, c10::SymInt batch_heads, c10::SymInt rows,
                         c10::SymInt cols, c10::SymInt q0, c10::SymInt k0, c10::SymInt n0);

// {seed, offset} of the dropout map, by the operator draw_rng_state.
Tensor call_draw_rng_state(const Inputs& in);

// The drop-in, with its own checks: what ops.cpp and bindings.cpp expose.
Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa);

}  // namespace flash_ext
