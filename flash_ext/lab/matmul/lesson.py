"""matmul: c = a b. Enough arithmetic for tensor cores to be busy, if only memory brings the numbers in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash_ext.lab.lessons import LARGEST, Launch, Lesson, Peer, Variant

TILE, REGISTER_TILE = 32, 64
STEP = 16  # the inputs are multiples of a sixteenth


def blocks(size: int, each: int) -> int:
    return -(-size // each)


def naive(size: Sequence[int], row_is_x: bool) -> Launch:
    rows, columns, _ = size
    across, down = (rows, columns) if row_is_x else (columns, rows)
    return Launch((blocks(across, 32), blocks(down, 8)), (32, 8), tuple(size))


def by_tiles(tile: int, block: tuple[int, int]) -> Callable[[Sequence[int]], Launch]:
    return lambda size: Launch((blocks(size[1], tile), blocks(size[0], tile)), block, tuple(size))


def inputs(size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Normal numbers, rounded so that tf32 has them, and that every product and sum of some thousand is exact."""
    m, n, k = size
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    return (a * STEP).round() / STEP, (b * STEP).round() / STEP


def refusal(size: Sequence[int]) -> str:
    """The kernels count with int, also where a tile reaches over the end of a matrix."""
    m, n, k = (blocks(one, REGISTER_TILE) * REGISTER_TILE for one in size)
    if (largest := max(m * n, m * k, n * k)) <= LARGEST:
        return ""
    return f"a matrix has {largest:,} elements in tiles of 64 x 64, at most {LARGEST:,} are accepted."


def product(precision: str) -> Callable[[Tensor, Tensor], Tensor]:
    """By torch on a GPU, with inputs that are floats ("ieee") or rounded to "tf32"."""

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision
        try:
            return torch.matmul(a, b)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    return matmul


FLOAT, TF32 = Peer("cuBLAS", product("ieee")), Peer("cuBLAS in tf32", product("tf32"))


def variant(name: str, expect: str, launch: Callable[[Sequence[int]], Launch], peer: Peer = FLOAT) -> Variant:
    return Variant(name, expect, launch, torch.matmul, peer=peer)


LESSON = Lesson(
    name="matmul",
    about="Each number is used many times: who keeps it, and how often it is loaded.",
    variants=(
        variant("row_is_x", "32 sectors for a warp's rows of a.", lambda size: naive(size, row_is_x=True)),
        variant("column_is_x", "x and y exchanged: 1 and 4 sectors.", lambda size: naive(size, row_is_x=False)),
        variant("shared", "Tiles of 32 x 32: a thirty-second of the global loads.", by_tiles(TILE, (TILE, TILE))),
        variant("registers", "4 x 4 a thread: 8 shared loads for 16 products.", by_tiles(REGISTER_TILE, (256, 1))),
        variant("float4", "16 bytes an instruction: 2 shared loads for 16.", by_tiles(REGISTER_TILE, (256, 1))),
        variant("cp_async", "The next tiles are on their way during the products.", by_tiles(REGISTER_TILE, (256, 1))),
        variant("mma", "Tensor cores, on inputs rounded to tf32.", by_tiles(REGISTER_TILE, (128, 1)), TF32),
    ),
    sizes={"m": (128, 2048), "n": (128, 2048), "k": (128, 2048)},
    of="(m x n x k)",
    inputs=inputs,
    elements=lambda size: max(size[i] * size[j] for i, j in ((0, 1), (0, 2), (1, 2))),
    moved=lambda size: 4 * (size[0] * size[1] + size[0] * size[2] + size[1] * size[2]),
    pictured=(("global", False), ("shared", False)),
    refusal=refusal,
    flops=lambda size: 2 * size[0] * size[1] * size[2],
    counted=lambda size: (1 << 21) // size[2],  # which all take k steps
)
