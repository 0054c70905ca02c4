// Every operator's schema, from the lists of options.h. tests/api/test_schemas.py compares them with a golden file:
// arguments are only ever appended, tensors behind the positional ones and others keyword-only, with defaults, so that
// programs exported by an older version keep loading.
//
// Shapes: query (..., Hq, L, E), key (..., Hk, S, E), value (..., Hv, S, Ev); out (..., Hq, L, Ev); lse (..., Hq, L).
// With cu_seqlens_q: query (rows_q, Hq, E), key (rows_k, Hk, E), value (rows_k, Hv, Ev); out (rows_q, Hq, Ev); lse
// (Hq, rows_q).
#pragma once

#include <span>
#include <string>

#include "torch/signatures.h"

namespace flash_ext::schemas {

// bool[N] grad_mask=[True, ...], of the differentiable inputs.
inline const std::string kGradMask = [] {
  std::string all;
  for (size_t i = 0; i < kGradients; ++i) all += i == 0 ? "True" : ", True";
  return "bool[" + std::to_string(kGradients) + "] grad_mask=[" + all + "]";
}();

// {seed, offset} of the dropout map of such a call, from the default generator of query's device. An operator of its
// own, so that what is computed again, by a partitioner or in a checkpoint, uses the state that was drawn once.
inline const std::string kDrawRngState = [] {
  std::string inputs;
  for (const Input& input : std::span(kInputs).first(kFirstInputs)) {
    inputs += (inputs.empty() ? "" : ", ") +
              (input.required ? "Tensor " + std::string(input.name) : "Tensor? " + std::string(input.name) + "=None");
  }
  return "draw_rng_state(" + inputs + ") -> Tensor";
}();

// Draws rng_state ({seed, offset}; empty without dropout) from the default generator of query's device.
// lse is empty unless return_lse.
inline const std::string kAttention = "attention(" + AttentionSignature::schema("", "", "bool return_lse=False") +
                                      ") -> (Tensor out, Tensor lse, Tensor rng_state)";

// The same with a given random state; a pure function.
inline const std::string kAttentionWithRngState =
    "attention_with_rng_state(" +
    AttentionWithRngStateSignature::schema("", "Tensor rng_state, ", "bool return_lse=False") +
    ") -> (Tensor out, Tensor lse)";

// Gradients of the differentiable inputs; an empty tensor for each that grad_mask does not ask for.
inline const std::string kAttentionBackward = [] {
  std::string results;
  for (size_t i = 0; i < kGradients; ++i) results += i == 0 ? "Tensor" : ", Tensor";
  return "attention_backward(" +
         AttentionBackwardSignature::schema("Tensor? grad_out, Tensor? grad_lse, ",
                                            "Tensor out, Tensor lse, Tensor rng_state, ", kGradMask) +
         ") -> (" + results + ")";
}();

// Of the sinks, in their shape and dtype, of what forward gave: -sum over rows of e^(sink - lse) (rowsum(grad_out o
// out) - grad_lse). packed: out is (rows_q, Hq, Ev).
inline const std::string kSinksGradient =
    "sinks_gradient(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor sinks, *, bool packed=False) -> "
    "Tensor";

// True where dropout keeps: element (n, i, j) belongs to flat head n0 + n, query q0 + i and key k0 + j.
inline const std::string kDropoutMask =
    "dropout_mask(Tensor rng_state, float dropout_p, SymInt batch_heads, SymInt rows, SymInt cols, *, SymInt q0=0, "
    "SymInt k0=0, SymInt n0=0) -> Tensor";

// The drop-in; decomposes into `attention`.
inline const std::string kScaledDotProductAttention =
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor";

// Appends key and value to the caches, in place, and attends to them, see cache.h. The caches are (slots, S, heads,
// cols) or, with block_table, (pages, page rows, heads, cols); query (B, L, Hq, E); out (B, L, Hq, Ev); lse (B, Hq, L).
inline const std::string kAttentionWithCache =
    "attention_with_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor cache_seqlens, "
    "Tensor? key=None, Tensor? value=None, Tensor? block_table=None, Tensor? cache_batch_index=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, *, bool rotary_interleaved=False, bool causal=True, "
    "int? window_left=None, int? window_right=None, float softcap=0., float? scale=None, str? backend=None, "
    "bool return_lse=False, bool batch_invariant=False) -> (Tensor out, Tensor lse)";

// Paged keys and values as packed rows, a copy: (B * pages of a sequence * page rows, heads, cols), and where sequences
// start in them. query only says on which device, and that nobody wants its gradient.
inline const std::string kGatherPages =
    "gather_pages(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor seqused_k) -> (Tensor key_rows, "
    "Tensor value_rows, Tensor cu_seqlens_k)";

// x / descale in e4m3, at most 448 either way; descale is float32 and broadcasts to x. See quantize.h.
inline const std::string kQuantizeFp8 = "quantize_fp8(Tensor x, Tensor descale) -> Tensor";

// The largest finite magnitudes of x over these dimensions, which stay with size 1, over 448: float32, without a
// gradient; 1 where all is 0.
inline const std::string kDescaleFp8 = "descale_fp8(Tensor x, int[] dim) -> Tensor";

// JSON: what would run and why; launches nothing. `device` plans for a card that is not there ("" = the tensors').
inline const std::string kExplain =
    "explain(" + ExplainSignature::schema("", "", "str device=\"\", " + kGradMask) + ") -> str";

// JSON: how this library was built.
inline const std::string kBuildInfo = "build_info() -> str";

}  // namespace flash_ext::schemas
