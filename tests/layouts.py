"""Where the same values may lie: strides of every kind, and memory full of NaN around them or handed out next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]


def nothing_like(tensor: Tensor) -> float:
    """What lies around a tensor: NaN, or False."""
    return torch.nan if tensor.is_floating_point() else False


def poison_free_memory(device: str) -> None:
    """On a GPU: fills what the caching allocator will hand out next, of either of its pools, with 0xFF, a NaN in every
    dtype."""
    if device == "cuda":
        sizes = (1 << 20,) * 32 + (32 << 20,) * 4
        blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
        del blocks


def interior(tensor: Tensor, pad: int = 8) -> Tensor:
    """The same values inside a buffer of NaN: a head and a row on either side, at least `pad` columns on either side;
    with 8, rows of a multiple of them."""
    batch, heads, rows, cols = tensor.shape
    more = -cols % 8 if pad == 8 else 0
    buffer = tensor.new_full((batch, heads + 2, rows + 2, cols + 2 * pad + more), nothing_like(tensor))
    return buffer[:, 1:-1, 1:-1, pad : pad + cols].copy_(tensor)


def sequence_first(tensor: Tensor) -> Tensor:
    """(B, S, H, D) in memory: the layout of a projection."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def wide_rows(tensor: Tensor) -> Tensor:
    """Rows of a multiple of 8 elements, in 8 more."""
    cols = tensor.shape[-1]
    buffer = tensor.new_full((*tensor.shape[:-1], cols + -cols % 8 + 8), nothing_like(tensor))
    return buffer[..., :cols].copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """As q.transpose(-1, -2) leaves it: rows are contiguous, columns are not."""
    return tensor.mT.contiguous().mT


def every_other_column(tensor: Tensor) -> Tensor:
    *lead, cols = tensor.shape
    return tensor.new_full((*lead, 2 * cols), nothing_like(tensor))[..., ::2].copy_(tensor)


def last_dim_outermost(tensor: Tensor) -> Tensor:
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def heads_last(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def odd_start(tensor: Tensor) -> Tensor:
    """One element behind an address of the allocator."""
    memory = tensor.new_full((tensor.numel() + 2,), nothing_like(tensor))
    return memory[1:-1].view(tensor.shape).copy_(tensor)


def odd_rows(tensor: Tensor) -> Tensor:
    """Rows of an odd number of elements: no row but the first is aligned to 16 bytes."""
    cols = tensor.shape[-1]
    buffer = tensor.new_full((*tensor.shape[:-1], cols + 1 + cols % 2), nothing_like(tensor))
    return buffer[..., :cols].copy_(tensor)


ALIGNED: tuple[Layout, ...] = (sequence_first, wide_rows, interior)  # those that TMA reads
LAYOUTS: tuple[Layout, ...] = (
    *ALIGNED, transposed, every_other_column, last_dim_outermost, heads_last, odd_start, odd_rows,
)  # fmt: skip
