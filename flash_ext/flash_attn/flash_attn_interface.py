"""``flash_attn.flash_attn_interface``: each function says in flash_ext's names what it was asked in FlashAttention's.

What all functions have in common:

- Tensors are (B, L, heads, E), packed ones (rows, heads, E): heads behind rows, where ``flash_ext.attention`` has them
  in front. Strides are free; float16, bfloat16, and here also float32 and float64.
- ``dropout_p``: probability from 0 to 1. ``softmax_scale``: factor of the scores, None for 1 / sqrt(E).
- ``causal`` ends with the last query at the last key: query i stands at key i + keys - queries.
- ``window_size`` (left, right): how many keys are seen before and behind that one; a negative side is open.
- ``softcap``: c in c * tanh(score / c); 0 or less is off.
- ``alibi_slopes``: (H,) or (B, H) float32; adds -slope * |i + keys - queries - j|. No gradient, as there.
- ``deterministic``: gradients of the same bits in every run; False leaves it to torch's own switch.
- ``return_attn_probs``: returns (out, softmax_lse, None). softmax_lse is the natural logarithm of the sum of
  exponentials of each row's scores, float32 (float64 for float64), (B, H, queries) or packed (H, rows); differentiable.
  The third result, there a matrix of probabilities for tests, does not exist here, because no kernel has the matrix.

A query without keys has out 0 and softmax_lse -inf (there +inf). Errors are ``flash_ext.AttentionError``, one sentence,
and name arguments as ``flash_ext.attention`` does: query, key, value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.attention import attention
from flash_ext.cache import attention_with_cache
from flash_ext.errors import AttentionError
from flash_ext.flash_attn.shared import length, options, slots_as_sequences, split, turned_queries
from flash_ext.varlen import attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (B, L, H, E) to k (B, S, Hk, E) and v (B, S, Hk, Ev), Hk a divisor of H; out (B, L, H, Ev)."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise AttentionError(f"{name} has shape {tuple(tensor.shape)}; it must be (B, length, heads, head dim)")
    given = attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), align="bottom_right", dropout_p=dropout_p,
        deterministic=deterministic or None, return_lse=bool(return_attn_probs),
        **options(causal, window_size, softcap, softmax_scale, alibi_slopes),
    )  # fmt: skip
    if return_attn_probs:
        out, lse = given
        return out.transpose(1, 2), lse, None
    return given.transpose(1, 2)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with key and value in one tensor, kv (B, S, 2, Hk, E)."""
    return flash_attn_func(
        q, *split(kv, "kv", 5, 2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_func`` with query, key and value in one tensor, qkv (B, L, 3, H, E)."""
    return flash_attn_func(
        *split(qkv, "qkv", 5, 3), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention within each of B sequences that are packed one behind the other.

    Args:
        q: (rows_q, H, E).
        k, v: (rows_k, Hk, E) and (rows_k, Hk, Ev), or with ``block_table`` (pages, rows of a page, Hk, E) and (pages,
            rows of a page, Hk, Ev), of any number of rows.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, where sequences begin and end; with ``block_table`` the differences
            of the second are the keys of each sequence. A length of 0 is fine.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence, or more.
        block_table: (B, pages of a sequence) int32. Out has no gradient then.

    The other arguments and results are in the text of this module; out is (rows_q, H, Ev).
    """
    pages: dict[str, Any] = {"cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        pages = {"block_table": block_table, "seqused_k": cu_seqlens_k.diff()}
    with torch.set_grad_enabled(torch.is_grad_enabled() and block_table is None):
        given = attention_varlen(
            q, k, v, cu_seqlens_q, **pages, max_q=length(max_seqlen_q), max_k=length(max_seqlen_k),
            align="bottom_right", dropout_p=dropout_p, deterministic=deterministic or None,
            return_lse=bool(return_attn_probs), **options(causal, window_size, softcap, softmax_scale, alibi_slopes),
        )  # fmt: skip
    return (*given, None) if return_attn_probs else given


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with key and value in one tensor, kv (rows_k, 2, Hk, E)."""
    return flash_attn_varlen_func(
        q, *split(kv, "kv", 4, 2), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """``flash_attn_varlen_func`` with query, key and value in one tensor, qkv (rows, 3, H, E)."""
    return flash_attn_varlen_func(
        *split(qkv, "qkv", 4, 3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to the caches, in place, and attends to what each sequence has then. Forward only.

    Args:
        q: (B, queries, H, E).
        k_cache, v_cache: (slots, S, Hk, E) and (slots, S, Hk, Ev), or with ``block_table`` (pages, rows of a page, Hk,
            E) and (pages, rows of a page, Hk, Ev), of any number of rows.
        k, v: (B, n, Hk, E) and (B, n, Hk, Ev), new rows for places ``cache_seqlens[b]`` and on. A row that would lie
            beyond the cache is not written.
        rotary_cos, rotary_sin: (positions, R / 2): k and q are turned as ``flash_ext.attention_with_cache`` says.
        cache_seqlens: (B,) int32, rows before the new ones, or one int for all; None, without k: the whole cache.
        cache_batch_idx: (B,) int32, the slot of each sequence.
        cache_leftpad: (B,) int32, the first row of each sequence in its slot. Not with ``block_table``, as there. With
            ``cache_batch_idx`` too, slots are copied.
        block_table: (B, pages of a sequence) int32.
        num_splits: not used: keys are dealt to blocks by their lengths, on the device.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out (B, queries, H, Ev); softmax_lse (B, H, queries).
    """
    if cache_seqlens is None:
        if k is not None:
            raise AttentionError("cache_seqlens is None; with k it must say where new rows go")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_leftpad is not None and block_table is not None:
        raise AttentionError("cache_leftpad is given beside block_table; sequences in pages begin with their first row")
    common = options(causal, window_size, softcap, softmax_scale, alibi_slopes)
    rotary = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
    new = {"key": k, "value": v, "cache_batch_index": cache_batch_idx, "block_table": block_table, **rotary}
    with torch.no_grad():
        if cache_leftpad is None:
            return attention_with_cache(
                q, k_cache, v_cache, cache_seqlens=cache_seqlens, **new, **common, return_lse=bool(return_softmax_lse)
            )
        rows = cache_seqlens
        if not isinstance(rows, Tensor):
            rows = torch.full(q.shape[:1], rows, dtype=torch.int32, device=q.device)
        # Without queries it only appends, and checks rotary.
        attention_with_cache(q[:, :0], k_cache, v_cache, cache_seqlens=rows, **new, **common)
        if rotary_cos is not None:
            moves = common["causal"] or common["window"] is not None
            q = turned_queries(q, rotary_cos, rotary_sin, rotary_interleaved, rows, moves)
        batch, queries = q.shape[:2]
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        total = rows if k is None else rows + k.shape[1]
        keys = slots_as_sequences(k_cache, v_cache, batch, total, cache_leftpad, cache_batch_idx)
        out, lse = attention_varlen(
            q.flatten(0, 1), cu_seqlens_q=cu_seqlens_q, max_q=queries, align="bottom_right", return_lse=True, **keys,
            **common,
        )  # fmt: skip
    out, lse = out.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out
