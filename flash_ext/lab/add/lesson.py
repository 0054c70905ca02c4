"""add: z = x + y, element by element. Nothing is to be gained but by the order in which threads touch memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Launch, Lesson, Variant

BLOCK = 256


def by_place(rows_first: bool) -> Callable[[Sequence[int]], Launch]:
    """A thread for each place of the matrix, in blocks of 32 x 8."""

    def launch(size: Sequence[int]) -> Launch:
        across, down = size if rows_first else reversed(size)
        return Launch((-(-across // 32), -(-down // 8)), (32, 8), tuple(size))

    return launch


def flat(each: int) -> Callable[[Sequence[int]], Launch]:
    """A thread for so many elements, whatever their rows."""
    return lambda size: Launch((-(-size[0] * size[1] // (BLOCK * each)), 1), (BLOCK, 1), tuple(size))


def inputs(size: Sequence[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*size, generator=generator), torch.randn(*size, generator=generator)


def variant(name: str, expect: str, launch: Callable[[Sequence[int]], Launch]) -> Variant:
    return Variant(name, expect, launch, torch.add)


LESSON = Lesson(
    name="add",
    about="Coalescing: what a warp touches at the same time, in sectors of 32 bytes.",
    variants=(
        variant("row_major", "4 sectors a request: 32 neighbouring floats.", by_place(rows_first=False)),
        variant("column_major", "32 sectors a request: each thread in a row of its own.", by_place(rows_first=True)),
        variant("strided", "16 sectors a request, a quarter of each used: neighbours are 4 floats apart.", flat(4)),
        variant("misaligned", "5 sectors a request: the 128 bytes begin one float late.", flat(1)),
        variant("float2", "8 sectors a request, all used: half the instructions of row_major.", flat(2)),
        variant("float4", "16 sectors a request, all used: a quarter of the instructions.", flat(4)),
    ),
    sizes={"rows": (512, 8192), "columns": (512, 8192)},
    inputs=inputs,
    elements=lambda size: size[0] * size[1],
    moved=lambda size: 3 * 4 * size[0] * size[1],
    pictured=(("global", False),),
)
