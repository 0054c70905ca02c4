"""load_tile: rows of d floats, a stride apart, to shared memory. Who loads which element, for every d and alignment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Launch, Lesson, Variant

ROWS, LARGEST_D, THREADS = 32, 256, 128


def whole(number: int, step: int) -> int:
    return -(-number // step) * step


def launch(size: Sequence[int]) -> Launch:
    return Launch((-(-size[0] // ROWS), 1), (THREADS, 1), tuple(size))


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    """The rows as a view of a tensor of whole strides, in which NaN lies between them."""
    rows, d, stride = size
    x = torch.full((rows, stride), torch.nan)
    x[:, :d] = torch.randn(rows, d, generator=torch.Generator().manual_seed(0))
    return (x,)


def tiles(x: Tensor) -> Tensor:
    """The rows without what lies between them, with zeros up to whole tiles and a multiple of 4."""
    rows, d = len(x), int((~x[0].isnan()).sum())
    return torch.nn.functional.pad(x[:, :d], (0, whole(d, 4) - d, 0, whole(rows, ROWS) - rows))


def refusal(size: Sequence[int]) -> str:
    _, d, stride = size
    if d > LARGEST_D:
        return f"D is {d}, the tile in shared memory has room for 1 to {LARGEST_D}."
    return f"STRIDE is {stride}, rows of {d} floats need at least {d}." if stride < d else ""


def variant(name: str, expect: str) -> Variant:
    return Variant(name, expect, launch, tiles)


LESSON = Lesson(
    name="load_tile",
    about="A tile of Q, K or V to shared memory: who loads which element, for every d and every alignment.",
    variants=(
        variant("row_each", "A thread a row: 32 sectors a load, 4-way in shared memory."),
        variant("scalar", "Thread i loads float i of the tile: 4 sectors, or a few more where a row ends."),
        variant("float4", "16 bytes a thread, if d and the stride are multiples of 4; else as scalar."),
        variant("tail", "16 bytes a thread for any d; only a row's last chunk is taken float by float."),
        variant("unaligned", "16 bytes a thread for any stride: a row is shifted in shared memory as it is in x."),
        variant("cp_async", "The same chunks past the registers; the hardware fills a tail with zeros."),
    ),
    sizes={"rows": (256, 1 << 18), "d": (62, 126), "stride": (64, 128)},
    of="(rows x d x stride)",
    inputs=inputs,
    elements=lambda size: whole(size[0], ROWS) * max(whole(size[1], 4), size[2]),
    moved=lambda size: 4 * (size[0] * size[1] + whole(size[0], ROWS) * whole(size[1], 4)),
    pictured=(("global", False), ("shared", True)),
    refusal=refusal,
)
