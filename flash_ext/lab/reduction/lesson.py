"""reduction: the sum of each stretch of x. A sum of all would add the few sums that are left in the same way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from flash_ext.lab import cuda
from flash_ext.lab.lessons import Call, LabError, Launch, Lesson, Variant

THREADS = 256
CLOSE = 1e-5  # of a sum of all, in floats


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


def sum_of_all(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64).float().view(1)


def by_torch(x: Tensor) -> Callable[[], Tensor]:
    return functools.partial(torch.sum, x, 0, keepdim=True)


def by_cub(x: Tensor) -> Callable[[], Tensor]:
    """cub::DeviceReduce, which the package cuda-cccl compiles at run time; its memory is there before."""
    major = (torch.version.cuda or "13").split(".")[0]
    try:
        from cuda.compute import OpKind, make_reduce_into

        out, nothing = torch.empty(1, device=x.device), np.zeros(1, np.float32)
        reducer = make_reduce_into(d_in=x, d_out=out, op=OpKind.PLUS, h_init=nothing)
        reduce = functools.partial(
            reducer, d_in=x, d_out=out, num_items=len(x), op=OpKind.PLUS, h_init=nothing, stream=cuda.TorchStream()
        )
        memory = torch.empty(reduce(temp_storage=None), dtype=torch.uint8, device=x.device)
    except Exception as error:  # without the package, of another version, without a driver: no base is common
        needed = f"pip install 'cuda-cccl[minimal-cu{major}]>=1.0'"
        raise LabError(f"CUB's reduction is left out: it needs {needed} ({error}).") from None

    def call() -> Tensor:
        reduce(temp_storage=memory)
        return out

    return call


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
    beside=(
        Call("torch.sum, its own kernel", by_torch, sum_of_all, CLOSE),
        Call("CUB's reduction", by_cub, sum_of_all, CLOSE),
    ),
)
