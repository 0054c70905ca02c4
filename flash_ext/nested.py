"""Nested tensors of the jagged layout, (B, H, j, E): their rows are packed sequences, and are attended to as such.

PyTorch's own path reads the lengths on the host, has no masks with most kernels, and no second derivative.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from flash_ext import ops
from flash_ext.errors import AttentionError
from flash_ext.varlen import attention_varlen

_Sequences = tuple[Tensor, Tensor | None, int | None, int | None]  # offsets, lengths, the shortest, the longest


def _sequences(tensor: Tensor) -> _Sequences:
    return tensor.offsets(), tensor.lengths(), tensor._maybe_min_seqlen, tensor._maybe_max_seqlen


def _flat(values: Tensor, has_heads: bool) -> Tensor:
    """(rows, heads, ...) of a nested tensor's values, (heads, rows, ...) or (rows, ...)."""
    return values.transpose(0, 1) if has_heads else values.unsqueeze(1)


def _nest(rows: Tensor, has_heads: bool, sequences: _Sequences) -> Tensor:
    """(B, heads, j, ...) or (B, j, ...) of (rows, heads, ...)."""
    offsets, lengths, shortest, longest = sequences
    rows = rows if has_heads else rows.squeeze(1)
    make = torch.nested.nested_tensor_from_jagged
    if not torch.compiler.is_compiling():  # below Dynamo that one refuses to be traced
        from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths as make
    nested = make(rows, offsets, lengths, min_seqlen=shortest, max_seqlen=longest)
    return nested.transpose(1, 2) if has_heads else nested


# NOTE: PyTorch's views between a nested tensor and its values have no second derivative (torch 2.9 to 2.12), these do.
class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        ctx.has_heads, ctx.sequences = tensor._ragged_idx == 2, _sequences(tensor)
        return _flat(tensor._values.detach(), ctx.has_heads)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _Nest.apply(grad, ctx.has_heads, ctx.sequences)


class _Nest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, has_heads: bool, sequences: _Sequences) -> Tensor:
        return _nest(rows.detach(), has_heads, sequences)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Flat.apply(grad), None, None


def _is_traced(tensor: Tensor) -> bool:
    """By Dynamo, or below it by AOTAutograd: neither knows second derivatives, and PyTorch's views are theirs."""
    return torch.compiler.is_compiling() or type(tensor._values) is not Tensor


def _rows(tensor: Tensor, name: str) -> Tensor:
    """(rows, heads, cols), without a copy."""
    if not tensor.is_nested or tensor.layout != torch.jagged:
        kind = f"a nested tensor of layout {tensor.layout}" if tensor.is_nested else "not nested"
        raise AttentionError(
            f"{name} is {kind}; query, key and value must all be nested tensors of layout torch.jagged, or none"
        )
    if (tensor.dim(), tensor._ragged_idx) not in ((3, 1), (4, 2)):
        sizes = tuple("j" if i == tensor._ragged_idx else int(n) for i, n in enumerate(tensor.shape))
        raise AttentionError(
            f"{name} of shape {sizes} has its ragged dimension at {tensor._ragged_idx}; it must be (B, heads, j, "
            "head_dim) or (B, j, head_dim)"
        )
    if _is_traced(tensor):
        return _flat(tensor.values(), tensor._ragged_idx == 2)
    return _Flat.apply(tensor)


def _longest(tensor: Tensor, rows: int, mask: Tensor | None, dim: int) -> int:
    """At least the longest sequence, and what a mask is made for."""
    if mask is not None and mask.dim() >= -dim and mask.shape[dim] != 1:
        return mask.shape[dim]
    known = tensor._maybe_max_seqlen
    return rows if known is None else known


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention_varlen`` of the rows; out, and lse (B, Hq, j), are nested as query is.

    Masks and biases broadcast to (B, Hq, longest query, longest key).
    """
    named = ((query, "query"), (key, "key"), (value, "value"))
    for tensor, name in named:
        if tensor.dtype == torch.float8_e4m3fn and tensor.requires_grad:
            raise AttentionError(
                f"{name} is a nested tensor of {tensor.dtype} that wants a gradient, which would be rounded to it; "
                "pass what quantize_fp8(..., packed=True) returns to attention_varlen"
            )
    q, k, v = (_rows(t, name) for t, name in named)
    scores = mask if mask is not None else bias
    sequences, (offsets_k, used_k, *_) = _sequences(query), _sequences(key)
    offsets_q, used_q, *_ = sequences
    int32 = torch.int32
    result = attention_varlen(
        q,
        k,
        v,
        offsets_q.to(int32),
        None if offsets_k is offsets_q else offsets_k.to(int32),
        max_q=_longest(query, q.shape[0], scores, -2),
        max_k=_longest(key, k.shape[0], scores, -1),
        seqused_q=None if used_q is None else used_q.to(int32),
        seqused_k=None if used_k is None else used_k.to(int32),
        mask=mask,
        bias=bias,
        **options,
    )
    nest = _nest if _is_traced(query) else _Nest.apply
    has_heads = query.dim() == 4
    if not isinstance(result, tuple):
        return nest(result, has_heads, sequences)
    out, lse = result
    return nest(out, has_heads, sequences), nest(lse.transpose(0, 1), has_heads, sequences)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The drop-in; heads are grouped where ``enable_gqa`` says so, else they must agree."""
    if attn_mask is not None and is_causal:
        raise AttentionError("attn_mask is given together with is_causal=True; only one of the two may be set")
    is_nested = key.is_nested and value.is_nested  # else `attention` says so
    if is_nested and not enable_gqa and query.dim() == 4 and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise AttentionError(
            f"query, key and value have {query.shape[1]}, {key.shape[1]} and {value.shape[1]} heads; they must be "
            "equal, or grouped with enable_gqa=True"
        )
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    out = attention(
        query,
        key,
        value,
        mask=attn_mask if is_bool else None,
        bias=None if is_bool else attn_mask,
        causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    assert isinstance(out, Tensor)
    return out


def register() -> None:
    """Called when ``torch.nested._internal.ops`` has been imported, where PyTorch's attention of nested tensors is
    called by Python: within ``enable()`` ours is."""
    theirs = sys.modules["torch.nested._internal.ops"]
    attend = getattr(theirs, "jagged_scaled_dot_product_attention", None)
    if attend is None or ops.C is None:
        return
    attend = getattr(attend, "_pytorchs", attend)  # flash_ext was imported before

    def serve(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any):
        is_ours = (query.dim(), query._ragged_idx) in ((3, 1), (4, 2)) and not getattr(attn_mask, "is_nested", False)
        if is_ours and ops.C.takes_nested_call():
            return scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        return attend(query, key, value, attn_mask, *args, **kwargs)

    serve._pytorchs = attend
    theirs.jagged_scaled_dot_product_attention = serve
