"""FlashAttention 3's public Python interface, computed by flash_ext.

    import sys, flash_ext
    sys.modules["flash_attn_interface"] = flash_ext.flash_attn_3

makes programs that import ``flash_attn_interface`` run here (Shah et al., arXiv:2407.08608;
https://github.com/Dao-AILab/flash-attention, hopper/). Names, order and defaults of arguments and layouts are its own.

What all functions have in common is in ``flash_ext.flash_attn.flash_attn_interface``. Besides:

- ``return_attn_probs`` returns (out, softmax_lse).
- ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are hints to kernels of theirs, and not used.
- q, k and v of float8_e4m3fn are times their descales, (B, Hk) float32; out is bfloat16. Their gradients
  are those of ``flash_ext.attention``.
- ``qv``, ``attention_chunk`` and, in ``flash_attn_with_kvcache``, ``q_descale`` are refused: no kernel here has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.attention import attention
from flash_ext.cache import attention_with_cache
from flash_ext.errors import AttentionError
from flash_ext.flash_attn.flash_attn_interface import flash_attn_func as _dense
from flash_ext.flash_attn.layers.rotary import apply_rotary_emb, sequence_of_rows
from flash_ext.flash_attn.shared import length, options, slots_as_sequences, split, turned_queries
from flash_ext.varlen import attention_varlen

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise AttentionError(f"{name} is given, which flash_ext does not have; it must be left at its default")


def _descales(
    q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None, v_descale: Tensor | None
) -> dict[str, Tensor | None]:
    """As ``attention`` takes them: here those of q are of key heads, too."""
    if q_descale is not None and q_descale.dim() > 0 and q_descale.shape[-1] == k.shape[-2] > 0:
        q_descale = q_descale.repeat_interleave(q.shape[-2] // k.shape[-2], -1)
    return {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, L, H, E) to k (B, S, Hk, E) and v (B, S, Hk, Ev), Hk a divisor of H; out (B, L, H, Ev)."""
    _refuse(qv=qv, attention_chunk=attention_chunk)
    if any(descale is not None for descale in (q_descale, k_descale, v_descale)):
        result = attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), align="bottom_right",
            deterministic=deterministic or None, return_lse=bool(return_attn_probs),
            **options(causal, window_size, softcap, softmax_scale), **_descales(q, k, q_descale, k_descale, v_descale),
        )  # fmt: skip
        return (result[0].transpose(1, 2), result[1]) if return_attn_probs else result.transpose(1, 2)
    given = _dense(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip
    return given[:2] if return_attn_probs else given


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``flash_attn_func`` with qkv (B, L, 3, H, E), or (B, L, H + 2 Hk, E) where ``num_heads_q`` says H."""
    if qkv.dim() == 4:
        others = qkv.shape[2] - (num_heads_q or 0)
        if num_heads_q is None or others <= 0 or others % 2:
            raise AttentionError(
                f"num_heads_q is {num_heads_q}; for qkv of shape {tuple(qkv.shape)} it must be the number of query "
                "heads, which leaves as many key as value heads"
            )
        parts = qkv.split([num_heads_q, others // 2, others // 2], 2)
    else:
        parts = split(qkv, "qkv", 5, 3)
    return flash_attn_func(
        *parts, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of B sequences that are packed one behind the other.

    Args:
        q: (rows_q, H, E).
        k, v: (rows_k, Hk, E) and (rows_k, Hk, Ev).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, where sequences begin and end.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence, or more.
        seqused_q, seqused_k: (B,) int32, rows of each sequence that are in use, from its first; None: all.

    Returns:
        out (rows_q, H, Ev); softmax_lse (H, rows_q). Rows that are not in use have 0 and -inf.
    """
    _refuse(qv=qv, attention_chunk=attention_chunk)
    return attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_q=length(max_seqlen_q), max_k=length(max_seqlen_k),
        seqused_q=seqused_q, seqused_k=seqused_k, align="bottom_right", deterministic=deterministic or None,
        return_lse=bool(return_attn_probs), **options(causal, window_size, softcap, softmax_scale),
        **_descales(q, k, q_descale, k_descale, v_descale),
    )  # fmt: skip


def _append(
    cache: Tensor, new: Tensor, cu_new: Tensor, lengths: Tensor, table: Tensor | None, slots: Tensor | None
) -> None:
    """Writes packed rows behind those that each sequence has; a place beyond the cache is its last one."""
    sequence = sequence_of_rows(new.shape[0], cu_new)
    at = lengths[sequence] + torch.arange(new.shape[0], device=new.device) - cu_new[sequence]
    if table is None:
        slot, at = sequence if slots is None else slots[sequence], at.clamp(0, cache.shape[1] - 1)
    else:
        at = at.clamp(0, table.shape[1] * cache.shape[1] - 1)
        slot, at = table[sequence, at // cache.shape[1]], at % cache.shape[1]
    cache.index_put_((slot.long(), at), new)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None, None]:
    """``flash_ext.flash_attn.flash_attn_with_kvcache``, also for queries of other lengths and fp8 caches. Forward only.

    Args:
        q: (B, queries, H, E), or with ``cu_seqlens_q`` (rows, H, E): sequence b has rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1], and ``max_seqlen_q`` is the length of the longest, or more.
        k_cache, v_cache: (slots, S, Hk, E) and (slots, S, Hk, Ev), or with ``page_table`` (pages, rows of a page, Hk,
            E) and (pages, rows of a page, Hk, Ev); q's dtype, or float8_e4m3fn.
        k, v: (B, n, Hk, E) and (B, n, Hk, Ev), or with ``cu_seqlens_k_new`` (rows, Hk, E) and (rows, Hk, Ev): new rows,
            for which there must be room.
        page_table: (B, pages of a sequence) int32, or a line for each slot and ``cache_batch_idx`` says which.
        rotary_seqlens: (B,) int32, the position of the first new row and of the first query; None: cache_seqlens.
        k_descale, v_descale: (B, Hk) float32, factors of fp8 caches.
        cache_seqlens, cache_batch_idx, cache_leftpad, rotary_cos, rotary_sin: as there, ``cache_leftpad`` also with
            pages. With fp8 caches there is no ``cache_leftpad``, ``cu_seqlens_q`` or ``cu_seqlens_k_new``.

    Returns:
        out, in q's layout; with ``return_softmax_lse`` also softmax_lse (B, H, queries) or (H, rows), and None twice,
        where theirs has the parts of keys that are split.
    """
    _refuse(qv=qv, q_descale=q_descale, attention_chunk=attention_chunk)
    is_packed = cu_seqlens_q is not None
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cache_seqlens is None:
        if k is not None:
            raise AttentionError("cache_seqlens is None; with k it must say where new rows go")
        cache_seqlens = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    common = options(causal, window_size, softcap, softmax_scale)
    with torch.no_grad():
        is_plain = not is_packed and cache_leftpad is None and cu_seqlens_k_new is None
        if rotary_cos is not None and (not is_plain or rotary_seqlens is not None):
            if k is None or rotary_sin is None:
                raise AttentionError("rotary_cos is given without k, v or rotary_sin; it turns new keys, and queries")
            offsets = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            angles = (rotary_cos, rotary_sin, rotary_interleaved)
            moves = common["causal"] or common["window"] is not None
            q = turned_queries(q, *angles, offsets, moves, cu_seqlens_q)
            k = apply_rotary_emb(k, *angles, seqlen_offsets=offsets, cu_seqlens=cu_seqlens_k_new)
            rotary_cos = rotary_sin = None
        cache = {
            "key_cache": k_cache, "value_cache": v_cache, "key": k, "value": v, "cache_seqlens": cache_seqlens,
            "block_table": page_table, "cache_batch_index": cache_batch_idx, "k_descale": k_descale,
            "v_descale": v_descale, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_interleaved, **common,
        }  # fmt: skip
        if is_plain:
            out, lse = attention_with_cache(q, **cache, return_lse=True)
            return (out, lse, None, None) if return_softmax_lse else out
        if k_cache.dtype != q.dtype:
            raise AttentionError(
                f"k_cache is {k_cache.dtype}; with cu_seqlens_q, cu_seqlens_k_new or cache_leftpad it must be of q's "
                f"{q.dtype}"
            )
        if is_packed and max_seqlen_q is None:
            raise AttentionError(
                "max_seqlen_q is None; with cu_seqlens_q it must be the length of the longest sequence"
            )
        if cu_seqlens_k_new is None:  # without queries it only appends
            attention_with_cache(q.new_empty(batch, 0, *q.shape[-2:]), **cache)
            total = cache_seqlens if k is None else cache_seqlens + k.shape[1]
        else:
            for place, rows in ((k_cache, k), (v_cache, v)):
                _append(place, rows, cu_seqlens_k_new, cache_seqlens, page_table, cache_batch_idx)
            total = cache_seqlens + cu_seqlens_k_new.diff()
        queries = max_seqlen_q if is_packed else q.shape[1]
        if cu_seqlens_q is None:
            cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        if page_table is not None and cache_leftpad is not None:  # pages become slots
            pages = page_table.long().clamp(0, k_cache.shape[0] - 1)
            k_cache, v_cache, page_table = k_cache[pages].flatten(1, 2), v_cache[pages].flatten(1, 2), None
        keys = {"key": k_cache, "value": v_cache, "block_table": page_table, "seqused_k": total}
        if page_table is None:
            keys = slots_as_sequences(k_cache, v_cache, batch, total, cache_leftpad, cache_batch_idx)
        out, lse = attention_varlen(
            q if is_packed else q.flatten(0, 1), cu_seqlens_q=cu_seqlens_q, max_q=length(queries), align="bottom_right",
            return_lse=True, **keys, **common,
        )  # fmt: skip
    if not is_packed:
        out, lse = out.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1)
    return (out, lse, None, None) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Joins results over disjoint keys.

    Args:
        out_partial: (parts, B, L, H, Ev) or (parts, rows, H, Ev).
        lse_partial: (parts, B, L, H) or (parts, rows, H), float32.
        out: where the result is written. out_dtype: its dtype; None: that of ``out_partial``.

    Returns:
        out (B, L, H, Ev) or (rows, H, Ev), and lse (B, L, H) or (rows, H). Where every lse is -inf: 0 and -inf.
    """
    lse = lse_partial.logsumexp(0)
    saw_nothing = lse_partial == -torch.inf  # such a part counts for nothing, also where it is the only one
    weights = (lse_partial - lse).exp().masked_fill(saw_nothing, 0.0).unsqueeze(-1)
    whole = torch.zeros_like(out_partial[0], dtype=lse.dtype)
    for part, weight, nothing in zip(out_partial, weights, saw_nothing.unsqueeze(-1), strict=True):
        whole += weight * part.to(lse.dtype).masked_fill(nothing, 0.0)
    whole = whole.to(out_partial.dtype if out_dtype is None else out_dtype)
    return (whole if out is None else out.copy_(whole)), lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """None, which ``flash_attn_with_kvcache`` takes: work is dealt in each call, on the device (Returns nothing)."""
