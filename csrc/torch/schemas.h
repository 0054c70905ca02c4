// Every operator's schema, in one place. tests/test_schemas.py compares them with a golden file: arguments are only
// ever appended, keyword-only, with defaults, so that programs exported by an older version keep loading.
//
// Shapes: query (..., Hq, L, E), key (..., Hk, S, E), value (..., Hv, S, Ev); out (..., Hq, L, Ev); lse (..., Hq, L).
#pragma once

#include <string>

namespace flash_ext::schemas {

// The options that every attention operator takes, in this order (options.h holds them as a structure).
inline const std::string kOptions =
    "bool causal=False, int? window_left=None, int? window_right=None, bool bottom_right=False, float softcap=0., "
    "float dropout_p=0., float? scale=None, bool gqa=False, bool? deterministic=None, str? backend=None";

// {seed, offset} of the dropout map of such a call, from the default generator of query's device. An operator of its
// own, so that what is computed again, by a partitioner or in a checkpoint, uses the state that was drawn once.
inline const std::string kDrawRngState =
    "draw_rng_state(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? bias=None, "
    "Tensor? alibi_slopes=None) -> Tensor";

// Draws rng_state ({seed, offset}; empty without dropout) from the default generator of query's device.
// lse is empty unless return_lse.
inline const std::string kAttention =
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? bias=None, "
    "Tensor? alibi_slopes=None, *, " +
    kOptions + ", bool return_lse=False) -> (Tensor out, Tensor lse, Tensor rng_state)";

// The same with a given random state; a pure function.
inline const std::string kAttentionWithRngState =
    "attention_with_rng_state(Tensor query, Tensor key, Tensor value, Tensor rng_state, Tensor? mask=None, "
    "Tensor? bias=None, Tensor? alibi_slopes=None, *, " +
    kOptions + ", bool return_lse=False) -> (Tensor out, Tensor lse)";

// Gradients of (query, key, value, bias, alibi_slopes); an empty tensor for each that grad_mask does not ask for.
inline const std::string kAttentionBackward =
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor lse, Tensor rng_state, Tensor? mask=None, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "*, " +
    kOptions + ", bool[5] grad_mask=[True, True, True, True, True]) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";

// True where dropout keeps: element (n, i, j) belongs to flat head n, query q0 + i and key k0 + j.
inline const std::string kDropoutMask =
    "dropout_mask(Tensor rng_state, float dropout_p, SymInt batch_heads, SymInt rows, SymInt cols, *, SymInt q0=0, "
    "SymInt k0=0) -> Tensor";

// The drop-in; decomposes into `attention`.
inline const std::string kScaledDotProductAttention =
    "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor";

// JSON: what would run and why; launches nothing. `device` plans for a card that is not there ("" = the tensors').
inline const std::string kExplain =
    "explain(Tensor query, Tensor key, Tensor value, Tensor? mask=None, Tensor? bias=None, Tensor? alibi_slopes=None, "
    "*, " +
    kOptions + ", str device=\"\", bool[5] grad_mask=[True, True, True, True, True]) -> str";

// JSON: how this library was built.
inline const std::string kBuildInfo = "build_info() -> str";

}  // namespace flash_ext::schemas
