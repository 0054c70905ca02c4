"""Attention as the textbook writes it: the meaning that every kernel of this package is tested against.

    s   = scale * q k^T                      scale defaults to 1 / sqrt(E)
    s   = softcap * tanh(s / softcap)        where softcap > 0 (Gemma 2, arXiv:2408.00118, section 2)
    s   = s + bias - slope * |i + offset - j|         (ALiBi, arXiv:2108.12409, section 3)
    s   = -inf where the mask or the band removes key j from query i
    p   = softmax(s);  lse = log(sum(exp(s)))         natural logarithm
    out = (p * keep / (1 - dropout_p)) v

It materialises the (L, S) score matrix, is differentiable to any order in reverse and forward mode, takes fp16, bf16,
fp32 and fp64 on any device, and is what to read first. Two modes:

* exact (default): computes in the dtype of the inputs (half types in float32, rounded once at the end, as PyTorch's
  math path does). With float64 inputs it serves as the truth.
* ``rounded=True``: "eager attention in the same dtype": each intermediate, forward and backward, is rounded to the
  dtype of query. The error of this mode is the yardstick of the error rule: a kernel may err at most twice as much.

A row with nothing to attend has output 0, lse -inf and gradients 0. NaN and +inf in a bias reach the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["attention", "band_mask", "merge_attention", "scaled_dot_product_attention"]

Window = tuple[int | None, int | None]


def band_mask(
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    device: torch.device | str | None = None,
) -> Tensor:
    """Bool (queries, keys), True where query i may see key j.

    With offset = 0 (``align="top_left"``) or keys - queries (``"bottom_right"``): causal keeps j <= i + offset, and
    window = (left, right) keeps i + offset - left <= j <= i + offset + right; None is unbounded on that side.
    """
    distance = _distance(queries, keys, align, device)
    keep = torch.ones_like(distance, dtype=torch.bool)
    left, right = window if window is not None else (None, None)
    if causal:
        keep &= distance >= 0
    if left is not None:
        keep &= distance <= left
    if right is not None:
        keep &= distance >= -right
    return keep


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    rounded: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Same meaning as :func:`flash_ext.attention`; dropout takes its random bits from ``keep``.

    Args:
        query: (..., Hq, L, E); leading dims of query, key and value broadcast; 2 dims (no heads) or more.
        key: (..., Hk, S, E), Hk dividing Hq; query head h reads key head h // (Hq / Hk).
        value: (..., Hv, S, Ev), Hv dividing Hq; Hv may differ from Hk.
        mask: bool, broadcastable to (..., Hq, L, S); True = attend.
        bias: floating, broadcastable to (..., Hq, L, S), added to the scores.
        sinks: (Hq,) or (..., Hq), a logit in each row of a head whose value is 0.
        alibi_slopes: (Hq,) or (..., Hq).
        keep: bool, broadcastable to (..., Hq, L, S), True = kept; needed where 0 < dropout_p < 1.
        rounded: round each intermediate to query's dtype (see the module's docstring).

    Returns:
        out (..., Hq, L, Ev) in query's dtype and, with ``return_lse``, lse (..., Hq, L) in float32 (float64 for
        float64 inputs).
    """
    dtype = query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    r: Callable[[Tensor], Tensor] = (lambda x: x.to(dtype).to(wide)) if rounded else (lambda x: x)
    if query.dim() > 2 and key.dim() > 2 and value.dim() > 2:
        heads = max(query.size(-3), key.size(-3), value.size(-3))
        key, value = _repeat_heads(key, heads), _repeat_heads(value, heads)
    queries, keys = query.size(-2), key.size(-2)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)

    scale = 1.0 / math.sqrt(max(query.size(-1), 1)) if scale is None else scale
    s = r(r(q @ k.transpose(-2, -1)) * scale)
    if softcap > 0:
        s = r(softcap * r(torch.tanh(r(s / softcap))))
    if bias is not None:
        s = r(s + bias.to(wide))
    if alibi_slopes is not None:
        distance = _distance(queries, keys, align, query.device)
        s = r(s - alibi_slopes.to(wide)[..., None, None] * distance.abs())
    visible = band_mask(queries, keys, causal=causal, window=window, align=align, device=query.device)
    if mask is not None:
        visible = visible & mask
    s = s.masked_fill(~visible, -math.inf)

    if sinks is not None:  # one more key, of value 0, that every row sees
        s = torch.cat((s, sinks.to(wide)[..., None, None].expand(*s.shape[:-1], 1)), -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        keep = (
            None if keep is None else torch.nn.functional.pad(keep.expand(*keep.shape[:-1], keys), (0, 1), value=True)
        )
        keys += 1
    # An empty row becomes a row of zeros before softmax and is blanked after it: its gradient is 0, not NaN.
    empty = (s == -math.inf).all(-1, keepdim=True) if keys else s.new_ones(*s.shape[:-1], 1, dtype=torch.bool)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s.to(dtype) if rounded else s, -1).to(wide).masked_fill(empty, 0.0)
    if dropout_p > 0:
        p = p * 0.0 if dropout_p >= 1 else r(p * _required(keep) * (1.0 / (1.0 - dropout_p)))
    out = (p @ v).to(dtype)
    if not return_lse:
        return out
    lse = _logsumexp(s) if keys else s.sum(-1)
    return out, lse.masked_fill(empty.squeeze(-1), -math.inf)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    keep: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """Same meaning as :func:`flash_ext.scaled_dot_product_attention`; see :func:`attention` for keep and rounded."""
    del enable_gqa  # the head counts say it
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    out = attention(
        query,
        key,
        value,
        causal=is_causal,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool else attn_mask,
        dropout_p=dropout_p,
        keep=keep,
        scale=scale,
        rounded=rounded,
    )
    assert isinstance(out, Tensor)
    return out


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys (FlashAttention, arXiv:2205.14135, section 3.1).

    out_* (..., L, Ev), lse_* (..., L). lse = log(exp(lse_a) + exp(lse_b)); out is the average of the two weighted by
    exp(lse_* - lse). Where both are -inf the result is 0 and -inf with gradients 0.
    """
    wide = torch.float64 if lse_a.dtype == torch.float64 else torch.float32
    a, b = lse_a.to(wide), lse_b.to(wide)
    empty = (a == -math.inf) & (b == -math.inf)
    a, b = a.masked_fill(empty, 0.0), b.masked_fill(empty, 0.0)
    weights = torch.softmax(torch.stack((a, b)), 0).masked_fill(empty, 0.0).unsqueeze(-1)
    out = (out_a.to(wide) * weights[0] + out_b.to(wide) * weights[1]).to(out_a.dtype)
    return out, torch.logsumexp(torch.stack((a, b)), 0).masked_fill(empty, -math.inf)


def _distance(queries: int, keys: int, align: str, device: torch.device | str | None) -> Tensor:
    """i + offset - j, (queries, keys) int64: how far key j lies before the diagonal of query i."""
    offset = {"top_left": 0, "bottom_right": keys - queries}[align]
    return torch.arange(queries, device=device)[:, None] + offset - torch.arange(keys, device=device)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(..., H, S, E) -> (..., heads, S, E), each head H / heads times in a row."""
    return x if x.size(-3) in (0, heads) else x.repeat_interleave(heads // x.size(-3), -3)


def _logsumexp(s: Tensor) -> Tensor:
    """As torch.logsumexp, whose gradient e^(s - lse) is not the softmax where lse has lost log of the number of keys:
    in float64 from |s| = 1e16 on, so in a row of finfo.min. NaN where a score is +inf, as the softmax is."""
    highest = s.detach().amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    return torch.log(torch.exp(s - highest).sum(-1)) + highest.squeeze(-1)


def _required(keep: Tensor | None) -> Tensor:
    if keep is None:
        raise ValueError("dropout_p between 0 and 1 needs keep, the mask of kept probabilities")
    return keep
