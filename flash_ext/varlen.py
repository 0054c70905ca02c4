"""Sequences of any lengths, packed one behind the other without padding."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import ops, script
from flash_ext.arguments import Window, check_band, flag, number
from flash_ext.errors import AttentionError

_eager = ops.C.attention if ops.C else None
_operator = torch.ops.flash_ext.attention.default
_eager_pages = ops.C.gather_pages if ops.C else None
_pages = torch.ops.flash_ext.gather_pages.default


def _length(value: int, name: str) -> int:
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return value
    raise TypeError(f"{name} is of type {type(value).__name__}; it must be an int, a number of rows")


def _gather(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, cu_seqlens_k: Tensor | None, used: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value as packed rows, and cu_seqlens_k."""
    if used is None:
        raise AttentionError(
            "seqused_k is None; with block_table it must say how many rows of its pages a sequence has"
        )
    if cu_seqlens_k is not None:
        raise AttentionError("cu_seqlens_k is given beside block_table, which already says where keys lie")
    if _eager_pages is not None and not torch.compiler.is_compiling():
        result = _eager_pages(query, key, value, block_table, used)
        if result is not NotImplemented:
            return result
    return _pages(query, key, value, block_table, used)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_q: int,
    max_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`attention` within each of B sequences that are packed one behind the other.

    Sequence b has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of query, and those of ``cu_seqlens_k`` of key
    and value. Positions (of bands, masks, biases, slopes and dropout) count from 0 in each sequence, ``align`` is by
    its own lengths, and a length of 0 is fine on either side. What the lengths are is never read on the host of a GPU.

    Args:
        query: (rows_q, Hq, E), any strides; float16, bfloat16, float32, float64 or float8_e4m3fn, one dtype for all
            three.
        key: (rows_k, Hk, E); Hk divides Hq, query head h reads key head h // (Hq / Hk).
        value: (rows_k, Hv, Ev); Hv divides Hq and may differ from Hk.
        cu_seqlens_q: (B + 1,) int32 on query's device, not decreasing, from 0 to at most rows_q.
        cu_seqlens_k: the same of key and value; None: that of query.
        max_q, max_k: the length of the longest sequence, or more; max_k is max_q by default. Sequences end there.
        seqused_q, seqused_k: (B,) int32, how many rows of each sequence are in use, from its first; None: all.
        block_table: (B, pages of a sequence) int32: key is then (pages, rows of a page, Hk, E) and value (pages, rows
            of a page, Hv, Ev), sequence b has the first ``seqused_k[b]`` rows of its pages, cu_seqlens_k is None, and
            max_k is all rows of its pages by default. Forward only.
        causal, window, align, softcap, dropout_p, scale, deterministic, batch_invariant: as in :func:`attention`.
        sinks: (Hq,), as in :func:`attention`.
        mask, bias: as in :func:`attention`, broadcastable to (B, Hq, max_q, max_k); the bias has its gradient.
        alibi_slopes: (Hq,) or (B, Hq) float32, with gradient.
        return_lse: return (out, lse).
        q_descale, k_descale, v_descale, out_dtype: as in :func:`attention`; descales broadcast to (B, heads), or, with
            3 dimensions, to (1, heads, rows).

    Returns:
        out (rows_q, Hq, Ev) in query's dtype (or out_dtype) and stride order; with ``return_lse`` also lse (Hq,
        rows_q), natural logarithm, float32 (float64 for float64), differentiable. Rows that belong to no sequence, or
        are not in use, have out 0, lse -inf and gradients of 0; rows with nothing to attend to have the same, or their
        sink as lse.

    Raises:
        AttentionError: shapes, dtypes, devices or options that do not fit.
        TypeError: an argument of a wrong type.
    """
    left, right = check_band(window, align)
    bottom_right = align == "bottom_right"
    max_q = _length(max_q, "max_q")
    if block_table is not None:
        key, value, cu_seqlens_k = _gather(query, key, value, block_table, cu_seqlens_k, seqused_k)
        longest = key.shape[0] // max(block_table.shape[0], 1)
        max_k = longest if max_k is None else max_k
    max_k = max_q if max_k is None else _length(max_k, "max_k")
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(f"cu_seqlens_q is of type {type(cu_seqlens_q).__name__}; it must be a torch.Tensor")
    if _eager is not None and not torch.compiler.is_compiling() and type(max_q) is type(max_k) is int:
        result = _eager(
            query, key, value, mask, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks,
            q_descale, k_descale, v_descale, causal, left, right, bottom_right, softcap, dropout_p, scale, True,
            deterministic, None, max_q, max_k, batch_invariant, out_dtype, return_lse,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    softcap, dropout_p = number(softcap, "softcap"), number(dropout_p, "dropout_p")
    scale = None if scale is None else number(scale, "scale")
    flag(causal, "causal"), flag(return_lse, "return_lse"), flag(batch_invariant, "batch_invariant")
    deterministic = None if deterministic is None else flag(deterministic, "deterministic")
    out, lse, _ = _operator(
        query, key, value, mask, bias, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks,
        q_descale, k_descale, v_descale, causal=causal, window_left=left, window_right=right,
        bottom_right=bottom_right, softcap=softcap, dropout_p=dropout_p, scale=scale, gqa=True,
        deterministic=deterministic, return_lse=return_lse, max_q=max_q, max_k=max_k, batch_invariant=batch_invariant,
        out_dtype=out_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


attention_varlen.__prepare_scriptable__ = script.refuse
