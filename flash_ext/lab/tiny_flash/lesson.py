"""tiny_flash: attention, from the formula to tiles on tensor cores. The kernels of flash_ext do the same, and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import flash_ext
from flash_ext.lab.lessons import Launch, Lesson, Peer, Variant

HEAD_DIM = 64
STEP = 16  # the inputs are multiples of a sixteenth, which tf32 has
# tf32 rounds each of P to a 2048th of it at most, so a mean of v is off by a 2048th of the largest v: not so little
# beside a mean of many.
TF32 = 2e-3


def by_rows(rows: int, block: tuple[int, int]) -> Callable[[Sequence[int]], Launch]:
    """Of so many rows a block."""
    return lambda size: Launch((-(-size[1] // rows), size[0]), block, (size[1],))


def inputs(size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (*size, HEAD_DIM)
    q, k, v = ((torch.randn(shape, generator=generator) * STEP).round() / STEP for _ in "qkv")
    return q, k, v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By flash_ext, whose heads are dimension 1."""
    return flash_ext.attention(q[None], k[None], v[None])[0]


OURS = Peer("flash_ext in float32", attention)


def variant(name: str, expect: str, launch: Callable[[Sequence[int]], Launch], close: float | None = None) -> Variant:
    return Variant(name, expect, launch, attention, peer=OURS, close=close)


LESSON = Lesson(
    name="tiny_flash",
    about="Attention without its matrix of scores: who holds a row, and who loads a key.",
    variants=(
        variant("naive", "Each score three times, a row a thread.", by_rows(64, (64, 1))),
        variant("online", "One pass: each score once.", by_rows(64, (64, 1))),
        variant("warp", "A row a warp: few registers, neighbours are loaded, shuffles add.", by_rows(4, (32, 4))),
        variant("tile", "64 rows share a tile of keys in shared memory.", by_rows(64, (64, 1))),
        variant("mma", "Tensor cores multiply, P stays in registers.", by_rows(64, (128, 1)), TF32),
    ),
    sizes={"heads": (1, 32), "tokens": (64, 2048)},
    of="(heads x tokens)",
    inputs=inputs,
    elements=lambda size: HEAD_DIM * size[0] * size[1],
    moved=lambda size: 4 * 4 * HEAD_DIM * size[0] * size[1],
    pictured=(("global", False), ("shared", False)),
    flops=lambda size: 4 * HEAD_DIM * size[0] * size[1] * size[1],
    counted=lambda size: max(2048, (1 << 15) // size[1]),  # which all take as many steps as there are keys
)
