"""The drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import ops

_eager = ops.C.scaled_dot_product_attention if ops.C else None
_operator = torch.ops.flash_ext.scaled_dot_product_attention.default


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
) -> Tensor:
    """Exact attention, ``softmax(query @ key.mT * scale + attn_mask) @ value``, without the score matrix.

    Same meaning as ``torch.nn.functional.scaled_dot_product_attention``; where PyTorch's backends disagree, its math
    path is right. Tiled forward and recomputing backward as in FlashAttention (Dao et al., arXiv:2205.14135).

    Args:
        query: (..., Hq, L, E); 2 dimensions or more; float16, bfloat16, float32 or float64, one dtype for all three.
        key: (..., H, S, E). Leading dimensions of query, key and value broadcast together, without a copy.
        value: (..., H, S, Ev).
        attn_mask: bool (True = attend), or float32 or query's dtype (added to the scaled scores, with gradient);
            broadcastable to (..., Hq, L, S).
        dropout_p: probability from 0 to 1 with which an attention weight is dropped; applied whenever it is positive.
        is_causal: query i sees keys j <= i (top-left, also when L != S); not together with attn_mask.
        scale: factor of the scores; ``1 / sqrt(E)`` by default; any finite number.
        enable_gqa: the head counts of key and value each divide Hq; query head h reads key head h // (Hq / H).

    Returns:
        (..., Hq, L, Ev) in query's dtype and stride order. A row with nothing to attend to is 0, with gradients of 0.

    Raises:
        AttentionError: shapes, dtypes, devices or options that do not fit.
        TypeError: an argument of a wrong type.
    """
    if _eager is not None and not torch.compiler.is_compiling():
        out = _eager(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if out is not NotImplemented:
            return out
    return _operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
