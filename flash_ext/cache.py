"""Decoding: a few queries attend to a cache of keys and values, to which new ones are appended first."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import ops, script
from flash_ext.arguments import Window, check_band, flag, number

_eager = ops.C.attention_with_cache if ops.C else None
_operator = torch.ops.flash_ext.attention_with_cache.default


def attention_with_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    key: Tensor | None = None,
    value: Tensor | None = None,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_index: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends ``key`` and ``value`` to the caches, in place, and attends to what each sequence has then.

    The meaning is that of FlashAttention's ``flash_attn_with_kvcache``. Sequence b has ``cache_seqlens[b]`` rows, and n
    more where ``key`` is given; query i of its q queries stands at its row ``rows - q + i``. Forward only. What
    lengths, indices and pages hold is never read on the host of a GPU: a CUDA graph may be replayed with others.

    Args:
        query: (B, q, Hq, E), any strides; float16, bfloat16, float32 or float64.
        key_cache: (slots, S, Hk, E) in query's dtype or float8_e4m3fn; Hk divides Hq; any strides. With
            ``block_table`` (pages, rows of a page, Hk, E).
        value_cache: (slots, S, Hv, Ev), or (pages, rows of a page, Hv, Ev), in key_cache's dtype.
        key, value: (B, n, Hk, E) and (B, n, Hv, Ev) in query's dtype: new rows, for places ``cache_seqlens[b]`` to
            ``cache_seqlens[b] + n - 1``. A row that would lie beyond the cache is not written.
        cache_seqlens: (B,) int32, rows that each sequence has before the new ones; or one int for all.
        block_table: (B, pages of a sequence) int32, the pages of each sequence in their order.
        cache_batch_index: (B,) int32, the slot of each sequence; None: its own number. Not with ``block_table``.
        rotary_cos, rotary_sin: (positions, R / 2) float32 or query's dtype: the first R columns of new keys and of
            queries are turned (Su et al., arXiv:2104.09864) before all else, those of key i and of query i by the
            angles of position ``cache_seqlens[b] + i``; of every query by those of ``cache_seqlens[b]`` where there is
            neither ``causal`` nor a window. They need ``key``.
        rotary_interleaved: columns 2c and 2c + 1 are a pair; False: c and c + R / 2.
        k_descale, v_descale: (B, Hk) and (B, Hv) float32, factors of fp8 caches; new rows are divided by them, and end
            at 448, the largest number of float8_e4m3fn. None: 1.
        causal, window, softcap, scale: as in :func:`attention`, with ``align="bottom_right"``.
        sinks: (Hq,) float32 (float64 beside float64), as in :func:`attention`, without gradient.
        alibi_slopes: (Hq,) or (B, Hq) float32.
        batch_invariant: as in :func:`attention`.
        return_lse: return (out, lse).

    Returns:
        out (B, q, Hq, Ev), contiguous, in query's dtype; with ``return_lse`` also lse (B, Hq, q), natural logarithm,
        float32 (float64 for float64). A row with nothing to attend to has out 0 and lse -inf (or its sink): so has a
        sequence whose length is negative, or whose slot is not one of the cache.

    Raises:
        AttentionError: shapes, dtypes, devices or options that do not fit, or an input that wants a gradient: nothing
            has been written then. Also a backend asked for by name that refuses the call, or with ``batch_invariant``
            a batch whose capacities are more than 2^30 tiles of keys; new rows are written then.
        TypeError: an argument of a wrong type.
    """
    left, right = (None, None) if window is None else check_band(window, "bottom_right")
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool) and isinstance(query, Tensor):
        cache_seqlens = torch.full(query.shape[:1], cache_seqlens, dtype=torch.int32, device=query.device)
    if _eager is not None and not torch.compiler.is_compiling():
        result = _eager(
            query, key_cache, value_cache, cache_seqlens, key, value, block_table, cache_batch_index, rotary_cos,
            rotary_sin, k_descale, v_descale, alibi_slopes, sinks,
            rotary_interleaved, causal, left, right, softcap, scale, return_lse, batch_invariant,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    softcap = number(softcap, "softcap")
    scale = None if scale is None else number(scale, "scale")
    flag(rotary_interleaved, "rotary_interleaved"), flag(causal, "causal"), flag(return_lse, "return_lse")
    flag(batch_invariant, "batch_invariant")
    out, lse = _operator(
        query, key_cache, value_cache, cache_seqlens, key, value, block_table, cache_batch_index, rotary_cos,
        rotary_sin, k_descale, v_descale, alibi_slopes, sinks,
        rotary_interleaved=rotary_interleaved, causal=causal, window_left=left, window_right=right, softcap=softcap,
        scale=scale, return_lse=return_lse, batch_invariant=batch_invariant,
    )  # fmt: skip
    return (out, lse) if return_lse else out


attention_with_cache.__prepare_scriptable__ = script.refuse
