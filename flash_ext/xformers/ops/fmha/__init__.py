"""``xformers.ops.fmha``: memory_efficient_attention, by ``flash_ext.attention`` and ``attention_varlen``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import flash_ext

from . import attn_bias, ck, ck_splitk, cutlass, cutlass_blackwell, flash, flash3, triton_splitk
from .attn_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)
from .common import AttentionBwOpBase, AttentionFwOpBase, AttentionOp, AttentionOpBase

__all__ = [
    "AttentionBias",
    "AttentionBwOpBase",
    "AttentionFwOpBase",
    "AttentionOp",
    "AttentionOpBase",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "MemoryEfficientAttentionCkOp",
    "MemoryEfficientAttentionCutlassBlackwellOp",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "MemoryEfficientAttentionSplitKCkOp",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "attn_bias",
    "ck",
    "ck_splitk",
    "cutlass",
    "cutlass_blackwell",
    "flash",
    "flash3",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "triton_splitk",
]

MemoryEfficientAttentionCkOp = (ck.FwOp, ck.BwOp)
MemoryEfficientAttentionCutlassBlackwellOp = (cutlass_blackwell.FwOp, cutlass_blackwell.BwOp)
MemoryEfficientAttentionCutlassFwdFlashBwOp = (cutlass.FwOp, flash.BwOp)
MemoryEfficientAttentionCutlassOp = (cutlass.FwOp, cutlass.BwOp)
MemoryEfficientAttentionFlashAttentionOp = (flash.FwOp, flash.BwOp)
MemoryEfficientAttentionSplitKCkOp = (ck_splitk.FwOp, ck.BwOp)

Bias = Tensor | AttentionBias | None


def _four_dims(x: Tensor, bare: bool) -> Tensor:
    """(batch, rows, heads, columns) of what has no heads, or groups of them; broadcast heads of a group are one."""
    if x.dim() == 3:
        return x.unsqueeze(2)
    if x.dim() == 4:
        return x
    if x.dim() != 5:
        raise flash_ext.AttentionError(f"a tensor has {x.dim()} dimensions; it must have 3, 4 or 5")
    return x[:, :, :, 0] if bare and x.stride(3) == 0 else x.flatten(2, 3)


def _four_dims_of_bias(bias: Tensor, dims: int) -> Tensor:
    return {3: lambda: bias.unsqueeze(1) if bias.dim() == 3 else bias, 4: lambda: bias,
            5: lambda: bias.flatten(1, 2) if bias.dim() == 5 else bias}[dims]()  # fmt: skip


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Bias, p: float, scale: float | None, return_lse: bool
) -> Any:
    dims = query.dim()
    if not dims == key.dim() == value.dim():
        raise flash_ext.AttentionError(
            f"query has {dims} dimensions, key {key.dim()} and value {value.dim()}; all must have as many"
        )
    alike = dims == 5 and key.stride(3) == value.stride(3) == 0
    q, k, v = (_four_dims(x, alike and x is not query) for x in (query, key, value))
    options: dict[str, Any] = {"dropout_p": p, "scale": scale, "return_lse": return_lse}
    if isinstance(bias, attn_bias._Sequences):
        if q.shape[0] != 1:
            raise flash_ext.AttentionError(
                f"query has batch size {q.shape[0]}; with {type(bias).__name__} it must be 1"
            )
        options |= bias.band | bias.to(q.device).lengths()
        result = flash_ext.attention_varlen(q[0], bias.rows(k[0]), bias.rows(v[0]), **options)
        out, lse = (result[0][None], result[1][None]) if return_lse else (result[None], None)
    else:
        if isinstance(bias, AttentionBias):
            options |= bias.band
            bias = bias.bias if isinstance(bias, LowerTriangularMaskWithTensorBias) else None
        if bias is not None:
            options["bias"] = _four_dims_of_bias(bias, dims)
        result = flash_ext.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
        out, lse = result if return_lse else (result, None)
        out = out.transpose(1, 2)
    out = out.squeeze(2) if dims == 3 else out.unflatten(2, query.shape[2:4]) if dims == 5 else out
    return (out, lse) if return_lse else out


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Bias = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale * query key^T + attn_bias) value, with gradients.

    Args:
        query: (B, Mq, H, K), (B, Mq, K) for one head, or (B, Mq, G, H, K) for G groups of heads.
        key: (B, Mk, H, K) and so on; heads of a group that are expanded are computed as one, which no gradient hinders.
        value: (B, Mk, H, Kv) and so on; any floating dtype of ``flash_ext.attention``, one for all three.
        attn_bias: a tensor, broadcastable to (B, H, Mq, Mk), or one of ``attn_bias``; None: none.
        p: of dropout. scale: None is K ** -0.5.
        op: not used; flash_ext chooses the kernel.
        output_dtype: of the result; None: query's.

    Returns:
        (B, Mq, H, Kv), or with query's other dimensions.

    Raises:
        AttentionError: shapes, dtypes or values that do not fit.

    Source: Rabe and Staats, arXiv:2112.05682; https://github.com/facebookresearch/xformers.
    """
    out = _attend(query, key, value, attn_bias, p, scale, False)
    return out if output_dtype is None else out.to(output_dtype)


def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Bias = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """:func:`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Bias = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and the log-sum-exp, (B, H, Mq) in float32, without gradients and without dropout."""
    if p != 0.0:
        # The class that programs catch, as xformers raises it.
        raise NotImplementedError(f"p is {p}; it must be 0 here, and memory_efficient_attention takes dropout")
    with torch.no_grad():
        out, lse = _attend(query, key, value, attn_bias, p, scale, True)
    return out if output_dtype is None else out.to(output_dtype), lse
