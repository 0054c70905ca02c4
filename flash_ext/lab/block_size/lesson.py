"""block_size: what a multiprocessor has room for. Rows times head dim times the bytes of an element fill it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flash_ext.lab import picture
from flash_ext.lab.block_size import tiles
from flash_ext.lab.counts import LIMITS, RESERVED, Limits, occupancy
from flash_ext.lab.lessons import Launch, Lesson, Variant
from flash_ext.lab.report import Row

THREADS = 256
COLUMNS = 256  # of x; a kernel of a smaller head dim or of 16 bits sees more rows in the same bytes
TILES = ((32, 64), (64, 64), (128, 64), (192, 64), (32, 128), (64, 128), (96, 128), (32, 256), (48, 256))
HALF_TILES = ((64, 64), (128, 64), (192, 64), (64, 128), (128, 128), (192, 128), (64, 256), (96, 256))


def variant(rows: int, head_dim: int, dtype: torch.dtype) -> Variant:
    def launch(size: Sequence[int]) -> Launch:
        count = size[0] * COLUMNS * torch.float32.itemsize // (head_dim * dtype.itemsize)
        return Launch((-(-count // rows), 1), (THREADS, 1), (count,))

    shared = rows * head_dim * dtype.itemsize
    expect = f"{shared // tiles.KIB} KiB: {' and '.join(map(str, all_blocks(shared)))} blocks."
    defines = {"ROWS": rows, "HEAD_DIM": head_dim, "BYTES": dtype.itemsize}
    name = f"{rows}x{head_dim}" + ("_half" if dtype == torch.float16 else "")
    return Variant(name, expect, launch, reversed_tiles(rows, head_dim, dtype), "tile", defines)


def reversed_tiles(rows: int, head_dim: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def reference(x: Tensor) -> Tensor:
        seen = x.view(dtype).view(-1, head_dim)
        return torch.cat([tile.flip(0) for tile in seen.split(rows)]).view(x.dtype).view(x.shape)

    return reference


def blocks(limits: Limits, shared: int) -> int:
    """Of a multiprocessor, as far as threads and shared memory allow."""
    share, _ = occupancy(limits, THREADS, shared, None)
    return round(share * limits.threads / THREADS)


def all_blocks(shared: int) -> list[int]:
    return [blocks(limits, shared) for limits in LIMITS.values()]


def shared_of(row: Row) -> int:
    return sum(row.counted.counts.shared.values())


def shared_memory(row: Row, size: Sequence[int]) -> str:
    return f"{shared_of(row) / tiles.KIB:g}"


def blocks_of(row: Row, size: Sequence[int]) -> str:
    return " / ".join(map(str, all_blocks(shared_of(row))))


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    return (torch.randn(size[0], COLUMNS, generator=torch.Generator().manual_seed(0)),)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The shared memory of a multiprocessor, a bar for each variant, with the blocks that have room in it."""
    figure, axes = picture.subplots(1, len(LIMITS), (8.8, 0.9 + 0.27 * len(rows)))
    for place, (capability, limits) in zip(axes[0], LIMITS.items(), strict=True):
        whole = limits.shared / tiles.KIB
        for down, row in enumerate(rows):
            each = (shared_of(row) + RESERVED) / tiles.KIB
            count = blocks(limits, shared_of(row))
            place.barh(down, whole, color="0.85")
            place.barh([down] * count, each, left=[each * block for block in range(count)], color="C0", edgecolor="w")
            told = f"{count} blocks, {count * THREADS} threads"
            place.text(whole + 4, down, told, fontsize=7, va="center")
        place.set_yticks(range(len(rows)), [row.variant.name for row in rows])
        place.invert_yaxis()
        place.set_xlim(0, 1.45 * whole)
        place.set_xticks(range(0, int(whole), 50))
        place.set_xlabel("KiB of shared memory", fontsize=7)
        place.set_title(f"{capability}: {whole:g} KiB a multiprocessor", fontsize=8)
        place.tick_params(labelsize=7)
        place.spines[["top", "right"]].set_visible(False)
    title = f"block_size: rows x head dim of floats or halves, in blocks of {THREADS} threads. Grey stays empty."
    figure.suptitle(title, fontsize=8)
    picture.write(figure, path)


LESSON = Lesson(
    name="block_size",
    about="Rows times head dim, in bytes, fill a multiprocessor: a larger head dim wants a smaller tile.",
    variants=(
        *(variant(rows, head_dim, torch.float32) for rows, head_dim in TILES),
        *(variant(rows, head_dim, torch.float16) for rows, head_dim in HALF_TILES),
    ),
    sizes={"rows": (512, 1 << 18)},
    inputs=inputs,
    elements=lambda size: size[0] * COLUMNS,
    moved=lambda size: 2 * 4 * size[0] * COLUMNS,
    pictured=(("global", False), ("shared", False)),
    columns={"shared memory, KiB": shared_memory, f"blocks {tiles.CAPABILITIES}": blocks_of},
    of=f"rows of {COLUMNS} floats",
    tables=tiles.tables,
    draw=draw,
)
