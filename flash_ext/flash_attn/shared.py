"""What the functions of both of FlashAttention's interfaces share: options in flash_ext's names, and layouts."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from flash_ext.errors import AttentionError
from flash_ext.flash_attn.layers.rotary import apply_rotary_emb, sequence_of_rows


def _window(window_size: Any) -> tuple[int | None, int | None] | None:
    """Also of numbers in tensors or of numpy, which the other package takes."""
    if len(window_size) != 2:
        raise AttentionError(
            f"window_size has {len(window_size)} entries; it must be (left, right), -1 for an open side"
        )
    left, right = (operator.index(side) for side in window_size)
    if left < 0 and right < 0:
        return None
    return None if left < 0 else left, None if right < 0 else right


def options(
    causal: bool, window_size: Any, softcap: float, scale: float | None, slopes: Tensor | None = None
) -> dict[str, Any]:
    """Of ``flash_ext.attention`` and its like."""
    return {
        "causal": bool(causal),
        "window": _window(window_size),
        "softcap": softcap if softcap > 0 else 0.0,
        "alibi_slopes": slopes.detach() if isinstance(slopes, Tensor) else slopes,
        "scale": scale,
    }


def length(value: Any) -> int:
    """A number of rows, also of a tensor or of numpy."""
    return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)


def split(packed: Tensor, name: str, dims: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of a tensor that holds query, key and value, or the last two, in its third dimension from the end."""
    if packed.dim() != dims or packed.shape[-3] != parts:
        shape = ("B, L, " if dims == 5 else "rows, ") + f"{parts}, heads, E"
        raise AttentionError(f"{name} has shape {tuple(packed.shape)}; it must be ({shape})")
    return packed.unbind(-3)


def slots_as_sequences(
    k_cache: Tensor, v_cache: Tensor, batch: int, rows: Tensor, first: Tensor | None, slots: Tensor | None
) -> dict[str, Any]:
    """Caches (slots, S, heads, E) as packed sequences of ``attention_varlen``, rows ``first[b]`` to ``rows[b]`` of each
    slot. With ``slots`` (B,) they are copied."""
    room = k_cache.shape[1]
    key, value = (x[:batch] if slots is None else x.index_select(0, slots) for x in (k_cache, v_cache))
    start = torch.zeros_like(rows) if first is None else first.clamp(0, room)
    places = torch.arange(batch + 1, device=key.device) * room
    return {
        "key": key.flatten(0, 1),
        "value": value.flatten(0, 1),
        "cu_seqlens_k": torch.cat((places[:-1] + start, places[-1:])).int(),
        "seqused_k": (rows.clamp(max=room) - start).clamp(min=0).int(),
        "max_k": room,
    }


def turned_queries(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    offsets: Tensor,
    moves: bool,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """q (B, queries, H, E) or packed: query i turned by the angles of ``offsets[b]``, plus i if ``moves``."""
    if moves:
        return apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        rows = q.flatten(1, 2).unsqueeze(1)
    else:
        rows, offsets = q.unsqueeze(1), offsets[sequence_of_rows(q.shape[0], cu_seqlens)]
    return apply_rotary_emb(rows, cos, sin, interleaved, seqlen_offsets=offsets).view(q.shape)
