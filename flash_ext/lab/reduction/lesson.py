"""reduction: the sum of each stretch of x. A sum of all would add the few sums that are left in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import Launch, Lesson, Variant

THREADS = 256


def blocks(n: int, each: int) -> int:
    """Of so many floats a thread."""
    return -(-n // (THREADS * each))


def sums(each: int) -> Callable[[Tensor], Tensor]:
    """Of every block's stretch."""

    def reference(x: Tensor) -> Tensor:
        padding = blocks(len(x), each) * THREADS * each - len(x)
        return torch.nn.functional.pad(x, (0, padding)).view(-1, THREADS * each).sum(1)

    return reference


def variant(name: str, each: int, expect: str) -> Variant:
    def launch(size: Sequence[int]) -> Launch:
        return Launch((blocks(size[0], each), 1), (THREADS, 1), (size[0],))

    return Variant(name, expect, launch, sums(each))


def inputs(size: Sequence[int]) -> tuple[Tensor]:
    """Between 0 and 1: sums of one sign, so that their rounding is small beside them in any order."""
    return (torch.rand(size[0], generator=torch.Generator().manual_seed(0)),)


LESSON = Lesson(
    name="reduction",
    about="Many numbers become one: which pairs are added, and where they meet.",
    variants=(
        variant("interleaved", 1, "Sums lie ever further apart: 2, 4, 8 words of a bank at once."),
        variant("sequential", 1, "The second half is added to the first: neighbours, 1-way."),
        variant("first_add", 2, "Two floats a thread, added in a register: half the blocks."),
        variant("shuffle", 2, "Threads of a warp read each other's registers: hardly any shared memory."),
        variant("float4", 4, "16 bytes a load: a quarter of the requests."),
    ),
    sizes={"n": (1 << 16, 1 << 26)},
    inputs=inputs,
    elements=lambda size: size[0],
    moved=lambda size: 4 * size[0],
    pictured=(("shared", False),),
)
