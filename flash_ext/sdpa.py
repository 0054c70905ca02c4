"""The drop-in for ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from flash_ext import nested, ops, script
from flash_ext.arguments import flag, number
from flash_ext.errors import AttentionError

_eager = ops.C.scaled_dot_product_attention if ops.C else None
_operator = torch.ops.flash_ext.scaled_dot_product_attention.default
_native = torch.ops.flash_ext.attention.default


def _causal_bias_class() -> Any:
    """``torch.nn.attention.bias.CausalBias``, a tensor without elements that stands for a causal mask.

    NOTE: its module takes seconds to import; nobody has an instance who has not imported it.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return () if module is None else module.CausalBias


def _with_causal_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """What CausalBias means: its own lengths place the diagonal, and only where they differ has it a place."""
    if bias.seq_len_q == bias.seq_len_kv or bias.variant.name == "UPPER_LEFT":
        return scaled_dot_product_attention(
            query, key, value, None, dropout_p, True, scale=scale, enable_gqa=enable_gqa
        )
    lengths = (query.size(-2), key.size(-2))
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        raise AttentionError(
            f"attn_mask is a CausalBias of ({bias.seq_len_q}, {bias.seq_len_kv}); it must be of {lengths}, "
            "the lengths of query and key"
        )
    return _native(query, key, value, causal=True, bottom_right=True, dropout_p=dropout_p, scale=scale, gqa=enable_gqa)[
        0
    ]


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
            broadcastable to (..., Hq, L, S). Or a ``torch.nn.attention.bias.CausalBias``.
        dropout_p: probability from 0 to 1 with which an attention weight is dropped; applied whenever it is positive.
        is_causal: query i sees keys j <= i (top-left, also when L != S); not together with attn_mask.
        scale: factor of the scores; ``1 / sqrt(E)`` by default; any finite number.
        enable_gqa: the head counts of key and value each divide Hq; query head h reads key head h // (Hq / H).

    Query, key and value may be nested tensors of the jagged layout, (B, H, j, E) or (B, j, E): then out is one, too,
    and attn_mask broadcasts to (B, Hq, longest query, longest key).

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
    if getattr(query, "is_nested", False):
        return nested.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    dropout_p = number(dropout_p, "dropout_p")
    scale = None if scale is None else number(scale, "scale")
    flag(is_causal, "is_causal"), flag(enable_gqa, "enable_gqa")
    if isinstance(attn_mask, _causal_bias_class()):
        if is_causal:
            raise AttentionError("attn_mask is given together with is_causal=True; only one of the two may be set")
        return _with_causal_bias(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    return _operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


scaled_dot_product_attention.__prepare_scriptable__ = script.drop_in
