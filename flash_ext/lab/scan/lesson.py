"""scan: all sums of the first 1, 2, 3, ... floats. Either few additions or few steps, and how blocks go on together."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Call, Launch, Lesson, Variant
from flash_ext.lab.report import Row, short

THREADS = 256
EACH = 4  # floats a thread of look_back


def by_stretches(size: Sequence[int]) -> Launch:
    return Launch((-(-size[0] // THREADS), 1), (THREADS, 1), (size[0],))


def as_a_whole(size: Sequence[int]) -> Launch:
    """With how many tiles were drawn, a flag of each tile, and two sums of each."""
    tiles = -(-size[0] // (THREADS * EACH))
    memory = ((torch.int32, 1), (torch.int32, tiles), (torch.float32, 2 * tiles))
    return Launch((tiles, 1), (THREADS, 1), (size[0],), memory)


def scans_of_stretches(x: Tensor) -> Tensor:
    """Of 256 floats, those of one block."""
    stretches = -(-len(x) // THREADS)
    padded = torch.nn.functional.pad(x, (0, stretches * THREADS - len(x)))
    return padded.view(stretches, THREADS).cumsum(1).view(-1)[: len(x)]


def scan_of_all(x: Tensor) -> Tensor:
    return x.cumsum(0)


# PyTorch scans a tensor of one dimension by cub::DeviceScan (its ScanUtils.cuh), others by kernels of its own
CUB = Call("torch.cumsum, CUB's scan", lambda x: functools.partial(scan_of_all, x), scan_of_all)


def variant(name: str, expect: str) -> Variant:
    return Variant(name, expect, by_stretches, scans_of_stretches)


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    """Whole numbers of both signs: no sum of them is rounded, whatever the order."""
    return (torch.randint(-8, 9, (size[0],), generator=torch.Generator().manual_seed(0)).float(),)


def additions(row: Row, size: Sequence[int]) -> str:
    return short(row.of_all(row.counted.work.additions) / size[0])


def barriers(row: Row, size: Sequence[int]) -> str:
    return short(row.counted.work.barriers / row.counted.blocks)


LESSON = Lesson(
    name="scan",
    about="All sums of the first floats: work against steps, and blocks that go on from one another.",
    variants=(
        variant("hillis_steele", "8 rounds, in each of which nearly every thread adds: 7 additions a float."),
        variant("blelloch", "3 additions a float, in twice the rounds, with conflicts."),
        variant("padded", "A free word after every 32: the same rounds, 1-way."),
        variant("shuffle", "Rounds in registers: 5.4 additions a float, but 2 barriers."),
        Variant("look_back", "All of x, read once: blocks add up the sums of those before.", as_a_whole, scan_of_all),
    ),
    sizes={"n": (1 << 16, 1 << 26)},
    inputs=inputs,
    elements=lambda size: size[0],
    moved=lambda size: 2 * 4 * size[0],
    pictured=(("shared", False),),
    beside=(CUB,),
    columns={"additions a float": additions, "barriers a block": barriers},
)
