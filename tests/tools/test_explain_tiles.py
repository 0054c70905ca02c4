"""Promise: the tiles that `explain(...).html()` draws are those that the band keeps, and its order of blocks is that of
the kernels (core/tile_schedule.h, kernels/cpu/work.h): every tile that is not skipped is one block's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from h100_plan import BACKWARD, CALL, FORWARD
from helpers import make_inputs
from torch import Tensor

import flash_ext
from flash_ext import reference
from flash_ext.explain import Plan
from flash_ext.explain_tiles import (
    BOUNDARY,
    KEPT,
    MOST_CELLS,
    MOST_STRIPS,
    SKIPPED,
    Band,
    Call,
    Matrix,
    matrix_of,
    order_of,
)


def of_kinds(matrix: Matrix, mask: Tensor) -> list[list[str]]:
    """Kind of each tile by a look at all of its pairs."""
    kinds = []
    for m in range(0, matrix.len_q, matrix.block_m):
        tiles = [mask[m : m + matrix.block_m, n : n + matrix.block_n] for n in range(0, matrix.len_k, matrix.block_n)]
        kinds.append([KEPT if t.all() else BOUNDARY if t.any() else SKIPPED for t in tiles])
    return kinds


def random_call(rng: random.Random) -> Call:
    return replace(
        CALL,
        len_q=rng.randint(1, 90),
        len_k=rng.randint(1, 90),
        causal=rng.random() < 0.4,
        window=tuple(rng.choice([None, 0, rng.randint(0, 100)]) for _ in "lr"),
        align=rng.choice(["top_left", "bottom_right"]),
    )


def test_tiles_are_those_of_the_mask() -> None:
    rng = random.Random(0)
    for _ in range(300):
        call = random_call(rng)
        band = {"causal": call.causal, "window": call.window, "align": call.align}
        mask = reference.band_mask(call.len_q, call.len_k, **band)
        matrix = Matrix(call.len_q, call.len_k, rng.randint(1, 40), rng.randint(1, 40), Band.of(call))
        expected = of_kinds(matrix, mask)
        all_kinds = "".join(map("".join, expected))
        counts = matrix.counts()
        assert [counts.kept, counts.boundary, counts.skipped] == [all_kinds.count(k) for k in (KEPT, BOUNDARY, SKIPPED)]
        for m, row in enumerate(expected):
            assert list(matrix.tiles_of_row(m)) == [n for n, kind in enumerate(row) if kind != SKIPPED], (call, matrix)
        for n, column in enumerate(zip(*expected, strict=True)):
            assert list(matrix.tiles_of_column(n)) == [m for m, kind in enumerate(column) if kind != SKIPPED]
        cells = matrix.cells()
        coarse = replace(matrix, block_m=matrix.block_m * cells.step_m, block_n=matrix.block_n * cells.step_n)
        assert list(cells.rows) == ["".join(row) for row in of_kinds(coarse, mask)]


def test_large_problems_are_drawn_coarsely() -> None:
    matrix = Matrix(300_000, 70_000, 128, 96, Band.of(replace(CALL, len_q=300_000, len_k=70_000)))
    cells = matrix.cells()
    assert (cells.step_m, cells.step_n) == (-(-2344 // MOST_CELLS), -(-730 // MOST_CELLS))
    assert len(cells.rows) <= MOST_CELLS and all(len(row) <= MOST_CELLS for row in cells.rows)
    counts = matrix.counts()
    assert counts.kept + counts.boundary + counts.skipped == 2344 * 730
    far = replace(matrix, len_q=1 << 39, len_k=1 << 39)
    assert far.counts() is None and len(far.cells().rows) == MOST_CELLS
    long = replace(CALL, len_q=100_000, len_k=100_000)
    order = order_of(long, FORWARD, "forward", matrix_of(long, FORWARD, "forward"))
    assert order.count == 782 and len(order.strips) == MOST_STRIPS


GPU = {
    "forward": (FORWARD, "forward"),
    "parts": (replace(FORWARD, splits=3, split_keys=2 * 16, block_m=32, block_n=16), "forward"),
    "backward": (BACKWARD, "backward"),
    "in order": (replace(BACKWARD, schedule="dq in order, persistent"), "backward"),
    "queries": (replace(BACKWARD, schedule="a tile of queries a block"), "backward"),
}


@pytest.mark.parametrize("name", GPU)
def test_blocks_cover_the_tiles_that_are_not_skipped_once(name: str) -> None:
    plan, pass_name = GPU[name]
    rng = random.Random(1)
    for _ in range(100):
        call = random_call(rng)
        plan = replace(
            plan, block_m=rng.randint(4, 40), block_n=plan.block_n if plan.splits > 1 else rng.randint(4, 40)
        )
        assert_covered(call, plan, pass_name)


def assert_covered(call: Call, plan: Plan, pass_name: str) -> None:
    matrix = matrix_of(call, plan, pass_name)
    order = order_of(call, plan, pass_name, matrix)
    times = torch.zeros(matrix.m_blocks, matrix.n_blocks, dtype=torch.int)
    for strip in order.strips:
        (q0, q1), (k0, k1) = strip.queries, strip.keys
        times[q0 // plan.block_m : -(-q1 // plan.block_m), k0 // plan.block_n : -(-k1 // plan.block_n)] += 1
    seen = [[kind != SKIPPED for kind in row] for row in cells_of(matrix)]
    assert [s.number for s in order.strips] == list(range(1, order.count + 1))
    if plan.backend == "cpu":  # a strip is a box around what its rows see
        assert (times >= torch.tensor(seen, dtype=torch.int)).all() and int(times.max()) <= 1
    else:
        assert times.tolist() == torch.tensor(seen, dtype=torch.int).tolist(), (call, plan)
    assert sum(s.tiles for s in order.strips) == sum(map(sum, seen))


def cells_of(matrix: Matrix) -> list[str]:
    return ["".join(matrix.band.kind(matrix.queries(m), matrix.keys(n)) for n in range(matrix.n_blocks))
            for m in range(matrix.m_blocks)]  # fmt: skip


def test_orders_of_blocks() -> None:
    """Longest first, as core/tile_schedule.h has it; where dq has one order, shortest first."""

    def tiles(plan: Plan, name: str, **options: Any) -> list[int]:
        call = replace(CALL, len_q=512, len_k=512, **options)
        return [strip.tiles for strip in order_of(call, plan, name, matrix_of(call, plan, name)).strips]

    assert tiles(FORWARD, "forward") == [4, 3, 2, 1]
    assert tiles(FORWARD, "forward", causal=False) == [4, 4, 4, 4]
    assert tiles(FORWARD, "forward", causal=False, window=(0, None)) == [4, 3, 2, 1]
    assert tiles(BACKWARD, "backward") == [8, 6, 4, 2]
    assert tiles(GPU["in order"][0], "backward") == [2, 4, 6, 8]
    call = replace(CALL, packed=True)
    assert order_of(call, FORWARD, "forward", matrix_of(call, FORWARD, "forward")) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_items_of_the_cpu(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for q, k in (((1, 2, 700, 64), (1, 2, 700, 64)), ((1, 8, 300, 64), (1, 2, 1100, 64)), ((1, 1, 40, 64),) * 2):
            for options in ({"causal": True}, {}, {"window": (90, 10), "align": "bottom_right"}):
                plan = flash_ext.explain(**make_inputs(q, k), **options)
                assert_covered(plan.call, plan.forward, "forward")
                assert_covered(plan.call, plan.backward, "backward")
    finally:
        torch.set_num_threads(before)
