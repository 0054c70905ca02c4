"""``flash_attn.layers.rotary``: rotary embedding (Su et al., arXiv:2104.09864) in torch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.errors import AttentionError

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_torch"]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (..., heads, E), cos and sin (..., 1, R / 2): pairs of the first R columns turned, in float32 or wider."""
    columns = 2 * cos.shape[-1]
    if columns > x.shape[-1]:
        raise AttentionError(
            f"cos has {cos.shape[-1]} columns, for {columns} columns of x, which has {x.shape[-1]}; at most half of "
            "those of x are accepted"
        )
    turned, rest = x[..., :columns], x[..., columns:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(dtype), sin.to(dtype)
    pairs = turned.to(dtype).unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (B, L, H, E) with cos and sin (L, R / 2) or (B, L, R / 2): row i turned by the angles of row i."""
    return _turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def sequence_of_rows(rows: int, cu_seqlens: Tensor) -> Tensor:
    """(rows,) int64: the sequence of each packed row, found on the device."""
    return torch.bucketize(torch.arange(rows, device=cu_seqlens.device), cu_seqlens[1:-1].long(), right=True)


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """int64, of each row: its number in its sequence, and the sequence's offset."""
    if cu_seqlens is None:
        places = torch.arange(x.shape[1], device=x.device)
        return places + (offsets.long().unsqueeze(-1) if isinstance(offsets, Tensor) else offsets)
    sequence = sequence_of_rows(x.shape[0], cu_seqlens)
    places = torch.arange(x.shape[0], device=x.device) - cu_seqlens.long()[sequence]
    return places + (offsets.long()[sequence] if isinstance(offsets, Tensor) else offsets)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turns pairs of the first R columns of every row by the angles of its position.

    Args:
        x: (B, L, H, E), or with ``cu_seqlens`` (rows, H, E); any floating dtype, with gradient.
        cos, sin: (positions, R / 2), R at most E.
        interleaved: columns 2c and 2c + 1 are a pair; False: c and c + R / 2.
        inplace: writes to x, and returns it.
        seqlen_offsets: position of the first row of each sequence, (B,) or one for all. Rows whose position is beyond
            the tables take the last one.
        cu_seqlens: (B + 1,) int32, where sequences begin and end among the rows.
        max_seqlen: the length of the longest of them; not needed here.

    Returns:
        x's shape and dtype. Computed in float32 (float64 for float64), rounded once.

    Raises:
        AttentionError: cos has more columns than half of x, or too few positions where that is known on the host.
    """
    if isinstance(seqlen_offsets, int) and cu_seqlens is None and x.shape[1] + seqlen_offsets > cos.shape[0]:
        raise AttentionError(
            f"cos has {cos.shape[0]} positions; x has {x.shape[1]} rows from position {seqlen_offsets} on"
        )
    at = _positions(x, seqlen_offsets, cu_seqlens).clamp(0, cos.shape[0] - 1)
    out = _turned(x, cos[at].unsqueeze(-2), sin[at].unsqueeze(-2), interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb
