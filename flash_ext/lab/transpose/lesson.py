"""transpose: out = in.T. No arithmetic, each element read once and written once, and still a factor of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Launch, Lesson, Variant


def by_rows(size: Sequence[int]) -> Launch:
    rows, columns = size
    return Launch((-(-rows // 32), -(-columns // 8)), (32, 8), (rows, columns))


def by_columns(size: Sequence[int]) -> Launch:
    rows, columns = size
    return Launch((-(-columns // 32), -(-rows // 8)), (32, 8), (rows, columns))


def by_tiles(size: Sequence[int]) -> Launch:
    rows, columns = size
    return Launch((-(-columns // 32), -(-rows // 32)), (32, 8), (rows, columns))


def by_chunks(size: Sequence[int]) -> Launch:
    """8 threads a row of the tile, all 32 rows at once."""
    return Launch(by_tiles(size).grid, (8, 32), tuple(size))


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(0)),)


def transposed(x: Tensor) -> Tensor:
    return x.t()


LESSON = Lesson(
    name="transpose",
    about="Shared memory turns a tile: both sides coalesced, and no two words of one bank at once.",
    variants=(
        Variant("coalesced_writes", "Loads take 32 sectors, stores 4.", by_rows, transposed),
        Variant("coalesced_reads", "Loads take 4 sectors, stores 32.", by_columns, transposed),
        Variant("shared", "4 sectors on both sides; reading a column of the tile is 32-way.", by_tiles, transposed),
        Variant("padded", "33 floats a row: a column lies in 32 banks, 1-way.", by_tiles, transposed),
        Variant(
            "swizzled", "Row y permutes its places by XOR with y: 1-way, without the padding.", by_tiles, transposed
        ),
        Variant("float4", "16 bytes a thread: a quarter of the global requests, still 1-way.", by_chunks, transposed),
    ),
    sizes={"rows": (512, 8192), "columns": (512, 8192)},
    inputs=inputs,
    elements=lambda size: size[0] * size[1],
    moved=lambda size: 2 * 4 * size[0] * size[1],
    pictured=(("global", False), ("global", True), ("shared", False)),
)
