"""bank_conflicts: what a stride costs in shared memory, and two ways out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Launch, Lesson, Variant

BLOCK = 1024


def blocks(n: int) -> int:
    return -(-n // BLOCK)


def launch(size: Sequence[int]) -> Launch:
    return Launch((blocks(size[0]), 1), (256, 1), (size[0],))


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    return (torch.randn(size[0], generator=torch.Generator().manual_seed(0)),)


def whole_blocks(x: Tensor) -> Tensor:
    """With zeros behind, in one row a block."""
    return torch.nn.functional.pad(x, (0, blocks(len(x)) * BLOCK - len(x))).view(-1, BLOCK)


def by_columns(stride: int) -> Callable[[Tensor], Tensor]:
    """Each block as a matrix of so many columns, column after column."""
    return lambda x: whole_blocks(x).view(-1, BLOCK // stride, stride).transpose(1, 2).reshape(-1)


def chunks_swapped(x: Tensor) -> Tensor:
    return whole_blocks(x).view(-1, 2, 4).flip(1).reshape(-1)


def stride(number: int, expect: str) -> Variant:
    return Variant(f"stride_{number}", expect, launch, by_columns(number), "stride", {"STRIDE": number})


LESSON = Lesson(
    name="bank_conflicts",
    about="Shared memory has 32 banks of 4 bytes; words of one bank come one after the other.",
    variants=(
        stride(1, "1-way: 32 neighbouring words, 32 banks."),
        stride(2, "2-way: 16 banks for 32 threads."),
        stride(4, "4-way: 8 banks."),
        stride(8, "8-way: 4 banks."),
        stride(32, "32-way: one bank serves all."),
        Variant("float4", "1-way in each quarter of a warp: four passes for 512 bytes.", launch, chunks_swapped),
        Variant("padding", "Stride 32 with a free word after every 32: 1-way.", launch, by_columns(32)),
        Variant("swizzle", "Stride 32 with places permuted by XOR: 1-way, no memory.", launch, by_columns(32)),
    ),
    sizes={"n": (1 << 16, 1 << 26)},
    inputs=inputs,
    elements=lambda size: blocks(size[0]) * BLOCK,
    moved=lambda size: 2 * 4 * size[0],
    pictured=(("shared", False),),
)
